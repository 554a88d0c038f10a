//! The two legs of a request raced against each other and against a deadline.
//!
//! Both legs start together, because the prefill worker sends its KV only to a decode worker that already waits for it.
//! The first failure ends the race and drops the other leg with all that it holds; a dropped leg closes its connection,
//! which is how a worker learns that nobody waits any more. The deadline is for the acknowledgement alone.
//!
//! Standard library only, so that `rustc --test` runs the tests below without any crate.

use std::{
    future::{poll_fn, Future},
    pin::pin,
    task::Poll,
    time::Duration,
};

/// From here on a decode worker may have given up its KV: far below what an engine waits (minutes, by default), and far
/// above what one takes that refuses by itself.
const GIVES_UP: Duration = Duration::from_secs(1);

/// How the race ended. Whatever is not in it has been dropped.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict<A, D, AckFault, DecodeFault> {
    /// Both legs are good.
    Good(A, D),
    /// The acknowledgement failed.
    Ack(AckFault),
    /// The decode leg failed; says whether the acknowledgement had come by then.
    Decode { fault: DecodeFault, acknowledged: bool },
    /// The deadline passed before the acknowledgement came.
    Late,
}

/// Run both legs until both are good or one fails. Of two failures that are seen in one poll the acknowledgement's is the
/// verdict: it is the cause. Otherwise the first to be seen is.
pub async fn race<A, D, AckFault, DecodeFault>(
    ack: impl Future<Output = Result<A, AckFault>>,
    decode: impl Future<Output = Result<D, DecodeFault>>,
    deadline: impl Future<Output = ()>,
) -> Verdict<A, D, AckFault, DecodeFault> {
    let (mut ack, mut decode, mut deadline) = (pin!(ack), pin!(decode), pin!(deadline));
    let (mut acknowledged, mut decoded) = (None, None);
    poll_fn(|context| {
        if acknowledged.is_none() {
            match ack.as_mut().poll(context) {
                Poll::Ready(Ok(value)) => acknowledged = Some(value),
                Poll::Ready(Err(fault)) => return Poll::Ready(Verdict::Ack(fault)),
                Poll::Pending => {}
            }
        }
        if decoded.is_none() {
            match decode.as_mut().poll(context) {
                Poll::Ready(Ok(value)) => decoded = Some(value),
                Poll::Ready(Err(fault)) => {
                    return Poll::Ready(Verdict::Decode {
                        fault,
                        acknowledged: acknowledged.is_some(),
                    });
                }
                Poll::Pending => {}
            }
        }
        // Answers are large: one that waits for the other leg stays where it is.
        if acknowledged.is_some() && decoded.is_some() {
            if let (Some(ack), Some(decode)) = (acknowledged.take(), decoded.take()) {
                return Poll::Ready(Verdict::Good(ack, decode));
            }
        }
        if acknowledged.is_none() && deadline.as_mut().poll(context).is_ready() {
            return Poll::Ready(Verdict::Late);
        }
        Poll::Pending
    })
    .await
}

