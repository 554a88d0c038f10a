//! The prefix tree under `cargo test`: a request and an eviction at the same node must both come to an end.
//!
//! Needs nothing of ours, so that it runs in the stock tree too. A thread that waits for ever is left to the end of the
//! process.

use std::{
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc, Arc,
    },
    thread,
    time::Duration,
};

use smg::policies::tree::Tree;

/// Evicted one by one before the long text, which is the youngest: the time in which the request gets hold of its node.
const OLDER: u32 = 20_000;
/// Comparing and splitting such a text takes longer than evicting all that is older; meanwhile its node is held.
const LONG: usize = 32 << 20;
/// Far more than either takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// Split the node of a long text, below `first`, while all texts are being evicted. None: somebody waits for ever.
fn split_while_evicting(first: char) -> Option<()> {
    let tree = Arc::new(Tree::new());
    for letter in (0x4e00..0x4e00 + OLDER).filter_map(char::from_u32) {
        tree.insert(&format!("s{letter}"), "evicted");
    }
    let long = first.to_string().repeat(LONG);
    tree.insert(&long, "evicted");
    // While this one is left, the eviction has no reason to look at the root's children before it takes the long text.
    tree.insert("s younger", "evicted");
    let held = |tree: &Tree| tree.tenant_char_count.get("evicted").map(|size| *size);
    let full = held(&tree);
    let (tell, told) = mpsc::channel();
    let (evicted, ended) = (tree.clone(), tell.clone());
    thread::spawn(move || {
        evicted.evict_tenant_by_size(0);
        let _ = ended.send(());
    });
    let splitting = tree.clone();
    thread::spawn(move || {
        // The first text is gone: the eviction knows by now what it will take, the long one last.
        while held(&splitting) == full {
            thread::yield_now();
        }
        splitting.insert(&long[..LONG / 2], "asking");
        let _ = tell.send(());
    });
    (0..2).try_for_each(|_| told.recv_timeout(PATIENCE).ok())?;
    assert_eq!(tree.prefix_match_tenant(&first.to_string().repeat(9), "asking").len(), 9, "the request left no trace");
    Some(())
}

#[test]
fn an_eviction_and_a_request_at_one_node_both_come_to_an_end() {
    // Several times: a thread that gets no processor for a while comes too late to meet the other.
    for first in ['b', 'k', 'x'] {
        assert!(split_while_evicting(first).is_some(), "the request and the eviction wait for each other");
    }
}

#[test]
fn the_removal_of_a_worker_and_requests_at_its_nodes_come_to_an_end() {
    let tree = Arc::new(Tree::new());
    let turns = Arc::new(AtomicUsize::new(0));
    let (tell, told) = mpsc::channel();
    for tenant in ["removed", "asking"] {
        let (tree, turns, tell) = (tree.clone(), turns.clone(), tell.clone());
        thread::spawn(move || {
            for turn in 0..20_000 {
                // A short text after a long one splits its node.
                tree.insert(&format!("{}{}", turn / 6, "x".repeat(600 - turn % 6 * 100)), tenant);
                if turn % 50 == 0 {
                    tree.remove_tenant("removed");
                }
                turns.fetch_add(1, Ordering::Relaxed);
            }
            let _ = tell.send(());
        });
    }
    // All of it takes longer than the patience on a busy machine; what waits for ever makes no turn.
    for _ in 0..2 {
        let mut made = turns.load(Ordering::Relaxed);
        while told.recv_timeout(PATIENCE).is_err() {
            let now = turns.load(Ordering::Relaxed);
            assert_ne!(now, made, "the removal and the request wait for each other");
            made = now;
        }
    }
}
