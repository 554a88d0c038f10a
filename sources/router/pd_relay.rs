//! A decode stream on its way to the client, without a task between them.
//!
//! The stock router copies every stream in a task of its own, through a channel without a bound. While the decode worker
//! is silent that task does not learn that its client is gone, a slow client makes the channel grow, and each piece
//! wakes two tasks. Here the response's body is the stream itself: it is asked for a piece when the client can take one,
//! and dropped with the client, which closes the worker's connection.
//!
//! Standard library only, so that `rustc --test` runs the tests below without any crate.

use std::task::{ready, Context, Poll};

/// A stream up to its last piece, its end or its failure. It is dropped there, and not with the response.
pub struct Relay<S, L, M, F> {
    source: Option<S>,
    last: L,
    merge: M,
    broken: F,
}

impl<S, L, M, F> Relay<S, L, M, F> {
    /// `source` gives the next item, `last` tells the last piece of those that it gives, `merge` what the client gets
    /// of each, and `broken` what it gets of a failure: a piece, or an error that cuts its connection.
    pub fn new(source: S, last: L, merge: M, broken: F) -> Self {
        Relay {
            source: Some(source),
            last,
            merge,
            broken,
        }
    }

    /// The next item for the client.
    pub fn poll<P, E>(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<P, String>>>
    where
        S: FnMut(&mut Context<'_>) -> Poll<Option<Result<P, E>>>,
        L: FnMut(&P) -> bool,
        M: FnMut(P) -> P,
        F: FnMut(E) -> Result<P, String>,
    {
        let Some(source) = self.source.as_mut() else {
            return Poll::Ready(None);
        };
        let item = ready!(source(context));
        let over = match &item {
            Some(Ok(piece)) => (self.last)(piece),
            Some(Err(_)) | None => true,
        };
        if over {
            self.source = None;
        }
        Poll::Ready(item.map(|item| match item {
            Ok(piece) => Ok((self.merge)(piece)),
            Err(fault) => (self.broken)(fault),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::VecDeque, rc::Rc, task::Waker};

    type Item = Poll<Option<Result<&'static str, &'static str>>>;

    /// What the client gets of `items`, and whether the source is still held after each.
    fn given(items: Vec<Item>) -> Vec<(Poll<Option<Result<String, String>>>, bool)> {
        let (mut items, held) = (VecDeque::from(items), Rc::new(()));
        let (mine, count) = (Rc::clone(&held), items.len() + 1);
        let source = move |_: &mut Context<'_>| {
            let _mine = &mine;
            let item = items.pop_front().expect("the source is asked after its end");
            item.map(|item| item.map(|item| item.map(String::from)))
        };
        let mut relay = Relay::new(
            source,
            |piece: &String| piece.contains("last"),
            |piece: String| format!("<{piece}>"),
            |fault: &str| match fault {
                "told" => Ok("an event".to_string()),
                _ => Err(format!("cut: {fault}")),
            },
        );
        let mut context = Context::from_waker(Waker::noop());
        let mut got = vec![];
        for _ in 0..count {
            let item = relay.poll(&mut context);
            let over = matches!(item, Poll::Ready(None));
            got.push((item, Rc::strong_count(&held) > 1));
            if over {
                break;
            }
        }
        got
    }

    fn piece(text: &str) -> Poll<Option<Result<String, String>>> {
        Poll::Ready(Some(Ok(text.to_string())))
    }

    #[test]
    fn every_piece_is_merged_and_the_end_drops_the_source() {
        let items = vec![
            Poll::Ready(Some(Ok("a"))),
            Poll::Ready(Some(Ok("b"))),
            Poll::Ready(None),
        ];
        assert_eq!(
            given(items),
            [(piece("<a>"), true), (piece("<b>"), true), (Poll::Ready(None), false)]
        );
    }

    #[test]
    fn the_last_piece_is_sent_and_drops_the_source_whatever_would_follow() {
        let items = vec![Poll::Ready(Some(Ok("the last"))), Poll::Ready(Some(Ok("more")))];
        assert_eq!(given(items), [(piece("<the last>"), false), (Poll::Ready(None), false)]);
    }

    #[test]
    fn a_failure_is_the_last_item_and_drops_the_source() {
        let told = vec![Poll::Ready(Some(Err("told"))), Poll::Ready(Some(Ok("more")))];
        assert_eq!(given(told), [(piece("an event"), false), (Poll::Ready(None), false)]);
        let cut = vec![Poll::Ready(Some(Err("reset"))), Poll::Ready(Some(Ok("more")))];
        let error = Poll::Ready(Some(Err("cut: reset".to_string())));
        assert_eq!(given(cut), [(error, false), (Poll::Ready(None), false)]);
    }

    #[test]
    fn a_silent_source_is_held_and_asked_again() {
        let items = vec![Poll::Pending, Poll::Ready(Some(Ok("a"))), Poll::Ready(None)];
        assert_eq!(
            given(items),
            [(Poll::Pending, true), (piece("<a>"), true), (Poll::Ready(None), false)]
        );
    }

    #[test]
    fn a_relay_that_is_dropped_drops_a_silent_source() {
        let held = Rc::new(());
        let mine = Rc::clone(&held);
        let source = move |_: &mut Context<'_>| -> Poll<Option<Result<(), ()>>> {
            let _mine = &mine;
            Poll::Pending
        };
        let mut relay = Relay::new(source, |_: &()| false, |()| (), |()| Err(String::new()));
        assert!(relay.poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert_eq!(Rc::strong_count(&held), 2);
        drop(relay);
        assert_eq!(Rc::strong_count(&held), 1);
    }
}
