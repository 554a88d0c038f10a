"""strict-prefill-ack: the std-only modules under rustc, the scanner against Python's own JSON, and the patched text."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.router.rust import SOURCES, assert_all_caught, assert_all_pass

PD_ROUTER = "src/routers/http/pd_router.rs"
Tree = Callable[[str], Path]
Probe = Callable[..., str]
BESIDE = {"pd_settings": ("pd_gates",)}

MUTANTS = {
    "pd_ack": [
        ("(400..500).contains(code)", "(400..600).contains(code)"),
        ('self.error |= text == b"error"', 'self.error |= text == b"errors"'),
        ("([Some(Error)], Value::Null) => {}", ""),
        ("([Some(MetaInfo), Some(FinishReason)], Value::Text)", "([Some(MetaInfo)], Value::Text)"),
        ("self.all_answered &= self.answered;", ""),
        ("self.answered = false;", ""),
        ("0xe0 => (2, 0xa0, 0xbf)", "0xe0 => (2, 0x80, 0xbf)"),
        ("0xf4 => (3, 0x80, 0x8f)", "0xf4 => (3, 0x80, 0xbf)"),
        ('0..=0x1f => return Err("a control character in a text")', "0..=0x1f => self.keep(byte)"),
        ("self.kept.len() < KEPT", "true"),
        ("!matches!(self.state, State::Text) || self.utf8.0 > 0", "!matches!(self.state, State::Text)"),
        ("matches!(byte, b'\"' | b'\\\\')", "matches!(byte, b'\"')"),
        ("!matches!(byte, 0x20..=0x7f)", "!matches!(byte, 0x00..=0x7f)"),
        ("word & HIGH | less(word, 0x20) | quote | slash", "word & HIGH | quote | slash"),
        ("word & HIGH | less(word, 0x20) | quote | slash", "word & HIGH | less(word, 0x20) | slash"),
        ("word & HIGH | less(word, 0x20) | quote | slash", "word & HIGH | less(word, 0x20) | quote"),
        ("ONES * u64::from(than)", "u64::from(than)"),
        ("special.trailing_zeros()", "special.leading_zeros()"),
        ("if line && ends_line(byte) {", "if ends_line(byte) {"),
        ("if line && ends_line(byte) {", "if false {"),
        ("text.len().min(KEPT - self.kept.len())", "text.len()"),
        ("&text[..text.len().min(KEPT)]", "text"),
        ("frame.key = Some(Key::of(text));", "frame.key = Some(Key::of(&text[..text.len().min(5)]));"),
        ("!matches!(frame.key, None | Some(Key::Other))", "false"),
        ("self.json.reset();", ""),
        ("            ..Json::new()", "            all_answered: self.all_answered,\n            ..Json::new()"),
        ("self.name.is_empty() && piece.starts_with(DATA)", "piece.starts_with(DATA)"),
        ("(MARK.len() as u8, false, Line::Blank)", "(0, false, Line::Blank)"),
        ("(MARK.len() as u8, false, Line::Blank)", "(MARK.len() as u8, true, Line::Blank)"),
        ("Line::Skip => before_end(piece)", "Line::Skip => piece.len()"),
        (".unwrap_or_else(|| before_end(bytes))", ".unwrap_or(bytes.len())"),
        ("self.marker = self.marker && ", "self.marker = "),
        ("std::mem::replace(&mut self.marker, true)", "self.marker"),
        ('self.note_data(b"\\n");', ""),
        ("std::mem::take(&mut self.after_cr)", "false"),
        ("if self.done {", "if false {"),
        ("if !self.done {", "if false {"),
        ("&& self.bytes == DONE.len();", ";"),
        ("None if !self.json.complete() =>", "None if false =>"),
        ("None => self.json.verdict()?", "None => {}"),
        (
            "self.line = Line::Data;\n                if byte != b' '",
            "self.line = Line::Data;\n                if true",
        ),
        ('self.judge_data(b"\\n", false);', ""),
        ("(Number::Minus, b'0') => Number::Zero", "(Number::Minus, b'0') => Number::Whole"),
        ("DEEPEST => return Err", "usize::MAX => return Err"),
        (".trim();", ";"),
        ("Choices | OutputIds", "Choices"),
        ("code.or(self.code)", "code"),
        ("self.name.len() < DATA.len() - 1", "self.name.len() < DATA.len() - 2"),
        ('Line::Name if self.name == b"data" => self.begin_data(),', ""),
        (" || self.items == 0", ""),
        ("match generates && !self.answered", "match !self.answered"),
    ],
    "pd_race": [
        ("if acknowledged.is_none() {\n            match ack", "if true {\n            match ack"),
        ("if acknowledged.is_none() && deadline", "if deadline"),
        ("acknowledged: acknowledged.is_some()", "acknowledged: false"),
        ("return Poll::Ready(Verdict::Late);", ""),
        ("if acknowledged.is_some() && decoded.is_some()", "if acknowledged.is_some() || decoded.is_some()"),
        ("400..=499 => Some(true)", "400..=498 => Some(true)"),
        ("500..=599 if", "500..=503 if"),
        ("!acknowledged && after", "after"),
        ("after >= GIVES_UP", "after > GIVES_UP"),
        (" && after >= GIVES_UP", ""),
    ],
    "pd_settings": [
        ("fits(GATE, on, topology)?;", "let _ = (fits, topology);"),
        ("filter(|&ms| ms > 0)", "filter(|_| true)"),
        ("for name in [TIMEOUT, MAX_BYTES, RETRY]", "for name in [TIMEOUT, MAX_BYTES]"),
        ("(least..=most).contains(value)", "*value <= most || least > most"),
        ("byte.is_ascii_digit()", "byte != b'x'"),
        (".trim().is_empty()", ".is_empty()"),
    ],
}


@pytest.mark.parametrize("module", MUTANTS)
def test_the_modules_own_tests_pass_under_bare_rustc(module: str, tmp_path: Path) -> None:
    assert_all_pass(tmp_path, module, BESIDE.get(module, ()))


@pytest.mark.parametrize("module", MUTANTS)
def test_a_broken_module_is_caught_by_its_own_tests(module: str, tmp_path: Path) -> None:
    assert_all_caught(tmp_path, module, MUTANTS[module], BESIDE.get(module, ()))


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Probe]:
    """A function that asks the compiled scanner for its verdict on a body, cut at parts of its length."""
    if shutil.which("rustc") is None:
        pytest.skip("no rustc on this machine")
    folder = tmp_path_factory.mktemp("probe")
    shutil.copy(SOURCES / "pd_ack.rs", folder)
    shutil.copy(Path(__file__).parent / "ack_probe.rs", folder)
    command = ["rustc", "--edition", "2021", "-C", "debuginfo=0", "-A", "dead_code", str(folder / "ack_probe.rs")]
    subprocess.run([*command, "-o", str(folder / "probe")], check=True, capture_output=True)
    pipe = subprocess.PIPE
    with subprocess.Popen([folder / "probe"], text=True, bufsize=1, stdin=pipe, stdout=pipe) as process:

        def ask(kind: str, body: bytes, cuts: Sequence[float] = ()) -> str:
            assert process.stdin is not None and process.stdout is not None
            places = ",".join(str(place) for place in sorted(int(cut * len(body)) for cut in cuts))
            process.stdin.write(f"{kind} {places} {body.hex()}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        yield ask


# Where a body is cut, as parts of its length: anywhere, in pieces of any sizes.
CUTS = st.one_of(
    st.lists(st.floats(0, 1), max_size=12),
    st.integers(1, 60).map(lambda count: [index / count for index in range(count)]),
)


def refuse(word: str) -> Any:
    """Python takes NaN and Infinity for JSON, which they are not."""
    raise ValueError(word)


def is_json_object(body: bytes) -> bool:
    """What Python's own parser says of a body: UTF-8 JSON whose top is an object or an array of objects."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) or (isinstance(value, list) and all(isinstance(one, dict) for one in value))


