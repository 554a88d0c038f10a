"""Identities: what a pin fixes."""

from __future__ import annotations

import hashlib

import pytest

from patchbundle.identity import ABSENT, EXECUTABLE, File, Identity, identity_of

DIGEST = hashlib.sha256(b"x").hexdigest()
BAD = {
    "nothing": "",
    "another kind": "link",
    "a short mode": f"0644 {DIGEST} 1",
    "a mode of a link": f"120000 {DIGEST} 1",
    "capitals in the digest": f"100644 {DIGEST.upper()} 1",
    "a short digest": f"100644 {DIGEST[:-1]} 1",
    "a size with a leading zero": f"100644 {DIGEST} 01",
    "a negative size": f"100644 {DIGEST} -1",
    "a size in other digits": f"100644 {DIGEST} \u0661",
    "no size": f"100644 {DIGEST}",
    "two spaces": f"100644  {DIGEST} 1",
    "a newline behind": f"100644 {DIGEST} 1\n",
    "a space before": " absent",
    "capitals": "Absent",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_pin_has_one_form(text: str) -> None:
    with pytest.raises(ValueError, match="not a pin"):
        Identity.parse(text)


@pytest.mark.parametrize("identity", [ABSENT, Identity.of(b""), Identity.of(b"x", EXECUTABLE)], ids=str)
def test_a_pin_is_read_as_it_was_written(identity: Identity) -> None:
    assert Identity.parse(str(identity)) == identity


@pytest.mark.parametrize(
    "other",
    [Identity.of(b"y"), Identity.of(b"x", EXECUTABLE), ABSENT, Identity("link"), Identity("file", "100644", DIGEST, 2)],
    ids=["bytes", "mode", "absence", "kind", "size"],
)
def test_identities_differ_in(other: Identity) -> None:
    assert other != Identity.of(b"x")


def test_a_file_that_may_be_absent_has_an_identity_either_way() -> None:
    assert identity_of(None) == ABSENT
    assert identity_of(File(b"x")) == Identity.of(b"x")
    assert not ABSENT.is_file


def test_a_brief_form_names_digest_size_and_mode() -> None:
    assert Identity.of(b"x", EXECUTABLE).brief() == f"sha256 {DIGEST[:12]}…, 1 bytes, mode 100755"
    assert Identity("link").brief() == "link"
