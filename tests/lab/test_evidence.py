"""Every figure is what stands behind it, and each way to be wrong is seen."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import re
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
    altered = dataclasses.replace(claim, values=(claim.value * 1.03 + 1, *claim.values[1:]))
    if claim.kind is Kind.REPORTED:
        changed = [altered if other.id == claim.id else other for other in KNOWN]
        assert check.page(changed, {}) != check.page(KNOWN, {})
    else:
        assert list(claims.check(altered, ROOT, FORMULAS))


# Written anew and compared as a whole.
WHOLE = {Path(name).name for name in (check.PAGE, check.UPSTREAM)}


@pytest.mark.parametrize(
    "path", [path for path in check.pages(ROOT) if path.name not in WHOLE], ids=lambda path: path.name
)
def test_an_altered_figure_is_seen(path: Path) -> None:
    """Each figure of each page in turn, its last digit another one: of two, for a column may hold one of them too."""
    page = path.read_text(encoding="utf-8")
    before = len(list(figures.check(path.name, page, BY_ID)))
    for match in figures.FIGURE.finditer(page):
        if not list(figures.figures(match[0])):
            continue
        begin, end = list(re.finditer(figures.NUMBER, match["numbers"]))[-1].span()
        begin, end = begin + match.start(), end + match.start()
        number = page[begin:end]
        others = (
            [number[:-1] + str((int(number[-1]) + by) % 10) for by in (5, 1)] if number[-1].isdigit() else ["seven"]
        )
        altered = [page[:begin] + other + page[end:] for other in others]
        if list(figures.figures(altered[0])) == list(figures.figures(page)):
            continue  # inside code
        assert any(len(list(figures.check(path.name, other, BY_ID))) > before for other in altered), match[0]


ENTRY = {
    "id": "a-claim",
    "statement": "A step takes so long",
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
        (without(statement="The same with more"), "words that stand alone"),
        (without(statement="Its parts"), "words that stand alone"),
        (without(statement="The drop of that union"), "words that stand alone"),
        (without(not_shown="as before"), "words that stand alone"),
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
    "product": lambda: Quantity(1, "ms") * Quantity(1, "us"),  # type: ignore[operator]
    "nothing to divide by": lambda: Quantity(1, "ms").over(Quantity(0, "ms")),
    "plain number": lambda: Quantity(1, "ms") + 1,  # type: ignore[operator]
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
        ("product", "ms", "its formula fails: TypeError"),
        ("nothing to divide by", "×", "its formula fails: ZeroDivisionError"),
        ("plain number", "ms", "its formula fails: AttributeError"),
    ],
)
def test_a_formula_that_is_missing_mixed_or_wrong_is_named(formula: str, unit: str, said: str) -> None:
    claim = dataclasses.replace(KNOWN[0], kind=Kind.RECOMPUTED, formula=formula, unit=unit, values=(47.0,))
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
    assert measured(result(tmp_path), "it.json", "rows[64x1 a.b].value") == (3.5,)


def test_a_row_without_a_name_goes_by_its_kernel(tmp_path: Path) -> None:
    kernels = [{"kernel": "first", "us": 1.5}, {"kernel": "second", "us": 2.5}]
    root = result(tmp_path, rows=[{"name": "one", "kernels": kernels}])
    assert measured(root, "it.json", "rows[one].kernels[second].us") == (2.5,)
    assert measured(root, "it.json", "rows[*].kernels[*].us") == (1.5, 2.5)
    with pytest.raises(StaleResult, match="has nothing at"):
        measured(root, "it.json", "rows[one].kernels[third].us")


def test_a_star_stands_for_all_rows_of_a_list_and_each_of_its_values_counts(tmp_path: Path) -> None:
    rows = [{"name": f"{number} to stock", "value": number / 3} for number in range(1, 4)]
    root = result(tmp_path, rows=[*rows, {"name": "other", "value": 9}])
    assert measured(root, "it.json", "rows[* to stock].value") == (1 / 3, 2 / 3, 1.0)
    claim = dataclasses.replace(CLAIM, kind=Kind.MEASURED, result="it.json", pick="rows[* to stock].value", unit="×")
    held = dataclasses.replace(claim, values=(0.33, 0.67, 1.0), tolerance=0.005)
    assert list(claims.check(held, root, {})) == []
    other = dataclasses.replace(held, values=(0.33, 0.68, 1.0))
    assert "says 0.68 ×, within 0.005; found 0.666667" in str(next(claims.check(other, root, {})))
    assert "says 2 values; found 3" in str(next(claims.check(dataclasses.replace(held, values=(0.33, 0.67)), root, {})))


@pytest.mark.parametrize(
    ("changed", "pick", "said"),
    [
        ({"script_sha256": "0" * 64}, "rows", "is stale"),
        ({"script": "benchmarks/gone.py"}, "rows", "is stale"),
        ({"modules": {"lab/gone.py": "0"}}, "rows", "is stale: lab/gone.py has changed"),
        ({"modules": {"benchmarks/it.py": "0"}}, "rows", "is stale: benchmarks/it.py has changed"),
        ({"modules": {"../outside.py": "0"}}, "rows", "is stale"),
        ({"modules": ["lab/it.py"]}, "rows", "no table of digests"),
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


CLAIM = Claim("it", "It is so", (1234.56,), "ms", Kind.REPORTED, KNOWN[0].date)


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
        "It takes 1.235 s, 1.23456 s or +1,235 ms. <!-- claim: it -->",
        "asked 20 times a day, 64 rows x 12 columns",
        "from 4 S to 4.5 S, 3 H200 of one host, a second look, 2 patches in all",
        "`kill = 3 s` in a command, <!-- 12 ms in a note -->",
        "It takes about 1.23K ms, or 1.235 thousand ms. <!-- claim: it -->",
        "It takes 1.235 seconds,\nor [1,235](x.md) **milliseconds**. <!-- claim: it -->",
    ],
)
def test_a_figure_that_its_claim_shows_and_text_without_one_hold(text: str) -> None:
    assert list(figures.check("page", text, {"it": CLAIM})) == []


@pytest.mark.parametrize(
    "text",
    [
        *(
            "from 99 up to 24 MiB",
            "99 → 24 MiB",
            "99 to 24 MiB",
            "99/24 MiB",
            "99 – 24 MiB",
            "99, 24 MiB",
            "99 ± 24 MiB",
        ),
        *("99 +/- 24 MiB", "99...24 MiB", "99 vs 24 MiB", "99 — 24 MiB", "99 + 24 MiB", "99 by 24 MiB", "99 x 24 MiB"),
        *("99 MiB to 24.", "from 99 MiB to 24, and", "99 MiB → 24", "99 or 24 spare MiB"),
    ],
)
def test_each_number_of_a_row_has_the_unit_behind_the_last(text: str) -> None:
    assert [figure.text for figure in figures.figures(text)] == ["99", "24"]


def test_a_column_of_a_reported_table_is_one_claim() -> None:
    column = dataclasses.replace(CLAIM, values=(3.0, -4.5), unit="s")
    page = "<!-- claim: it -->\n\n| what | ran, s |\n|---|---|\n| a | 3 |\n| b | -4.5 |\n| c | {} |"
    assert list(figures.check("page", page.format("-"), {"it": column})) == []
    assert "4.6 s is behind" in str(next(figures.check("page", page.format("4.6"), {"it": column})))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("It takes 1,234.6 ms.", "no claim"),
        ("It takes 1,234.7 ms. <!-- claim: it -->", "it = 1,234.56 ms"),
        ("It takes 1,234.6 us. <!-- claim: it -->", "it = 1,234.56 ms"),
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
        ("a step of 12\nms", "12 ms"),
        ("12  ms", "12 ms"),
        ("12&nbsp;ms", "12 ms"),
        ("by **12** %", "12 %"),
        ("by **12 %**", "12 %"),
        ("a 12-ms step", "12 ms"),
        ("1.2e3 ms", "1.2e3 ms"),
        ("12 μs", "12 us"),
        ("12 µs", "12 us"),
        ("12 GB", "12 GB"),
        ("12 KiB", "12 KiB"),
        ("12 minutes", "12 min"),
        ("it is 3x as fast", "3 ×"),
        ("3 times faster", "3 ×"),
        ("at 12 tok/s", "12 tokens/s"),
        ("| what | ran, s |\n|---|---|\n| it | 12 |", "12 s"),
        ("| what | memory (MiB) |\n|---|---|\n| it | 12 |", "12 MiB"),
        ("| | 8 |\n|---|---|\n| 1 row, us | 12.5 (2.0) |", "12.5 us"),
        ("It fell: -1,235 ms. <!-- claim: it -->", "-1,235 ms"),
        ("12 gigabytes", "12 GB"),
        ("12 kibibytes", "12 KiB"),
        ("12 MIB", "12 MiB"),
        ("12 Gb/s", "12 Gbit/s"),
        ("12 Tokens", "12 tokens"),
        ("12 per cent", "12 %"),
        ("a 2.5-fold gain", "2.5 ×"),
        ("×3.9", "3.9 ×"),
        ("x3.9 faster", "3.9 ×"),
        ("12 times what it was", "12 ×"),
        ("217K tokens", "217K tokens"),
        ("217 thousand tokens", "217thousand tokens"),
        ("3.4 requests a second", "3.4 req/s"),
        ("3.4 RPS", "3.4 req/s"),
        ("12 tps", "12 tokens/s"),
        ("after 2 days", "2 days"),
        ("twenty seconds", "twenty s"),
        ("half a second", "half a s"),
        ("½ s", "1⁄2 s"),
        (".5 s", ".5 s"),
        ("12,5 ms", "12,5 ms"),
        ("1.2.3 ms", "1.2.3 ms"),
        ("1E3 ms", "1E3 ms"),
        ("１２ ms", "12 ms"),
        ("12\u200b ms", "12 ms"),
        ("12\u3000ms", "12 ms"),
        ("12&hairsp;ms", "12 ms"),
        ("<b>12</b> ms", "12 ms"),
        ("12<br>ms", "12 ms"),
        ("12 <!-- nothing --> ms", "12 ms"),
        ("12\\ ms", "12 ms"),
        ("12 \\%", "12 %"),
        ("$12\\,\\mathrm{ms}$", "12 ms"),
        ("[12](x.md) ms", "12 ms"),
        ("12 [ms][unit]", "12 ms"),
        ("It takes `12 ms`", "12 ms"),
        ("`12` ms", "12 ms"),
        ("> a step of 12\n> ms", "12 ms"),
        ("8,192 fresh tokens", "8,192 tokens"),
        ("12 or more\nseconds", "12 s"),
        ("latency (ms): 12", "12 ms"),
        ("12 ms-long", "12 ms"),
        ("| what | value | unit |\n|---|---|---|\n| it | 12 | ms |", "12 ms"),
        ("| what | ran [ms] |\n|---|---|\n| it | 12 |", "12 ms"),
        ("| what | us a call |\n|---|---|\n| it | 12 |", "12 us"),
        ("| a | b |\n|---|---|\n| p99 (ms) | 12 |", "12 ms"),
        ("what | ms\n---|---\nit | 12", "12 ms"),
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
        ({"tolerance": 0.6}, "tolerance 0.6: more than rounding 1 needs"),
        ({"tolerance": -0.1}, "tolerance -0.1"),
        ({"value": []}, "value is empty"),
        ({"value": [1, "two"]}, "value is no number"),
        ({"date": datetime.date(2999, 1, 1)}, "date is in the future"),
        ({"date": datetime.datetime(2026, 1, 1)}, "date is no date"),
    ],
)
def test_a_claim_of_odd_values_is_named_and_is_no_traceback(change: dict[str, Any], what: str) -> None:
    entry: dict[str, Any] = {"id": "a", "statement": "s", "value": 1, "unit": "ms", "kind": "reported"}
    entry |= {"source": "a note", "date": datetime.date(2026, 1, 1)}
    assert not any(what in fault for fault in claims.faults(entry))
    assert any(what in fault for fault in claims.faults(entry | change))


def test_a_formula_gives_no_list_and_a_list_is_no_wider_than_its_finest_value() -> None:
    entry = without("source", "not_shown", kind="recomputed", formula="shard", value=[1, 2])
    entry["date"] = datetime.date(2026, 1, 1)
    assert "value is a list, which a recomputed claim has not" in list(claims.faults(entry))
    entry = without(value=[1, 0.25], tolerance=0.005) | {"date": datetime.date(2026, 1, 1)}
    assert list(claims.faults(entry)) == []
    assert "more than rounding" in str(list(claims.faults(entry | {"tolerance": 0.006})))


def test_a_result_without_its_head_is_named_unless_it_is_listed_as_an_older_one(tmp_path: Path) -> None:
    root = written(tmp_path, ENTRY)
    (root / "evidence/whole").mkdir()
    (root / "evidence/whole/bare.json").write_text('{"value": 1}', encoding="utf-8")
    assert any(
        problem.where == "evidence/whole/bare.json" and "lacks script" in problem.what
        for problem in check.results(root)
    )
    listed = (root / claims.FILE).read_text(encoding="utf-8")
    older = '[[older]]\nresult = "evidence/whole/{}.json"\nlacks = "all"\n'
    (root / claims.FILE).write_text(older.format("bare") + listed, encoding="utf-8")
    assert list(check.results(root)) == []
    assert "`evidence/whole/bare.json`" in check.made(root)[check.PAGE]
    (root / claims.FILE).write_text(older.format("bare") + older.format("gone") + listed, encoding="utf-8")
    assert [problem.what for problem in check.results(root)] == ["is no file"]
    (root / claims.FILE).write_text('[[older]]\nresult = ""\n' + listed, encoding="utf-8")
    assert "expected result and lacks" in str(next(check.results(root)))


def test_a_whole_result_is_no_older_one(tmp_path: Path) -> None:
    root = result(written(tmp_path, ENTRY))
    (root / "it.json").rename(root / "evidence/it.json")
    listed = (root / claims.FILE).read_text(encoding="utf-8")
    (root / claims.FILE).write_text(
        '[[older]]\nresult = "evidence/it.json"\nlacks = "all"\n' + listed, encoding="utf-8"
    )
    assert "take it off" in str(next(check.results(root)))


def test_a_file_of_the_docs_that_nobody_checks_is_named(tmp_path: Path) -> None:
    root = written(tmp_path, ENTRY)
    (root / "docs/more.rst").write_text("12 ms", encoding="utf-8")
    assert [problem.where for problem in check.problems(root) if "no page" in problem.what] == ["docs/more.rst"]


def test_the_page_of_stand_ins_is_compared_too(tmp_path: Path) -> None:
    root = written(tmp_path, ENTRY)
    check.write(root)
    page = root / check.STAND_INS
    page.write_text(page.read_text(encoding="utf-8").replace("kernel", "colonel", 1), encoding="utf-8")
    assert any(problem.where == check.STAND_INS for problem in check.problems(root))


@pytest.mark.parametrize("text", ["[]", "5", '"words"', '{"script": 5, "script_sha256": "x", "machine": "m"}'])
def test_a_result_of_another_form_is_stale_and_is_no_traceback(tmp_path: Path, text: str) -> None:
    (tmp_path / "one.json").write_text(text)
    with pytest.raises(claims.StaleResult):
        claims.measured(tmp_path, "one.json", "rows")


@pytest.mark.parametrize("script", ["nowhere.py", "/etc/hostname", "../outside.py", "README.md", "."])
def test_a_result_of_a_script_that_is_not_of_the_repository_is_stale(tmp_path: Path, script: str) -> None:
    (tmp_path / "README.md").write_text("no script")
    digest = hashlib.sha256(b"no script").hexdigest()
    result = {"script": script, "script_sha256": digest, "machine": "m", "versions": {"python": "3"}, "seed": None}
    (tmp_path / "one.json").write_text(json.dumps(result | {"value": 1}))
    with pytest.raises(claims.StaleResult, match="is stale"):
        claims.measured(tmp_path, "one.json", "value")


NOTES = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs/review-notes.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
][1:]


@pytest.mark.parametrize("row", NOTES, ids=lambda row: row[0][:40])
def test_every_answer_to_a_review_rests_on_a_claim_a_file_or_says_that_nobody_measured_it(row: list[str]) -> None:
    question, answer, rests = row
    assert question.endswith("?") and answer
    words = re.findall(r"`([^`]+)`", rests)
    assert all(word in BY_ID or (ROOT / word).is_file() for word in words), words
    assert words or "not measured" in rests
    for word in words:
        # How a claim is known stands before its id.
        if word in BY_ID:
            assert BY_ID[word].kind.value in rests


def test_the_notes_answer_every_question() -> None:
    assert len(NOTES) >= 25


def test_the_ratios_of_the_router_stand_in_their_table_as_they_were_measured() -> None:
    """Each with its interval, in its own cell: a claim tells only that a number is one of its column's."""
    said = {"request rate": "per_second", "p99": "p99_ms", "CPU a request": "cpu_us"}
    rows = {
        row["name"].strip(): row["value"]
        for row in json.loads((ROOT / "evidence/router/release.json").read_text(encoding="utf-8"))["rows"]
    }
    found = 0
    for line in (ROOT / "docs/router.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7 and cells[1] in said:
            for connections, cell in zip((1, 4, 16, 64, 256), cells[2:], strict=True):
                name = f"{connections} connections, {cells[0]}: {said[cells[1]]} to stock"
                low, high = rows[f"{name}, low"], rows[f"{name}, high"]
                assert cell == f"{rows[name]:.2f} ({low:.2f} to {high:.2f})"
                found += 1
    assert found == 60
