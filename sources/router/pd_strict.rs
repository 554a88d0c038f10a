//! The strict acknowledgement: a request goes on only when its prefill worker has said, to the end, that all is well.
//!
//! The stock router waits for the headers of both legs before it looks at either, and throws the body of the prefill leg
//! away unread. A prefill worker that fails therefore leaves the client waiting until the decode worker gives up, and a
//! failure reported inside of an HTTP 200 is not seen at all. With `SMG_PD_STRICT_ACK` on:
//!
//! * the prefill leg's answer is read to its end and judged ([`super::pd_ack`]) while the decode leg waits for its KV;
//! * the first leg to fail ends the other one by dropping it ([`super::pd_race`]), and the client gets a JSON error with
//!   the right status at once. Nothing has been sent to the client by then;
//! * only the leg that failed is held against its worker ([`word_on_decode`] where that is hard to tell), and a failure
//!   that the prefill worker reported, of any status, is not retried unless asked;
//! * a decode stream that breaks later ends with an event that says so.

use std::{
    future::pending,
    sync::OnceLock,
    time::{Duration, Instant},
};

use axum::{
    body::Bytes,
    http::{header::CONTENT_TYPE, StatusCode},
    response::Response,
};
use reqwest::{RequestBuilder, ResponseBuilderExt};
use serde_json::{json, Value};
use tracing::{info, warn};

use super::{
    pd_ack::{Fault, Scanner},
    pd_gates::{text, SERIES},
    pd_load::topology,
    pd_race::{race, word_on_decode, Verdict},
    pd_settings::{settings, Settings, GATE, MAX_BYTES},
};
use crate::{
    config::RouterConfig,
    core::Worker,
    observability::metrics::{metrics_labels, Metrics},
    routers::{error, grpc::utils::error_type_from_status},
};

/// How much of a worker's own error body is read, and for how long, to tell the client. The other leg is dropped before,
/// but the client waits: half of the half second within which it is to have its error.
const ERROR_BYTES: usize = 16 << 10;
const ERROR_TIME: Duration = Duration::from_millis(250);

static SETTINGS: OnceLock<Option<Settings>> = OnceLock::new();

/// The answers of both legs in the form in which the stock code goes on with them.
pub type Legs = (
    Result<reqwest::Response, reqwest::Error>,
    Result<reqwest::Response, reqwest::Error>,
);

/// Read the gate and its settings, once, at start-up.
///
/// # Errors
/// A value is malformed, or the router is not an HTTP prefill/decode router.
pub fn check(config: &RouterConfig) -> Result<(), String> {
    let found = settings(text, topology(config))?;
    if let Some(settings) = SETTINGS.get_or_init(|| found) {
        info!("{GATE} is on {settings:?} {SERIES}");
    }
    Ok(())
}

/// The settings while the gate is on; off until [`check`] has read it.
fn current() -> Option<Settings> {
    SETTINGS.get().copied().flatten()
}

/// Whether the gate is on.
pub fn on() -> bool {
    current().is_some()
}

/// What a refusal says of the two workers, carried by the response: None is no word.
#[derive(Clone, Copy, Debug)]
struct Judged {
    prefill: Option<bool>,
    decode: Option<bool>,
    retry: bool,
}

enum AckFault {
    Transport(reqwest::Error),
    Status(reqwest::Response),
    Body(Fault),
    TooLong(usize),
}

enum DecodeFault {
    Transport(reqwest::Error),
    Status(reqwest::Response),
}

