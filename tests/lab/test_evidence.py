"""Every figure is what stands behind it, and each way to be wrong is seen."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lab.evidence import check, claims, figures
from lab.evidence.claims import Claim, Kind, StaleResult, measured
from lab.evidence.formulas import FORMULAS
from lab.evidence.quantity import Quantity
from patchbundle import cli

ROOT = Path(__file__).parents[2]
KNOWN, WRONG = claims.read(ROOT)
BY_ID = {claim.id: claim for claim in KNOWN}


def test_every_figure_of_this_repository_holds() -> None:
    assert WRONG == []
    assert [str(problem) for problem in check.problems(ROOT)] == []


@pytest.mark.parametrize("claim", KNOWN, ids=lambda claim: claim.id)
def test_an_altered_claim_is_seen(claim: Claim) -> None:
    """By its formula or its result; a reported one by the page that shows it."""
    altered = dataclasses.replace(claim, value=claim.value * 1.03 + 1)
    if claim.kind is Kind.REPORTED:
        changed = [altered if other.id == claim.id else other for other in KNOWN]
        assert check.page(changed) != check.page(KNOWN)
    else:
        assert list(claims.check(altered, ROOT, FORMULAS))


@pytest.mark.parametrize(
    "path", [path for path in check.pages(ROOT) if path != ROOT / check.PAGE], ids=lambda path: path.name
)
def test_an_altered_figure_is_seen(path: Path) -> None:
    """Each figure of each page in turn, its last digit another one."""
    page = path.read_text(encoding="utf-8")
    before = len(list(figures.check(path.name, page, BY_ID)))
    for match in figures.FIGURE.finditer(page):
        if not list(figures.figures(match[0])):
            continue
        digit = next(at for at in range(match.end() - 1, match.start() - 1, -1) if page[at].isdigit())
        altered = page[:digit] + str((int(page[digit]) + 5) % 10) + page[digit + 1 :]
        if list(figures.figures(altered)) == list(figures.figures(page)):
            continue  # inside code
        after = len(list(figures.check(path.name, altered, BY_ID)))
        assert after > before, match[0]


ENTRY = {
    "id": "a-claim",
    "statement": "It is so",
    "value": 3,
    "unit": "ms",
    "kind": "reported",
    "source": "somebody",
    "not_shown": "the rest",
    "date": "2026-11-29",
}


def written(folder: Path, *entries: dict[str, Any]) -> Path:
    """A root whose claims are these."""
    lines: list[str] = []
    for entry in entries:
        lines.append("[[claim]]")
        lines += [
            f"{name} = {value if name in ('date', 'value', 'tolerance') else json.dumps(value)}"
            for name, value in entry.items()
        ]
    (folder / "evidence").mkdir(exist_ok=True)
    (folder / "docs").mkdir(exist_ok=True)
    (folder / "README.md").touch()
    (folder / claims.FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def without(*names: str, **changed: Any) -> dict[str, Any]:
    return {name: value for name, value in {**ENTRY, **changed}.items() if name not in names}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (without("value"), "lacks value"),
        (without("source"), "is reported and lacks source"),
        (without("not_shown"), "lacks not_shown"),
        (without(kind="guessed"), "kind 'guessed'"),
        (without(kind="measured"), "lacks pick, result"),
        (without("source", "not_shown", kind="recomputed"), "lacks formula"),
        (without(unit="parsecs"), "unit 'parsecs'"),
        (without(id="A claim"), "small letters"),
        (without(value="true"), "value is no number"),
        (without(date='"today"'), "date is no date"),
        (without(formula="shard"), "which a reported claim has not"),
    ],
)
def test_what_is_no_claim_is_named(tmp_path: Path, entry: dict[str, Any], said: str) -> None:
    _, problems = claims.read(written(tmp_path, entry))
    assert any(said in str(problem) for problem in problems)
    assert claims.read(tmp_path)[0] == []


def test_a_claim_that_is_there_twice_is_named(tmp_path: Path) -> None:
    _, problems = claims.read(written(tmp_path, ENTRY, ENTRY))
    assert "is there twice" in str(problems[0])


def test_no_file_and_no_claim_are_no_pass(tmp_path: Path) -> None:
    assert "cannot be read" in str(claims.read(tmp_path)[1][0])
    assert "holds no claim" in str(claims.read(written(tmp_path))[1][0])


MIXED = {
    "sum": lambda: Quantity(1, "MiB") + Quantity(1, "ms"),
    "difference": lambda: Quantity(1, "MiB") - Quantity(1, "GiB"),
    "ratio": lambda: Quantity(1, "tokens").over(Quantity(1, "bytes")),
    "gain": lambda: Quantity(1, "ms").above(Quantity(1, "s")),
    "share": lambda: Quantity(1, "ms").share(Quantity(1, "us")),
}


@pytest.mark.parametrize(
    ("formula", "unit", "said"),
    [
        ("nothing", "ms", "no formula"),
        ("shard", "ms", "its formula gives MiB"),
        ("shard", "MiB", "found 48"),
        ("sum", "MiB", "its formula mixes MiB and ms"),
        ("difference", "MiB", "its formula mixes MiB and GiB"),
        ("ratio", "×", "its formula mixes tokens and bytes"),
        ("gain", "%", "its formula mixes ms and s"),
        ("share", "%", "its formula mixes ms and us"),
    ],
)
def test_a_formula_that_is_missing_mixed_or_wrong_is_named(formula: str, unit: str, said: str) -> None:
    claim = dataclasses.replace(KNOWN[0], kind=Kind.RECOMPUTED, formula=formula, unit=unit, value=47.0)
    assert said in str(next(claims.check(claim, ROOT, {**FORMULAS, **MIXED})))


def result(folder: Path, **changed: Any) -> Path:
    """A root with a script and a result of it."""
    script = folder / "benchmarks" / "it.py"
    script.parent.mkdir()
    script.write_text("pass\n", encoding="utf-8")
    content = {
        "script": "benchmarks/it.py",
        "script_sha256": hashlib.sha256(script.read_bytes()).hexdigest(),
        "machine": "one",
        "versions": {"torch": "2.13.0"},
        "seed": 1,
        "rows": [{"name": "64x1 a.b", "value": 3.5}],
        **changed,
    }
    (folder / "it.json").write_text(
        json.dumps({name: value for name, value in content.items() if value is not None}), encoding="utf-8"
    )
    return folder


def test_a_measured_figure_is_read_from_its_result(tmp_path: Path) -> None:
    assert measured(result(tmp_path), "it.json", "rows[64x1 a.b].value") == 3.5


@pytest.mark.parametrize(
    ("changed", "pick", "said"),
    [
        ({"script_sha256": "0" * 64}, "rows", "is stale"),
        ({"script": "benchmarks/gone.py"}, "rows", "is stale"),
        ({"seed": None}, "rows", "lacks seed"),
        ({"machine": None, "versions": None}, "rows", "lacks machine, versions"),
        ({}, "rows[other].value", "nothing at"),
        ({}, "columns", "nothing at"),
        ({}, "rows", "no number"),
    ],
)
def test_a_result_that_cannot_stand_behind_a_figure_is_named(
    tmp_path: Path, changed: dict[str, Any], pick: str, said: str
) -> None:
    with pytest.raises(StaleResult, match=said):
        measured(result(tmp_path, **changed), "it.json", pick)


def test_a_result_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StaleResult, match="cannot be read"):
        measured(tmp_path, "it.json", "rows")


CLAIM = Claim("it", "It is so", 1234.56, "ms", Kind.REPORTED, KNOWN[0].date)


@pytest.mark.parametrize(
    "text",
    [
        "It takes 1,234.6 ms. <!-- claim: it -->",
        "- It takes\n  1235 ms, <!-- claim: it -->",
        "| time | 1,234.56 ms <!-- claim: it --> |",
        "<!-- claim: it -->\n| time |\n|---|\n| 1,235 ms |",
        "`sleep 3 s` and no figure",
        "```text\n12 ms\n```",
        "version 0.5.17, sm_90, page 64, 3.4 requests",
    ],
)
def test_a_figure_that_its_claim_shows_and_text_without_one_hold(text: str) -> None:
    assert list(figures.check("page", text, {"it": CLAIM})) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("It takes 1,234.6 ms.", "no claim"),
        ("It takes 1,234.7 ms. <!-- claim: it -->", "it = 1234.56 ms"),
        ("It takes 1,234.6 us. <!-- claim: it -->", "it = 1234.56 ms"),
        ("It takes 12 to 1,235 ms. <!-- claim: it -->", "12 ms"),
        ("It takes 1,235 ms.\n\n<!-- claim: it -->", "no claim"),
        ("<!-- claim: it -->\n| 1,235 ms |\n\nAnd 1,235 ms.", "no claim"),
        ("Nothing. <!-- claim: gone -->", "no claim 'gone'"),
        ("Grew by 12 %.", "12 %"),
        ("Twice: 2×", "2 ×"),
        ("It made 12 tokens/s.", "12 tokens"),
        ("It took 12 seconds.", "12 s"),
        ("It grew by 3 percent.", "3 %"),
        ("After 5 microseconds", "5 us"),
        ("A step of 7 ms/layer", "7 ms"),
        ("12\u00a0ms", "12 ms"),
        ("In 12ms", "12 ms"),
    ],
)
def test_a_figure_without_its_claim_is_named_with_its_line(text: str, said: str) -> None:
    problems = list(figures.check("page", text, {"it": CLAIM}))
    assert len(problems) == 1 and said in str(problems[0])
    assert problems[0].where.startswith("page:")


def test_the_list_of_claims_must_be_the_written_one(tmp_path: Path) -> None:
    root = written(tmp_path, ENTRY)
    assert any(problem.where == check.PAGE for problem in check.problems(root))
    check.write(root)
    assert not any(problem.where == check.PAGE for problem in check.problems(root))
    (root / check.PAGE).write_text("3 ms", encoding="utf-8")
    assert any(problem.where == check.PAGE for problem in check.problems(root))


def test_a_formula_that_no_claim_uses_is_named(tmp_path: Path) -> None:
    problems = check.problems(written(tmp_path, ENTRY))
    assert {"shard stands behind no claim"} <= {problem.what for problem in problems}


def test_the_checker_refuses_with_the_first_and_lists_all(tmp_path: Path) -> None:
    for name in ("config", "patches", "sources"):
        shutil.copytree(ROOT / name, tmp_path / name)
    written(tmp_path, without("source"), ENTRY | {"id": "other"})
    done = CliRunner().invoke(cli.check_cli, ["--evidence", "--json", "--bundle", str(tmp_path)])
    assert done.exit_code == 1
    told = json.loads(done.stdout)
    assert told["error"]["reason"] == "evidence"
    assert len(told["result"]["evidence"]) > 1


def test_the_checker_holds_here() -> None:
    done = CliRunner().invoke(cli.check_cli, ["--evidence", "--bundle", str(ROOT)])
    assert done.exit_code == 0, done.output
    assert "all are what stands behind them" in done.output


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"unit": ["ms"]}, "unit: expected a text"),
        ({"kind": ["reported"]}, "kind: expected a text"),
        ({"source": " "}, "source: expected a text"),
        ({"statement": ""}, "statement: expected a text"),
        ({"value": float("nan")}, "value is not finite"),
        ({"tolerance": float("inf")}, "tolerance is not finite"),
        ({"date": datetime.date(2999, 1, 1)}, "date is in the future"),
        ({"date": datetime.datetime(2026, 1, 1)}, "date is no date"),
    ],
)
def test_a_claim_of_odd_values_is_named_and_is_no_traceback(change: dict[str, Any], what: str) -> None:
    entry: dict[str, Any] = {"id": "a", "statement": "s", "value": 1, "unit": "ms", "kind": "reported"}
    entry |= {"source": "a note", "date": datetime.date(2026, 1, 1)}
    assert not any(what in fault for fault in claims.faults(entry))
    assert any(what in fault for fault in claims.faults(entry | change))


@pytest.mark.parametrize("text", ["[]", "5", '"words"', '{"script": 5, "script_sha256": "x", "machine": "m"}'])
def test_a_result_of_another_form_is_stale_and_is_no_traceback(tmp_path: Path, text: str) -> None:
    (tmp_path / "one.json").write_text(text)
    with pytest.raises(claims.StaleResult):
        claims.measured(tmp_path, "one.json", "rows")


@pytest.mark.parametrize("script", ["nowhere.py", "/etc/hostname", "../outside.py"])
def test_a_result_of_a_script_that_is_not_of_the_repository_is_stale(tmp_path: Path, script: str) -> None:
    result = {"script": script, "script_sha256": "absent", "machine": "m", "versions": {"python": "3"}, "seed": None}
    (tmp_path / "one.json").write_text(json.dumps(result | {"value": 1}))
    with pytest.raises(claims.StaleResult, match="is stale"):
        claims.measured(tmp_path, "one.json", "value")
