"""A patch's header: seven keys, in order, each with what it must say."""

from __future__ import annotations

import pytest

from patchbundle import parse
from patchbundle.errors import BundleError
from patchbundle.header import KEYS, Header
from tests import toy


def lines(text: str) -> tuple[str, ...]:
    """The lines as the parser hands them over: bytes as latin-1, the empty one included."""
    return tuple(text.encode("utf-8").decode("latin-1").split("\n")[:-1])


def text(**changed: str) -> str:
    return toy.header(**changed).decode()


GOOD = text()


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key_is_named(key: str) -> None:
    kept = "".join(line for line in GOOD.splitlines(keepends=True) if not line.startswith(f"{key}: "))
    with pytest.raises(BundleError) as refusal:
        Header.parse(lines(kept), "p.patch")
    assert refusal.value.code == "header"
    assert key not in (refusal.value.found or "")
    assert key in (refusal.value.expected or "")


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_stands_twice_is_refused(key: str) -> None:
    doubled = GOOD.removesuffix("\n") + f"{key}: again\n\n"
    with pytest.raises(BundleError, match="header") as refusal:
        Header.parse(lines(doubled), "p.patch")
    assert refusal.value.expected == f"{key} once"
    assert refusal.value.where == "p.patch:8"


BAD = {
    "nothing at all": "",
    "an empty line alone": "\n",
    "no empty line before the diff": GOOD[:-1],
    "two empty lines before the diff": GOOD + "\n",
    "an empty line inside": GOOD.replace("Risk", "\nRisk"),
    "keys in another order": GOOD.replace("Risk: none\n", "").replace("Gate:", "Risk: none\nGate:"),
    "an unknown key": GOOD.replace("Risk:", "Risks:"),
    "a key in lower case": GOOD.replace("Risk:", "risk:"),
    "a key without text": text(Risk=""),
    "a key with spaces alone": text(Risk="  "),
    "a key without a space": GOOD.replace("Risk: ", "Risk:"),
    "prose before the keys": "Hello\n" + GOOD,
    "a continuation before any key": " more\n" + GOOD,
    "a continuation of two spaces": GOOD.replace("\nRisk", "\n  more\nRisk"),
    "a continuation of a tab": GOOD.replace("\nRisk", "\n\tmore\nRisk"),
    "a continuation without text": GOOD.replace("\nRisk", "\n \nRisk"),
    "a carriage return": GOOD.replace("Risk: none\n", "Risk: none\r\n"),
    "an escape sequence": text(Risk="\x1b[2J"),
    "a right-to-left override": text(Risk="\u202eenon"),
    "an unknown class": text(Class="permanent"),
    "a class with a tail": text(Class="environment-only-ish"),
    "a class in capitals": text(Class="Temporary, https://github.com/x/y/pull/1"),
    "a temporary patch without a link": text(Class="temporary, soon"),
    "an upstream without a date": text(Upstream="none found"),
    "an upstream with a month that is none": text(Upstream="none found, 2026-13-01"),
    "an upstream with a day that is none": text(Upstream="none found, 2026-02-30"),
    "an upstream with a date run into a number": text(Upstream="none found, 12026-11-29"),
    "a gate of another family": text(Gate="SGLANG_ENABLE_X"),
    "a gate with a lower-case tail": text(Gate="SGLANG_RESEARCH_Xy"),
    "a gate without a name": text(Gate="SGLANG_RESEARCH_"),
    "no gate without a reason": text(Gate="none"),
    "no gate with an empty reason": text(Gate="none; "),
}


@pytest.mark.parametrize("header", BAD.values(), ids=BAD)
def test_a_header_is_refused_for(header: str) -> None:
    with pytest.raises(BundleError) as refusal:
        Header.parse(lines(header), "p.patch")
    assert refusal.value.code == "header"
    assert refusal.value.where.startswith("p.patch")


def test_bytes_that_are_no_utf8_are_refused() -> None:
    with pytest.raises(BundleError) as refusal:
        Header.parse((*lines(GOOD)[:-1], "\xff", ""), "p.patch")
    assert (refusal.value.code, refusal.value.expected) == ("header", "UTF-8")


GOODS = {
    "temporary, with a link": text(Class="temporary, https://github.com/x/y/pull/1; drop with the base"),
    "temporary, with a number": text(Class="temporary, #123"),
    "environment-only, with a reason": text(Class="environment-only; no other way"),
    "incompatible-on-purpose": text(Class="incompatible-on-purpose"),
    "a continuation with its own colon": GOOD.replace("\nRisk", "\n Note: more\nRisk"),
    "letters outside ASCII": text(Risk="naïve → none"),
    "two dates": text(Upstream="open on 2026-08-14, seen 2026-11-29;"),
}


@pytest.mark.parametrize("header", GOODS.values(), ids=GOODS)
def test_a_header_may_hold(header: str) -> None:
    assert Header.parse(lines(header), "p.patch").why == "the stock toy cannot"


def test_a_continuation_is_joined_with_one_space() -> None:
    header = Header.parse(lines(GOOD.replace("\nRisk", "\n and\n more\nRisk")), "p.patch")
    assert header.gate == "none; a toy and more"


@pytest.mark.parametrize(
    ("gate", "name"),
    [
        ("SGLANG_RESEARCH_X_2", "SGLANG_RESEARCH_X_2"),
        ("SMG_PD_STRICT_ACK; router only", "SMG_PD_STRICT_ACK"),
        ("SMG_PD_X, off by default", "SMG_PD_X"),
        ("SMG_PD_X (both roles)", "SMG_PD_X"),
        ("none; repairs a count", None),
    ],
)
def test_the_gate_is_told_from_what_is_said_of_it(gate: str, name: str | None) -> None:
    assert Header.parse(lines(text(Gate=gate)), "p.patch").gate_name == name


def test_the_parser_hands_the_header_over_as_it_stands() -> None:
    diff = parse.parse(toy.header(Risk="naïve") + toy.series()[0].diff, "p.patch")
    assert Header.parse(diff.message, "p.patch").risk == "naïve"