PIECES = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b"\\",
    b"\\u00e9",
    b"\\ud83d",
    b"1",
    b"0",
    b"-",
    b".",
    b"e",
    b"+",
    b" ",
]
PIECES += [
    b"\n",
    b"\t",
    b"\x00",
    b"\x7f",
    b"true",
    b"null",
    b"fals",
    b'"a"',
    b'"text":"x"',
    b"\xc3\xa9",
    b"\xe2\x82",
    b"\xff",
    b"/",
]
BODIES = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=14).map(b"".join),
    st.lists(st.sampled_from(PIECES), max_size=10).map(lambda parts: b'{"text":' + b"".join(parts) + b"}"),
    st.lists(st.sampled_from(PIECES), max_size=8).map(lambda parts: b'{"text":"' + b"".join(parts) + b'"}'),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    ).map(lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")),
)


@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=BODIES, cuts=CUTS)
def test_the_scanner_takes_for_json_exactly_what_python_takes(probe: Probe, body: bytes, cuts: list[float]) -> None:
    said = probe("json", body, cuts)
    well_formed = said.split(" ")[0] not in ("prefill_ack_malformed", "prefill_ack_cut")
    assert well_formed == is_json_object(body), (body, said)
    assert said == probe("json", body), "the verdict depends on the cuts"