/// What a failed decode leg's status, which came so long `after` it was sent, says of its worker: true for it, false
/// against it, None nothing. A client's own error is nobody's fault. One that comes late from a worker whose prefill
/// worker has said nothing yet may be that one's fault, for no KV came.
pub fn word_on_decode(status: u16, acknowledged: bool, after: Duration) -> Option<bool> {
    match status {
        400..=499 => Some(true),
        500..=599 if !acknowledged && after >= GIVES_UP => None,
        _ => Some(false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        cell::{Cell, RefCell},
        pin::Pin,
        rc::Rc,
        task::{Context, Waker},
    };

    type Outcome = Result<&'static str, &'static str>;

    /// A leg that ends when told to; panics when polled after its end and counts its drops.
    #[derive(Clone, Default)]
    struct Leg {
        outcome: Rc<RefCell<Option<Outcome>>>,
        over: Rc<Cell<bool>>,
        drops: Rc<Cell<u32>>,
    }

    struct Running(Leg);

    impl Leg {
        fn run(&self) -> Running {
            Running(self.clone())
        }

        fn end(&self, outcome: Outcome) {
            *self.outcome.borrow_mut() = Some(outcome);
        }
    }

    impl Future for Running {
        type Output = Outcome;

        fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Outcome> {
            assert!(!self.0.over.get(), "a leg is polled after its end");
            match self.0.outcome.borrow_mut().take() {
                Some(outcome) => {
                    self.0.over.set(true);
                    Poll::Ready(outcome)
                }
                None => Poll::Pending,
            }
        }
    }

    impl Drop for Running {
        fn drop(&mut self) {
            self.0.drops.set(self.0.drops.get() + 1);
        }
    }

    type Answer = Verdict<&'static str, &'static str, &'static str, &'static str>;
    type Race = Pin<Box<dyn Future<Output = Answer>>>;

    fn start() -> (Leg, Leg, Leg, Race) {
        let (ack, decode, clock) = (Leg::default(), Leg::default(), Leg::default());
        let ticking = clock.run();
        let running = race(ack.run(), decode.run(), async move {
            let _ = ticking.await;
        });
        (ack, decode, clock, Box::pin(running))
    }

    fn poll(race: &mut Race) -> Poll<Answer> {
        race.as_mut().poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn both_legs_are_polled_at_once() {
        let (ack, decode, _, mut race) = start();
        assert!(poll(&mut race).is_pending());
        ack.end(Ok("a"));
        decode.end(Ok("d"));
        assert_eq!(poll(&mut race), Poll::Ready(Verdict::Good("a", "d")));
    }

    #[test]
    fn either_leg_may_be_good_first() {
        for ack_first in [true, false] {
            let (ack, decode, _, mut race) = start();
            let (one, other) = if ack_first { (&ack, &decode) } else { (&decode, &ack) };
            one.end(Ok("x"));
            assert!(poll(&mut race).is_pending(), "the race ends with one leg");
            assert!(poll(&mut race).is_pending());
            other.end(Ok("x"));
            assert_eq!(poll(&mut race), Poll::Ready(Verdict::Good("x", "x")));
        }
    }

    #[test]
    fn a_failed_ack_ends_the_race_and_drops_the_decode_leg_with_it() {
        for decoded in [false, true] {
            let (ack, decode, clock, mut race) = start();
            if decoded {
                decode.end(Ok("d"));
            }
            assert!(poll(&mut race).is_pending());
            ack.end(Err("no"));
            assert_eq!(poll(&mut race), Poll::Ready(Verdict::Ack("no")));
            assert_eq!((ack.drops.get(), decode.drops.get(), clock.drops.get()), (1, 1, 1));
        }
    }

    #[test]
    fn a_failed_decode_leg_ends_the_race_and_drops_the_ack_with_it() {
        for acknowledged in [false, true] {
            let (ack, decode, _, mut race) = start();
            if acknowledged {
                ack.end(Ok("a"));
            }
            assert!(poll(&mut race).is_pending());
            decode.end(Err("no"));
            assert_eq!(
                poll(&mut race),
                Poll::Ready(Verdict::Decode {
                    fault: "no",
                    acknowledged
                })
            );
            assert_eq!((ack.drops.get(), decode.drops.get()), (1, 1));
        }
    }

    #[test]
    fn when_both_fail_at_once_the_ack_is_the_cause() {
        let (ack, decode, _, mut race) = start();
        ack.end(Err("a"));
        decode.end(Err("d"));
        assert_eq!(poll(&mut race), Poll::Ready(Verdict::Ack("a")));
    }

    #[test]
    fn the_deadline_ends_a_race_whose_ack_has_not_come() {
        for decoded in [false, true] {
            let (ack, decode, clock, mut race) = start();
            if decoded {
                decode.end(Ok("d"));
            }
            assert!(poll(&mut race).is_pending());
            clock.end(Ok(""));
            assert_eq!(poll(&mut race), Poll::Ready(Verdict::Late));
            assert_eq!((ack.drops.get(), decode.drops.get()), (1, 1));
        }
    }

    #[test]
    fn the_deadline_means_nothing_once_the_ack_has_come() {
        let (ack, decode, clock, mut race) = start();
        ack.end(Ok("a"));
        clock.end(Ok(""));
        assert!(poll(&mut race).is_pending());
        decode.end(Ok("d"));
        assert_eq!(poll(&mut race), Poll::Ready(Verdict::Good("a", "d")));
    }

    #[test]
    fn an_ack_that_comes_together_with_the_deadline_is_in_time() {
        let (ack, decode, clock, mut race) = start();
        for leg in [&ack, &decode, &clock] {
            leg.end(Ok("x"));
        }
        assert_eq!(poll(&mut race), Poll::Ready(Verdict::Good("x", "x")));
    }

    #[test]
    fn a_decode_worker_that_fails_late_without_an_acknowledgement_is_not_judged() {
        let (soon, late) = (Duration::from_millis(999), Duration::from_secs(1));
        for status in [500, 503, 504, 599] {
            assert_eq!(word_on_decode(status, false, late), None, "{status}");
            assert_eq!(word_on_decode(status, false, soon), Some(false), "{status}");
            assert_eq!(word_on_decode(status, true, late), Some(false), "{status}");
        }
    }

    #[test]
    fn a_clients_own_error_speaks_for_the_decode_worker_and_a_status_that_is_no_error_against_it() {
        for (acknowledged, after) in [(false, 0), (false, 60), (true, 60)].map(|(yes, s)| (yes, Duration::from_secs(s)))
        {
            for (status, good) in [(400, true), (429, true), (499, true), (302, false), (600, false)] {
                assert_eq!(word_on_decode(status, acknowledged, after), Some(good), "{status}");
            }
        }
    }

    #[test]
    fn dropping_the_race_drops_all_three_once() {
        let (ack, decode, clock, mut race) = start();
        assert!(poll(&mut race).is_pending());
        drop(race);
        assert_eq!((ack.drops.get(), decode.drops.get(), clock.drops.get()), (1, 1, 1));
    }
}
