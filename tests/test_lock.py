"""The lock: one byte form, nothing in it that does not hold together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from patchbundle import lock as lock_module
from patchbundle.errors import BundleError
from patchbundle.identity import ABSENT, Identity
from patchbundle.lock import Lock, Pins

A, B = Identity.of(b"a"), Identity.of(b"b")
PINS = Pins("prefill", ("one", "two"), {"d/x": (ABSENT, A, B), "y": (A, A, ABSENT)}, {"d": 1})
LOCK = Lock({"patches/p": "0" * 64}, {"base-1": PINS})
RAW = lock_module.dump(LOCK)


def signed(table: dict[str, Any]) -> bytes:
    """A lock in canonical form with the right digest of its content, whatever it says."""
    canonical: Callable[[object], bytes] = lambda body: (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()  # noqa: E731
    table.pop("content", None)
    return canonical({**table, "content": hashlib.sha256(canonical(table)).hexdigest()})


def changed(edit: Callable[[dict[str, Any]], object]) -> bytes:
    table = json.loads(RAW)
    edit(table)
    return signed(table)


def test_a_lock_is_read_as_it_was_written() -> None:
    made = lock_module.load(RAW, "lock")
    assert made == Lock(LOCK.artifacts, LOCK.bases, hashlib.sha256(RAW).hexdigest())
    assert lock_module.dump(made) == RAW
    assert signed(json.loads(RAW)) == RAW


def test_a_lock_cut_anywhere_is_refused() -> None:
    for size in range(len(RAW)):
        with pytest.raises(BundleError, match=r"\[lock\]"):
            lock_module.load(RAW[:size], "lock")


def test_every_change_of_one_byte_is_refused() -> None:
    for spot in range(len(RAW)):
        for byte in {0, 9, 10, 32, 48, 49, 97, 127, 255, RAW[spot] ^ 1, RAW[spot] ^ 32} - {RAW[spot]}:
            with pytest.raises(BundleError):
                lock_module.load(RAW[:spot] + bytes([byte]) + RAW[spot + 1 :], "lock")


BAD = {
    "no JSON": b"lock\n",
    "another top": b"[]\n",
    "null": b"null\n",
    "a byte order mark": b"\xef\xbb\xbf" + RAW,
    "UTF-16": RAW.decode().encode("utf-16"),
    "CR LF": RAW.replace(b"\n", b"\r\n"),
    "no last newline": RAW[:-1],
    "a second newline": RAW + b"\n",
    "other spaces": json.dumps(json.loads(RAW)).encode(),
    "a key twice": RAW.replace(b'{\n "artifacts"', b'{\n "schema": 1,\n "artifacts"'),
    "very deep": b"[" * 100_000,
    "a very long number": b'{"schema": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("raw", BAD.values(), ids=BAD)
def test_a_lock_that_pin_did_not_write_is_refused_for(raw: bytes) -> None:
    with pytest.raises(BundleError) as refusal:
        lock_module.load(raw, "lock")
    assert refusal.value.code == "lock"
    assert refusal.value.where == "lock"
    assert "pin" in (refusal.value.next_step or "")


def base(table: dict[str, Any]) -> dict[str, Any]:
    entry = table["bases"]["base-1"]
    assert isinstance(entry, dict)
    return entry


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "another schema": lambda t: t.update(schema=2),
    "no schema": lambda t: t.pop("schema"),
    "an unknown key": lambda t: t.update(more=1),
    "no artifacts": lambda t: t.pop("artifacts"),
    "no bases": lambda t: t.pop("bases"),
    "bases as a list": lambda t: t.update(bases=[]),
    "a base without a role": lambda t: base(t).pop("role"),
    "a base with an unknown key": lambda t: base(t).update(more=1),
    "levels that are a text": lambda t: base(t).update(levels="ab"),
    "levels that are numbers": lambda t: base(t).update(levels=[1, 2]),
    "a level twice": lambda t: base(t).update(levels=["one", "one"]),
    "a level too few": lambda t: base(t).update(levels=["one"]),
    "a level without effect": lambda t: base(t).update(levels=["one", "two", "three"]),
    "a path without its base": lambda t: base(t)["paths"]["y"].pop("000"),
    "a step beyond the last level": lambda t: base(t)["paths"]["y"].update({"003": "absent"}),
    "a step that changes nothing": lambda t: base(t)["paths"]["y"].update({"001": str(A)}),
    "a step with another name": lambda t: base(t)["paths"]["y"].update({"1": str(B)}),
    "an identity that is none": lambda t: base(t)["paths"]["y"].update({"001": "link"}),
    "an identity that is a number": lambda t: base(t)["paths"]["y"].update({"001": 1}),
    "a folder at no level": lambda t: base(t).update(folders={"d": 3}),
    "a folder at level zero": lambda t: base(t).update(folders={"d": 0}),
    "a folder at a text": lambda t: base(t).update(folders={"d": "1"}),
    "a folder at true": lambda t: base(t).update(folders={"d": True}),
    "a folder at a fraction": lambda t: base(t).update(folders={"d": 1.0}),
    "a folder that is a file": lambda t: base(t).update(folders={"y": 1}),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_lock_with_the_right_digest_is_refused_all_the_same_for(edit: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(BundleError) as refusal:
        lock_module.load(changed(edit), "lock")
    assert refusal.value.code == "lock"


NAMES = {
    "a path that climbs": ("../x", "name"),
    "an absolute path": ("/x", "name"),
    "a path in another case": ("D/x", "collision"),
    "a path below a file": ("y/x", "parent"),
}


@pytest.mark.parametrize(("path", "code"), NAMES.values(), ids=NAMES)
def test_a_lock_names_no(path: str, code: str) -> None:
    with pytest.raises(BundleError) as refusal:
        lock_module.load(changed(lambda t: base(t)["paths"].update({path: {"000": str(A)}})), "lock")
    assert refusal.value.code == code


def test_the_digest_of_the_content_must_be_the_content_s() -> None:
    table = json.loads(RAW)
    table["content"] = "0" * 64
    with pytest.raises(BundleError, match="digest of their content"):
        lock_module.load((json.dumps(table, indent=1, sort_keys=True) + "\n").encode(), "lock")


def test_levels_are_found_by_patch_and_by_number() -> None:
    assert [PINS.level_of(name) for name in ("base", "one", "two")] == [0, 1, 2]
    assert [PINS.name_of(level) for level in range(3)] == ["base", "one", "two"]
    with pytest.raises(BundleError, match="base or one of one, two"):
        PINS.level_of("three")


def test_paths_come_in_the_order_in_which_levels_touch_them() -> None:
    pins = Pins("prefill", ("one", "two"), {"a": (A, A, B), "b": (A, B, B), "c": (A, A, A)}, {})
    assert list(pins.at(0)) == ["b", "a", "c"]
    assert pins.at(1) == {"a": A, "b": B, "c": A}