/// Send both legs and wait until both are good: the acknowledgement read and judged, and the decode leg's headers (its
/// whole body unless it streams). `keep` keeps the acknowledgement's body.
///
/// # Errors
/// The answer for the client. Both legs are over then, or dropped.
pub async fn dispatch(
    prefill: RequestBuilder,
    decode: RequestBuilder,
    route: &str,
    stream: bool,
    keep: bool,
) -> Result<Legs, Response> {
    let settings = current().unwrap_or(Settings {
        timeout: None,
        max_bytes: 0,
        retry: false,
    });
    let deadline = async {
        match settings.timeout {
            Some(time) => tokio::time::sleep(time).await,
            None => pending().await,
        }
    };
    // In the request's own task: one more for each request would cost a wake of another processor before the answer.
    let ack = acknowledge(prefill, route, keep.then_some(settings.max_bytes));
    let asked = Instant::now();
    match race(ack, decode_leg(decode, stream), deadline).await {
        Verdict::Good(ack, decode) => Ok((Ok(ack), Ok(decode))),
        Verdict::Ack(fault) => Err(refuse_ack(fault, settings.retry).await),
        Verdict::Decode { fault, acknowledged } => Err(refuse_decode(fault, acknowledged, asked.elapsed()).await),
        Verdict::Late => {
            let message = format!(
                "the prefill worker did not acknowledge within {:?}",
                settings.timeout.unwrap_or_default()
            );
            let judged = Judged {
                prefill: Some(false),
                decode: None,
                retry: settings.retry,
            };
            Err(refusal(
                StatusCode::GATEWAY_TIMEOUT,
                "prefill_ack_timeout",
                message,
                judged,
            ))
        }
    }
}

async fn acknowledge(request: RequestBuilder, route: &str, keep: Option<usize>) -> Result<reqwest::Response, AckFault> {
    let mut response = request.send().await.map_err(AckFault::Transport)?;
    if response.status() != StatusCode::OK {
        return Err(AckFault::Status(response));
    }
    let kind = response
        .headers()
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok());
    let mut scanner = Scanner::new(kind, route).map_err(AckFault::Body)?;
    let mut kept = Vec::new();
    while let Some(piece) = response.chunk().await.map_err(AckFault::Transport)? {
        scanner.feed(&piece).map_err(AckFault::Body)?;
        if let Some(most) = keep {
            if kept.len() + piece.len() > most {
                return Err(AckFault::TooLong(most));
            }
            kept.extend_from_slice(&piece);
        }
    }
    scanner.finish().map_err(AckFault::Body)?;
    // One that was read to its end reads as empty from here on, which is all that is asked of it where none is kept.
    Ok(match keep {
        Some(_) => with_body(response, Bytes::from(kept)),
        None => response,
    })
}

async fn decode_leg(request: RequestBuilder, stream: bool) -> Result<reqwest::Response, DecodeFault> {
    let mut response = request.send().await.map_err(DecodeFault::Transport)?;
    if !response.status().is_success() {
        return Err(DecodeFault::Status(response));
    }
    if stream {
        return Ok(response);
    }
    let mut body = Vec::new();
    while let Some(piece) = response.chunk().await.map_err(DecodeFault::Transport)? {
        body.extend_from_slice(&piece);
    }
    Ok(with_body(response, Bytes::from(body)))
}

/// A response with the status and the headers of `response` and a body that has been read. It keeps its URL: without
/// one a response gets another, which would be parsed for every request.
fn with_body(mut response: reqwest::Response, body: Bytes) -> reqwest::Response {
    let url = response.url().clone();
    let mut fresh = http::response::Builder::new()
        .url(url)
        .body(())
        .unwrap_or_default()
        .map(|()| body);
    *fresh.status_mut() = response.status();
    *fresh.headers_mut() = std::mem::take(response.headers_mut());
    reqwest::Response::from(fresh)
}

async fn refuse_ack(fault: AckFault, retry: bool) -> Response {
    let bad = StatusCode::BAD_GATEWAY;
    let (status, name, message, connecting) = match fault {
        // A host that is down lets the connection time out: that too is no answer, and no silence behind one.
        AckFault::Transport(error) if error.is_connect() => (
            bad,
            "prefill_server_error",
            format!("Prefill server error: {error}"),
            true,
        ),
        AckFault::Transport(error) if error.is_timeout() => (
            StatusCode::GATEWAY_TIMEOUT,
            "prefill_ack_timeout",
            format!("Prefill server error: {error}"),
            false,
        ),
        AckFault::Transport(error) => (bad, "prefill_ack_cut", format!("Prefill server error: {error}"), false),
        AckFault::Status(response) => {
            let status = response.status();
            let text = error_text(response).await;
            let known = if status.is_client_error() || status.is_server_error() {
                status
            } else {
                bad
            };
            let message = format!("Prefill server error ({status}): {text}");
            (known, "prefill_status", message, false)
        }
        AckFault::Body(fault) => {
            let status = StatusCode::from_u16(fault.status()).unwrap_or(bad);
            (status, fault.name(), fault.to_string(), false)
        }
        AckFault::TooLong(most) => {
            let message = format!("the prefill worker's answer is longer than the {most} bytes of {MAX_BYTES}");
            (bad, "prefill_ack_too_long", message, false)
        }
    };
    let judged = Judged {
        prefill: Some(status.is_client_error()),
        decode: None,
        retry: retry || connecting,
    };
    refusal(status, name, message, judged)
}

