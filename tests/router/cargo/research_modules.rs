//! Our modules under `cargo test`, in the router's own crate graph and with its own lock file.
//!
//! The build puts this file into `bindings/python/tests`, where cargo finds it by itself. The standard-library-only
//! modules are compiled in with their unit tests; those that use the router's types are reached through the crate.

#![allow(dead_code)]

use std::{panic::AssertUnwindSafe, sync::Arc, time::Duration};

use smg::{
    config::{RouterConfig, RoutingMode},
    core::{AttachedBody, BasicWorkerBuilder, Worker},
    routers::{
        error,
        http::{
            pd_dp,
            pd_load::{check, reserve, turn, Guards, GATE},
        },
    },
};
use tokio::{sync::oneshot, task::JoinSet, time::timeout};

#[path = "../../../src/routers/http/research/pd_ack.rs"]
mod pd_ack;
#[path = "../../../src/routers/http/research/pd_gates.rs"]
mod pd_gates;
#[path = "../../../src/routers/http/research/pd_race.rs"]
mod pd_race;
#[path = "../../../src/routers/http/research/pd_rank.rs"]
mod pd_rank;
#[path = "../../../src/routers/http/research/pd_relay.rs"]
mod pd_relay;
#[path = "../../../src/routers/http/research/pd_settings.rs"]
mod pd_settings;

fn pd() -> RouterConfig {
    RouterConfig {
        mode: RoutingMode::PrefillDecode {
            prefill_urls: vec![],
            decode_urls: vec![],
            prefill_policy: None,
            decode_policy: None,
        },
        ..RouterConfig::default()
    }
}

/// A pair of workers; the gate is on for this whole process.
fn pair() -> [Arc<dyn Worker>; 2] {
    std::env::set_var(GATE, "1");
    check(&pd()).expect("the gate is fine in PD mode");
    [1, 2].map(|port| {
        let worker: Arc<dyn Worker> = Arc::new(BasicWorkerBuilder::new(format!("http://127.0.0.1:{port}")).build());
        worker
    })
}

fn loads(pair: &[Arc<dyn Worker>; 2]) -> [usize; 2] {
    [pair[0].load(), pair[1].load()]
}

async fn reserved(pair: &[Arc<dyn Worker>; 2]) -> Guards {
    reserve(turn().await, &pair[0], &pair[1], None)
}

#[tokio::test]
async fn a_panic_in_the_handler_releases_both_loads() {
    let pair = pair();
    let (inside, of) = (pair.clone(), pair.clone());
    let (counted, seen) = oneshot::channel();
    let handler = tokio::spawn(async move {
        let _guards = reserved(&inside).await;
        counted.send(loads(&inside)).expect("the test listens");
        tokio::task::yield_now().await;
        panic!("a defect in the handler");
    });
    assert_eq!(seen.await.expect("it was counted"), [1, 1]);
    assert!(handler.await.expect_err("it panicked").is_panic());
    assert_eq!(loads(&of), [0, 0]);
}

#[tokio::test]
async fn the_routing_key_of_the_request_counts_until_the_request_ends() {
    let pair = pair();
    let keys = |pair: &[Arc<dyn Worker>; 2]| [0, 1].map(|leg| pair[leg].worker_routing_key_load().value());
    let mut request = error::bad_request("any", "that has headers");
    request.headers_mut().insert("x-smg-routing-key", "session".parse().expect("a value"));
    let guards = reserve(turn().await, &pair[0], &pair[1], Some(request.headers()));
    assert_eq!((loads(&pair), keys(&pair)), ([1, 1], [1, 1]));
    drop(guards);
    assert_eq!((loads(&pair), keys(&pair)), ([0, 0], [0, 0]));
}

#[tokio::test]
async fn a_panic_while_it_holds_the_turn_does_not_block_the_next_request() {
    let pair = pair();
    let handler = tokio::spawn(async move {
        let _turn = turn().await;
        panic!("a defect in a policy");
    });
    assert!(handler.await.expect_err("it panicked").is_panic());
    let guards = timeout(Duration::from_secs(10), reserved(&pair)).await.expect("the turn comes");
    assert_eq!(loads(&pair), [1, 1]);
    drop(guards);
    assert_eq!(loads(&pair), [0, 0]);
}

#[tokio::test]
async fn a_response_that_is_dropped_in_a_panic_releases_both_loads() {
    let pair = pair();
    let guards = reserved(&pair).await.expect("the gate is on");
    let response = AttachedBody::wrap_response(error::bad_request("a", "b"), guards);
    assert_eq!(loads(&pair), [1, 1]);
    let sending = std::panic::catch_unwind(AssertUnwindSafe(move || {
        let _body = response.into_body();
        panic!("a defect while it is sent");
    }));
    assert!(sending.is_err());
    assert_eq!(loads(&pair), [0, 0]);
}

#[tokio::test]
async fn a_request_that_is_cancelled_while_it_waits_for_its_turn_counts_for_nothing() {
    let pair = pair();
    let held = turn().await;
    let waiting = pair.clone();
    let second = tokio::spawn(async move { drop(reserved(&waiting).await) });
    tokio::time::sleep(Duration::from_millis(20)).await;
    second.abort();
    assert!(second.await.expect_err("it was cancelled").is_cancelled());
    drop(held);
    assert_eq!(loads(&pair), [0, 0]);
    assert!(timeout(Duration::from_secs(10), turn()).await.is_ok(), "the turn is lost");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn simultaneous_requests_see_each_other_when_they_choose() {
    let workers: Vec<[Arc<dyn Worker>; 2]> = (0..4).map(|_| pair()).collect();
    let workers = Arc::new(workers);
    for _ in 0..50 {
        let mut requests = JoinSet::new();
        for _ in 0..32 {
            let workers = workers.clone();
            requests.spawn(async move {
                let turn = turn().await;
                let least = workers.iter().min_by_key(|pair| pair[1].load()).expect("there are four");
                // Whoever chooses without being counted at once gives the others the time to choose the same.
                tokio::task::yield_now().await;
                reserve(turn, &least[0], &least[1], None)
            });
        }
        let guards = requests.join_all().await;
        assert_eq!(workers.iter().map(|pair| pair[1].load()).collect::<Vec<_>>(), [8, 8, 8, 8]);
        drop(guards);
        assert!(workers.iter().all(|pair| loads(pair) == [0, 0]));
    }
}

#[test]
fn a_rank_in_a_configured_url_is_an_error_that_says_what_to_write() {
    let mut config = pd();
    if let RoutingMode::PrefillDecode { decode_urls, .. } = &mut config.mode {
        decode_urls.push("http://127.0.0.1:1@2".to_string());
    }
    let said = pd_dp::check(&config).expect_err("a rank");
    assert!(said.contains("--dp-aware"), "{said}");
    assert!(pd_dp::check(&pd()).is_ok());
}
