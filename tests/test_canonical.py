"""The one byte form of what the tool keeps as JSON."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchbundle import canonical

VALUES = st.recursive(
    st.text() | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), VALUES, max_size=5))
def test_the_bytes_are_those_of_the_standard_library(table: dict[str, Any]) -> None:
    assert canonical.dump(table) == (json.dumps(table, indent=1, sort_keys=True) + "\n").encode("ascii")


@pytest.mark.parametrize("value", [None, 1.5, b"bytes", {1, 2}, {1: "a key that is no text"}], ids=repr)
def test_what_no_file_of_ours_holds_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        canonical.dump({"key": value})


def test_the_seal_is_the_digest_of_the_rest() -> None:
    table = {"b": ["x", {}], "a": 1}
    sealed = json.loads(canonical.sealed(table))
    assert sealed.pop("content") == hashlib.sha256(canonical.dump(table)).hexdigest()
    assert sealed == table