async fn refuse_decode(fault: DecodeFault, acknowledged: bool, after: Duration) -> Response {
    let (status, name, message, good) = match fault {
        DecodeFault::Transport(error) => {
            let (status, good) = if error.is_timeout() && !error.is_connect() {
                let status = StatusCode::GATEWAY_TIMEOUT;
                (status, word_on_decode(status.as_u16(), acknowledged, after))
            } else {
                (StatusCode::BAD_GATEWAY, Some(false))
            };
            let message = format!("Decode server error: {error}");
            (status, "decode_server_error", message, good)
        }
        DecodeFault::Status(response) => {
            let status = response.status();
            let text = error_text(response).await;
            let known = if status.is_client_error() || status.is_server_error() {
                status
            } else {
                StatusCode::BAD_GATEWAY
            };
            (
                known,
                "decode_status",
                format!("Decode server error ({status}): {text}"),
                word_on_decode(status.as_u16(), acknowledged, after),
            )
        }
    };
    let judged = Judged {
        prefill: acknowledged.then_some(true),
        decode: good,
        retry: true,
    };
    refusal(status, name, message, judged)
}

/// The message of a worker's error body, or the start of the body itself.
async fn error_text(mut response: reqwest::Response) -> String {
    let mut body = Vec::new();
    let reading = async {
        while let Ok(Some(piece)) = response.chunk().await {
            body.extend_from_slice(&piece[..piece.len().min(ERROR_BYTES - body.len())]);
            if body.len() == ERROR_BYTES {
                break;
            }
        }
    };
    let _ = tokio::time::timeout(ERROR_TIME, reading).await;
    let told = serde_json::from_slice::<Value>(&body).ok().and_then(|json| {
        let message = json
            .pointer("/error/message")
            .or_else(|| json.get("message"))
            .or_else(|| json.get("error"));
        message.and_then(Value::as_str).map(String::from)
    });
    told.unwrap_or_else(|| String::from_utf8_lossy(&body).into_owned())
}

fn refusal(status: StatusCode, name: &str, message: String, judged: Judged) -> Response {
    warn!("{name} status={} {message}", status.as_u16());
    let mut response = error::create_error(status, name, message);
    response.extensions_mut().insert(judged);
    response
}

/// Hold a refusal of [`dispatch`] against the worker that it is the fault of. False: the response is none, and both
/// workers are still to be judged by it.
pub fn judge(response: &Response, prefill: &dyn Worker, decode: &dyn Worker) -> bool {
    let Some(judged) = response.extensions().get::<Judged>() else {
        return false;
    };
    let legs = [
        (prefill, judged.prefill, metrics_labels::WORKER_PREFILL),
        (decode, judged.decode, metrics_labels::WORKER_DECODE),
    ];
    for (worker, good, label) in legs {
        let Some(good) = good else { continue };
        worker.record_outcome(good);
        if !good {
            let kind = error_type_from_status(response.status());
            Metrics::record_worker_error(label, metrics_labels::CONNECTION_HTTP, kind);
        }
    }
    true
}

/// Whether the response is a failure that a worker has reported and that must not be tried again.
pub fn is_final(response: &Response) -> bool {
    response
        .extensions()
        .get::<Judged>()
        .is_some_and(|judged| !judged.retry)
}

/// The end of a decode stream that broke: an event that says so and the closing marker; with the gate off the error that
/// cuts the client's connection.
pub fn broken_stream(message: String) -> Result<Bytes, String> {
    if !on() {
        return Err(message);
    }
    let error = json!({"error": {"message": message, "type": "Bad Gateway", "code": 502}});
    // What was sent may end in the middle of a line or an event. Nothing takes that back: the client reads half an event
    // before this one.
    Ok(Bytes::from(format!("\n\ndata: {error}\n\ndata: [DONE]\n\n")))
}
