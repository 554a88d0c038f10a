//! A decode stream on its way to the client, without a task between them.
//!
//! The stock router copies every stream in a task of its own, through a channel without a bound. While the decode worker
//! is silent that task does not learn that its client is gone, a slow client makes the channel grow, and each piece
//! wakes two tasks. Here the response's body is the stream itself: it is asked for a piece when the client can take one,
//! and dropped with the client, which closes the worker's connection.

use std::{
    fmt::Display,
    pin::Pin,
    task::{ready, Context, Poll},
};

use axum::{
    body::{Body, Bytes},
    http::{header::CONTENT_TYPE, HeaderMap, HeaderValue, StatusCode},
    response::Response,
};
use futures_util::Stream;
use memchr::memmem;
use tracing::error;

use crate::core::{AttachedBody, WorkerLoadGuard};

const DONE: &[u8] = b"data: [DONE]";

/// What is sent to the client, or the error that cuts its connection.
pub type Piece = Result<Bytes, String>;

/// A stream up to its closing marker, its end or its failure. It is dropped there, and not with the response.
struct Relay<S, M, F> {
    stream: Option<Pin<Box<S>>>,
    merge: M,
    broken: F,
}

impl<S, E, M, F> Stream for Relay<S, M, F>
where
    S: Stream<Item = Result<Bytes, E>>,
    E: Display,
    M: FnMut(Bytes) -> Bytes + Unpin,
    F: FnMut(String) -> Piece + Unpin,
{
    type Item = Piece;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Piece>> {
        let this = self.get_mut();
        let Some(stream) = this.stream.as_mut() else {
            return Poll::Ready(None);
        };
        let item = ready!(stream.as_mut().poll_next(context));
        if !matches!(&item, Some(Ok(piece)) if memmem::find(piece, DONE).is_none()) {
            this.stream = None;
        }
        Poll::Ready(item.map(|item| match item {
            Ok(piece) => Ok((this.merge)(piece)),
            Err(fault) => {
                error!("the stream of the decode worker broke: {fault}");
                (this.broken)(format!("Stream error: {fault}"))
            }
        }))
    }
}

/// The response whose body is `stream`: each piece as `merge` gives it, and what `broken` makes of a failure. It holds
/// the guards, so that both legs count until the client has all of it or is gone.
pub fn answer<S, E>(
    stream: S,
    merge: impl FnMut(Bytes) -> Bytes + Send + Unpin + 'static,
    broken: impl FnMut(String) -> Piece + Send + Unpin + 'static,
    status: StatusCode,
    headers: Option<HeaderMap>,
    guards: Vec<WorkerLoadGuard>,
) -> Response
where
    S: Stream<Item = Result<Bytes, E>> + Send + 'static,
    E: Display + 'static,
{
    let relay = Relay {
        stream: Some(Box::pin(stream)),
        merge,
        broken,
    };
    let mut response = Response::new(Body::from_stream(relay));
    *response.status_mut() = status;
    *response.headers_mut() = headers.unwrap_or_default();
    response
        .headers_mut()
        .insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    AttachedBody::wrap_response(response, guards)
}
