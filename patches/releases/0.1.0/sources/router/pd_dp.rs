//! Requests of a prefill/decode pair whose workers have data-parallel ranks.
//!
//! With `--dp-aware` each rank is a worker of its own. The stock PD router sends to the rank's *name* as if it were a
//! URL and never tells the engine which rank was meant. Here each leg gets its own body with its own rank, and both get
//! the prefill rank, which the engines need to find each other when it is not the one that the room implies.
//! Without `--dp-aware` nothing here changes or copies a request.

use std::borrow::Cow;

use axum::response::Response;
use serde_json::Value;

use super::pd_rank::{check_wish, refuse_rank, sent};
use crate::{
    config::{RouterConfig, RoutingMode},
    core::Worker,
    routers::error,
};

/// The names under which a request may ask the engine for a rank: today's and the deprecated one.
const WISHES: [&str; 2] = ["routed_dp_rank", "data_parallel_rank"];
const PREFILL_RANK: &str = "disagg_prefill_dp_rank";

/// Refuse worker URLs with ranks in the configuration, at start-up.
///
/// # Errors
/// Names the first such URL.
pub fn check(config: &RouterConfig) -> Result<(), String> {
    let urls: Vec<&String> = match &config.mode {
        RoutingMode::PrefillDecode {
            prefill_urls,
            decode_urls,
            ..
        } => prefill_urls.iter().map(|(url, _)| url).chain(decode_urls).collect(),
        RoutingMode::Regular { worker_urls } => worker_urls.iter().collect(),
        RoutingMode::OpenAI { .. } => Vec::new(),
    };
    urls.into_iter().try_for_each(|url| refuse_rank(url))
}

/// Refuse a worker with a rank in its URL that is added while the router runs: a 400 that says what to write.
pub fn refuse_worker(url: &str) -> Option<Response> {
    refuse_rank(url)
        .err()
        .map(|message| error::bad_request("rank_in_worker_url", message))
}

/// The bodies of both legs: the request itself unless a leg goes to one of several ranks.
///
/// # Errors
/// A 400: a worker's URL carries a rank although the worker has none, the client asks for a rank that does not exist, or
/// the request is no JSON object.
pub async fn legs<'a>(
    request: &'a Value,
    prefill: &dyn Worker,
    decode: &dyn Worker,
) -> Result<(Cow<'a, Value>, Cow<'a, Value>), Response> {
    let refuse = |message| error::bad_request("data_parallel_rank", message);
    for worker in [prefill, decode] {
        refuse_rank(worker.base_url()).map_err(refuse)?;
    }
    let prefill_rank = sent(prefill.dp_rank(), prefill.dp_size());
    let decode_rank = sent(decode.dp_rank(), decode.dp_size());
    if prefill_rank.is_none() && decode_rank.is_none() {
        return Ok((Cow::Borrowed(request), Cow::Borrowed(request)));
    }
    let ranks = prefill.dp_size().max(decode.dp_size()).unwrap_or(1);
    for name in WISHES {
        let wish = request.get(name).filter(|wish| !wish.is_null()).map(Value::to_string);
        check_wish(name, wish.as_deref(), ranks).map_err(refuse)?;
    }
    Ok((
        Cow::Owned(
            leg(request, prefill, prefill_rank, prefill_rank)
                .await
                .map_err(refuse)?,
        ),
        Cow::Owned(leg(request, decode, decode_rank, prefill_rank).await.map_err(refuse)?),
    ))
}

/// One leg's body: the router's choice of ranks in the place of the client's.
async fn leg(
    request: &Value,
    worker: &dyn Worker,
    rank: Option<usize>,
    prefill_rank: Option<usize>,
) -> Result<Value, String> {
    let mut body = request.clone();
    let fields = body.as_object_mut().ok_or("the request is no JSON object")?;
    for name in WISHES.into_iter().chain([PREFILL_RANK]) {
        fields.remove(name);
    }
    if let Some(rank) = prefill_rank {
        fields.insert(PREFILL_RANK.to_string(), Value::from(rank));
    }
    match rank {
        Some(_) => worker.prepare_request(body).await.map_err(|error| error.to_string()),
        None => Ok(body),
    }
}
