//! Load counted at dispatch: both legs of a request count from the moment their pair is chosen.
//!
//! The stock router counts a streamed request only once the decode worker's headers have come, which for chat is with
//! the first token. Until then a burst sees loads of zero and piles up. With `SMG_PD_LOAD_AT_DISPATCH` on:
//!
//! * choosing a pair and counting it is one step under one lock, so that simultaneous arrivals see each other;
//! * the two guards travel from there into the response's body. Nothing decrements by hand: whatever ends the request
//!   (its end, a failed leg, a retry, a client that is gone, a panic) drops them, once;
//! * the decode stream goes to the client without a task between them ([`super::pd_relay`]), and ends with its client,
//!   not with the next token.

use std::{
    error::Error,
    sync::{Arc, OnceLock},
};

use axum::{
    body::{Body, Bytes},
    http::{header::CONTENT_TYPE, HeaderMap, HeaderValue, StatusCode},
    response::Response,
};
use futures_util::{
    stream::{poll_fn, Stream},
    StreamExt,
};
use memchr::memmem;
use tokio::sync::{Mutex, MutexGuard};
use tracing::{error, info};

use super::{
    pd_gates::{read_flag, Topology, SERIES},
    pd_relay::Relay,
};
use crate::{
    config::RouterConfig,
    core::{AttachedBody, ConnectionMode, Worker, WorkerLoadGuard},
};

/// The gate of this patch.
pub const GATE: &str = "SMG_PD_LOAD_AT_DISPATCH";

static ON: OnceLock<bool> = OnceLock::new();

/// Held from before a pair is chosen until it is counted. A router lives as long as its process, so one lock will do.
static TURN: Mutex<()> = Mutex::const_new(());

/// The guards of both legs, or None while the gate is off and the stock code makes its own.
pub type Guards = Option<Vec<WorkerLoadGuard>>;

/// What the configuration says of the router's mode, as far as gates ask.
pub fn topology(config: &RouterConfig) -> Topology {
    Topology {
        pd: config.mode.is_pd_mode() || config.enable_igw,
        http: matches!(config.connection_mode, ConnectionMode::Http),
    }
}

/// Read the gate, once, at start-up.
///
/// # Errors
/// The value is malformed, or the router is not an HTTP prefill/decode router.
pub fn check(config: &RouterConfig) -> Result<(), String> {
    let on = read_flag(GATE, topology(config))?;
    if *ON.get_or_init(|| on) {
        info!("{GATE} is on {SERIES}");
    }
    Ok(())
}

/// Whether the gate is on; off until [`check`] has read it.
fn on() -> bool {
    ON.get().copied().unwrap_or(false)
}

/// Wait for the right to choose a pair; None at once while the gate is off.
pub async fn turn() -> Option<MutexGuard<'static, ()>> {
    match on() {
        true => Some(TURN.lock().await),
        false => None,
    }
}

/// Count the chosen pair, with the request's own headers, and let the next request choose.
pub fn reserve(
    turn: Option<MutexGuard<'static, ()>>,
    prefill: &Arc<dyn Worker>,
    decode: &Arc<dyn Worker>,
    headers: Option<&HeaderMap>,
) -> Guards {
    turn.map(|_turn| {
        [prefill, decode]
            .map(|worker| WorkerLoadGuard::new(Arc::clone(worker), headers))
            .into()
    })
}

/// What is sent to the client, or the error that cuts its connection.
pub type Piece = Result<Bytes, String>;

/// The response whose body is `stream`, up to the piece with the closing marker: each piece as `merge` gives it, and what
/// `broken` makes of a failure. It holds the guards, so that both legs count until all of it is sent, or the client gone.
pub fn answer<S, E>(
    stream: S,
    merge: impl FnMut(Bytes) -> Bytes + Send + 'static,
    broken: impl Fn(String) -> Piece + Send + 'static,
    status: StatusCode,
    headers: Option<HeaderMap>,
    guards: Vec<WorkerLoadGuard>,
) -> Response
where
    S: Stream<Item = Result<Bytes, E>> + Send + 'static,
    E: Error + 'static,
{
    let mut stream = Box::pin(stream);
    let mut relay = Relay::new(
        move |context: &mut std::task::Context<'_>| stream.poll_next_unpin(context),
        |piece: &Bytes| memmem::find(piece, b"data: [DONE]").is_some(),
        merge,
        move |fault: E| {
            let mut message = format!("Stream error: {fault}");
            let mut cause = fault.source();
            while let Some(deeper) = cause {
                message += &format!(": {deeper}");
                cause = deeper.source();
            }
            error!("{message}");
            broken(message)
        },
    );
    let mut response = Response::new(Body::from_stream(poll_fn(move |context| relay.poll(context))));
    *response.status_mut() = status;
    *response.headers_mut() = headers.unwrap_or_default();
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    AttachedBody::wrap_response(response, guards)
}
