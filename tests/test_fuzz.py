"""The fuzzer's targets hold on their own seeds and on mutations of them; ``make fuzz`` looks longer, by coverage."""

from __future__ import annotations

import random

import pytest

from lab.fuzz import targets
from lab.fuzz.targets import TARGETS
from patchbundle import diff, journal, lock, parse, record
from patchbundle.errors import BundleError


@pytest.mark.parametrize("target", TARGETS)
def test_every_seed_is_read_or_refused(target: str) -> None:
    found = list(targets.seeds(target))
    assert found
    for raw in found:
        TARGETS[target](raw)


@pytest.mark.parametrize("target", TARGETS)
def test_seeds_with_a_few_bytes_changed_are_read_or_refused(target: str) -> None:
    chance = random.Random(1)
    found = list(targets.seeds(target))
    for _ in range(300):
        raw = bytearray(chance.choice(found))
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(raw) + 1)
            raw[at : at + chance.randint(0, 2)] = bytes(
                chance.choices(b'\n\r\t \\"-+@,09a\x00\xff', k=chance.randint(0, 2))
            )
        TARGETS[target](bytes(raw))


def raises(*_: object, **__: object) -> None:
    raise ValueError("not ours")


@pytest.mark.parametrize(
    ("target", "module", "name"),
    [("patch", parse, "parse"), ("journal", journal, "load"), ("lock", lock, "load"), ("record", record, "entries")],
)
def test_an_exception_that_is_not_ours_is_a_finding(
    target: str, module: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = next(targets.seeds(target))
    monkeypatch.setattr(module, name, raises)
    with pytest.raises(ValueError, match="not ours"):
        TARGETS[target](raw)


def test_a_diff_that_does_not_come_off_again_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff.Hunk, "reversed", lambda hunk: hunk)

    def all_of_them() -> None:
        for raw in targets.seeds("patch"):
            TARGETS["patch"](raw)

    with pytest.raises(BundleError, match="context-differs"):
        all_of_them()
