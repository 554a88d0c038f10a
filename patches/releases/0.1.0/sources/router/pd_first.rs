//! The first of two futures to end; the other one is dropped there and then.
//!
//! Standard library only, so that `rustc --test` runs the tests below without any crate.

use std::{
    future::{poll_fn, Future},
    pin::pin,
    task::Poll,
};

/// Which of the two futures ended, with what it gave.
#[derive(Debug, PartialEq, Eq)]
pub enum First<L, R> {
    Left(L),
    Right(R),
}

/// Run both futures until one ends. When both are ready at once the left one wins.
///
/// Both are owned here: the loser is dropped before this returns, and both are dropped when this is.
pub async fn first<L: Future, R: Future>(left: L, right: R) -> First<L::Output, R::Output> {
    let mut left = pin!(left);
    let mut right = pin!(right);
    poll_fn(|context| {
        if let Poll::Ready(value) = left.as_mut().poll(context) {
            return Poll::Ready(First::Left(value));
        }
        right.as_mut().poll(context).map(First::Right)
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        cell::Cell,
        future::{pending, ready},
        pin::Pin,
        rc::Rc,
        sync::{
            atomic::{AtomicUsize, Ordering},
            Arc,
        },
        task::{Context, Wake, Waker},
    };

    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Ends once `open` is set; counts its drops.
    struct Door {
        open: Rc<Cell<bool>>,
        drops: Rc<Cell<u32>>,
    }

    impl Future for Door {
        type Output = &'static str;

        fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
            if self.open.get() {
                return Poll::Ready("door");
            }
            context.waker().wake_by_ref();
            Poll::Pending
        }
    }

    impl Drop for Door {
        fn drop(&mut self) {
            self.drops.set(self.drops.get() + 1);
        }
    }

    fn door() -> (Door, Rc<Cell<bool>>, Rc<Cell<u32>>) {
        let (open, drops) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(0)));
        (
            Door {
                open: open.clone(),
                drops: drops.clone(),
            },
            open,
            drops,
        )
    }

    fn poll_once<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn the_left_one_wins_when_both_are_ready() {
        let race = pin!(first(ready(1), ready(2)));
        assert_eq!(poll_once(race), Poll::Ready(First::Left(1)));
    }

    #[test]
    fn the_right_one_ends_it_while_the_left_one_is_pending_and_the_left_one_is_dropped() {
        let (left, _open, drops) = door();
        let mut race = Box::pin(first(left, ready(7)));
        assert_eq!(poll_once(race.as_mut()), Poll::Ready(First::Right(7)));
        assert_eq!(drops.get(), 1, "the loser lives on while the race is still held");
    }

    #[test]
    fn the_left_one_may_end_later() {
        let (left, open, drops) = door();
        let mut race = pin!(first(left, pending::<()>()));
        assert_eq!(poll_once(race.as_mut()), Poll::Pending);
        open.set(true);
        assert_eq!(poll_once(race), Poll::Ready(First::Left("door")));
        assert_eq!(drops.get(), 1);
    }

    #[test]
    fn dropping_the_race_drops_both_once() {
        let (left, _, left_drops) = door();
        let (right, _, right_drops) = door();
        let mut race = Box::pin(first(left, right));
        assert_eq!(poll_once(race.as_mut()), Poll::Pending);
        drop(race);
        assert_eq!((left_drops.get(), right_drops.get()), (1, 1));
    }

    #[test]
    fn both_sides_see_the_waker() {
        let (left, ..) = door();
        let (right, ..) = door();
        let wakes = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(wakes.clone());
        let race = pin!(first(left, right));
        assert_eq!(race.poll(&mut Context::from_waker(&waker)), Poll::Pending);
        assert_eq!(wakes.0.load(Ordering::SeqCst), 2);
    }
}
