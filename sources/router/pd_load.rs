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

use std::sync::{Arc, OnceLock};

use axum::http::HeaderMap;
use tokio::sync::{Mutex, MutexGuard};
use tracing::info;

use super::pd_gates::{read_flag, Topology, SERIES};
use crate::{
    config::RouterConfig,
    core::{ConnectionMode, Worker, WorkerLoadGuard},
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