ITEMS = st.lists(
    st.sampled_from(
        [
            b'data: {"choices":[{"index":0}]}',
            b'data:{"text":"a"}',
            b'data: {"error":{"message":"m","code":500}}',
            b'data: {"choices":[]}',
            b"data: [DONE]",
            b"data: [DON",
            b": comment",
            ": \u20ac\U0001f600".encode(),
            'data: {"text":"\u00e9\u20ac\U0001f600"}'.encode(),
            b'data: {"text":"\xe2\x82"}',
            b": " + b"huge" * 20000,
            b'data: {"text":"' + b"x" * 80000 + b'"}',
            b"event: x",
            b"data",
            b"",
        ]
    ),
    max_size=9,
)


def read_events(body: bytes) -> list[bytes]:
    """The data of the events in a stream, by the rules of the format."""
    events: list[bytes] = []
    data: list[bytes] | None = None
    for line in [*re.split(rb"\r\n|\r|\n", body), b""]:
        field, _, value = line.partition(b":")
        if line == b"":
            if data is not None:
                events.append(b"\n".join(data))
            data = None
        elif field == b"data":
            data = [*(data or []), value.removeprefix(b" ")]
    return events


# Streams with one kind of line end, and with all three of them mixed.
ENDS = [b"\n", b"\r\n", b"\r"]
STREAMS = st.one_of(
    st.builds(lambda lines, end: end.join(lines), ITEMS, st.sampled_from(ENDS)),
    ITEMS.flatmap(
        lambda lines: st.lists(st.sampled_from(ENDS), min_size=len(lines), max_size=len(lines)).map(
            lambda ends: b"".join(line + end for line, end in zip(lines, ends, strict=True))
        )
    ),
)


def judge_events(events: list[bytes]) -> bool:
    """Whether a stream of these events is a good acknowledgement."""
    if (
        not events
        or events[-1] != b"[DONE]"
        or events.count(b"[DONE]") != 1
        or not all(map(is_json_object, events[:-1]))
    ):
        return False
    values = [json.loads(event) for event in events[:-1]]
    return not any(value.get("error") for value in values) and any(v.get("choices") or "text" in v for v in values)


@settings(max_examples=800, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=STREAMS, cuts=CUTS)
def test_the_scanner_reads_event_streams_by_the_rules_of_the_format(
    probe: Probe, body: bytes, cuts: list[float]
) -> None:
    said = probe("sse", body, cuts)
    assert (said == "good") == judge_events(read_events(body)), body
    assert said == probe("sse", body), "the verdict depends on the cuts"


def test_the_stock_way_is_still_there_and_taken_with_the_gate_off(patched: Tree) -> None:
    text = (patched("router") / PD_ROUTER).read_text()
    before, _, after = text.partition("if pd_strict::on() {")
    assert after.count("pd_strict::on()") == 0 and before.count("tokio::join!(prefill_request.send()") == 0
    assert "} else {\n            tokio::join!(prefill_request.send(), decode_request.send())\n        };" in after


def test_a_refusal_is_judged_before_the_stock_rule_and_never_by_both(patched: Tree) -> None:
    text = (patched("router") / PD_ROUTER).read_text()
    judged = text.index("if pd_strict::judge(&response, prefill.as_ref(), decode.as_ref()) {")
    assert text[judged:].split("\n")[1].strip() == "return response;"
    assert judged < text.index("prefill.record_outcome(not_error);")


def test_the_gate_is_read_at_start(patched: Tree) -> None:
    text = (patched("router") / "src/server.rs").read_text()
    assert "crate::routers::http::pd_strict::check(&config.router_config)?;" in text


def test_no_module_of_ours_panics_by_a_word_that_does() -> None:
    for name in (
        "pd_ack",
        "pd_strict",
        "pd_load",
        "pd_dp",
        "pd_cache",
        "pd_race",
        "pd_relay",
        "pd_settings",
        "pd_gates",
        "pd_rank",
    ):
        code = (SOURCES / f"{name}.rs").read_text().partition("#[cfg(test)]")[0]
        for word in (".unwrap()", ".expect(", "panic!", "unreachable!", "todo!", "unsafe"):
            assert word not in code, f"{word} in {name}.rs"
