"""Refusals: one reason, one sentence, one exit code."""

from __future__ import annotations

import pytest

from patchbundle.errors import BundleError, Exit, Reason


@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.name)
def test_every_reason_is_a_sentence_and_has_an_exit_code_that_is_no_success(reason: Reason) -> None:
    error = BundleError(reason, "here")
    assert " " in reason.value
    assert not reason.value.endswith(".")
    assert error.exit_code not in {Exit.DONE, Exit.NOTHING_TO_DO, Exit.USAGE}
    assert error.lines()[0] == f"error: {reason.value} [{error.code}]"


def test_no_two_reasons_share_a_sentence() -> None:
    # Enum makes the second of two equal values an alias of the first.
    assert len(Reason.__members__) == len({reason.value for reason in Reason})


@pytest.mark.parametrize(
    ("reason", "code"),
    [(Reason.BUSY, 5), (Reason.RECOVERY_NEEDED, 4), (Reason.JOURNAL, 4), (Reason.STOPPED, 6), (Reason.DRIFT, 1)],
)
def test_an_exit_code_tells_what_to_do_next(reason: Reason, code: int) -> None:
    assert int(BundleError(reason, "x").exit_code) == code


def test_an_exit_code_may_be_given() -> None:
    assert BundleError(Reason.DRIFT, "x", exit_code=Exit.USAGE).exit_code == 2


def test_a_refusal_says_only_what_it_knows() -> None:
    lines = str(BundleError(Reason.DRIFT, "x", found="y")).splitlines()
    assert lines[1:3] == ["  where:    x", "  found:    y"]
    assert [line[:12] for line in lines[3:]] == ["  next:     "]


def test_a_refusal_as_json_has_every_key() -> None:
    table = BundleError(Reason.HUNK_COUNT, "x", expected="1", next_step="look").as_dict()
    assert table == {
        "reason": "hunk-count",
        "message": Reason.HUNK_COUNT.value,
        "where": "x",
        "expected": "1",
        "found": None,
        "next": "look",
        "exit": 1,
    }
