//! Tests of `Owned`, the task of pd_strict.rs that does not outlive its waiter, on a real runtime.
//!
//! `Owned` stands in a module that needs the whole router. The test of `cargo test` cuts its text out and puts this module
//! behind it, once as it is and once for each of its mutants.

mod tests {
    use std::time::Duration;

    use tokio::{sync::oneshot, time::timeout};

    use super::*;

    /// Far more than anything here takes on a busy machine.
    const PATIENCE: Duration = Duration::from_secs(10);
    const SHORT: Duration = Duration::from_millis(50);

    /// A task that never ends, whether it runs by now, and what it holds: an error once that is dropped.
    async fn endless(runs: bool) -> (Owned<()>, oneshot::Receiver<()>) {
        let ((held, gone), (tell, told)) = (oneshot::channel::<()>(), oneshot::channel());
        let owned = Owned(Some(tokio::spawn(async move {
            let _held = held;
            let _ = tell.send(());
            std::future::pending().await
        })));
        if runs {
            told.await.expect("it runs");
        }
        (owned, gone)
    }

    #[tokio::test]
    async fn dropped_it_ends_its_task_and_drops_what_that_holds() {
        for runs in [true, false] {
            let (owned, gone) = endless(runs).await;
            drop(owned);
            assert!(timeout(PATIENCE, gone).await.expect("the task runs on").is_err());
        }
    }

    #[tokio::test]
    async fn a_waiter_that_is_ended_ends_the_task() {
        let (owned, gone) = endless(true).await;
        assert!(timeout(SHORT, owned).await.is_err());
        assert!(timeout(PATIENCE, gone).await.expect("the task runs on").is_err());
    }

    #[tokio::test]
    async fn a_panic_in_the_task_is_one_of_the_waiter_with_the_same_words() {
        let owned = Owned::<()>(Some(tokio::spawn(async { panic!("a defect in the task") })));
        let waiter = timeout(PATIENCE, tokio::spawn(owned)).await.expect("the panic is swallowed");
        let panic = waiter.expect_err("it panicked").into_panic();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"a defect in the task"));
    }

    #[tokio::test]
    async fn its_value_comes_once_and_its_task_is_not_asked_again() {
        let mut owned = Owned(Some(tokio::spawn(async { 7 })));
        assert_eq!(timeout(PATIENCE, &mut owned).await.expect("it has ended"), 7);
        assert!(timeout(SHORT, &mut owned).await.is_err());
    }

    #[tokio::test]
    async fn a_task_that_is_ended_from_outside_has_no_value_and_no_panic() {
        let task = tokio::spawn(std::future::pending::<()>());
        task.abort();
        let mut owned = Owned(Some(task));
        for _ in 0..2 {
            assert!(timeout(SHORT, &mut owned).await.is_err());
        }
    }
}
