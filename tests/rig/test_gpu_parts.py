"""The command that measures everything on one GPU outside an engine: its steps, without one."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import topk_profile
from lab.rig.errors import RigError
from lab.rig.gpu import dsa_parts, parts
from tests.device import mutate, sanitize

ROOT = Path(__file__).parents[2]
SAY = "print('word')"


def run(folder: Path, *steps: parts.Step, seconds: float = 60) -> dict[str, str]:
    made = parts.Run(folder, {}, time.monotonic() + seconds)
    made.all(steps)
    return made.ended


def step(folder: Path, name: str, program: str, **more: Any) -> parts.Step:
    return parts.Step(name, ("-c", program), folder / f"{name}.json", **more)


def test_a_step_that_fails_takes_nothing_from_the_others_but_from_those_that_wait_for_it(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        step(tmp_path, "bad", "raise SystemExit(3)"),
        step(tmp_path, "good", SAY, prints=True),
        step(tmp_path, "waits", SAY, after="bad"),
        step(tmp_path, "timed", SAY, prints=True, alone=True, after="good"),
        step(tmp_path, "slow", "import time; time.sleep(60)", alone=True, limit=1, prints=True),
    )
    assert ended == {
        "bad": "ended with 3",
        "good": "done",
        "waits": "left out: bad is not done",
        "timed": "done",
        "slow": "not done in time",
    }
    assert (tmp_path / "good.json").read_text() == (tmp_path / "timed.json").read_text() == "word\n"
    assert not (tmp_path / "slow.json").exists()


def test_what_is_timed_begins_when_the_last_check_has_ended_and_one_by_one(tmp_path: Path) -> None:
    mark = f"import time, pathlib; p = pathlib.Path({str(tmp_path / 'marks')!r}).open('a'); p.write(%r); p.close()"
    run(
        tmp_path,
        step(tmp_path, "timed a", mark % "a", alone=True),
        step(tmp_path, "check", f"import time; time.sleep(0.5); {mark % 'c'}"),
        step(tmp_path, "timed b", mark % "b", alone=True),
    )
    assert (tmp_path / "marks").read_text() == "cab"


def test_when_the_time_is_up_nothing_is_begun(tmp_path: Path) -> None:
    assert run(tmp_path, step(tmp_path, "one", SAY), seconds=0) == {"one": "left out: no time"}


def listed(folder: Path) -> list[parts.Step]:
    return parts.steps(folder, folder, {"stock": folder / "library", "patched": folder / "patched"}, folder)


def test_every_step_is_a_script_that_is_there_and_takes_these_arguments(tmp_path: Path) -> None:
    for one in listed(tmp_path):
        kind, target = one.argv[:2]
        if kind == "-c":
            ast.parse(target)
        elif target != "pytest":
            text = (ROOT / f"{target.replace('.', '/')}.py").read_text(encoding="utf-8")
            for word in one.argv[2:]:
                if word.startswith("--"):
                    assert f'"{word.partition("=")[0]}"' in text, (one.name, word)


def test_named_steps_bring_what_they_wait_for_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    assert [one.name for one in parts.chosen(listed(tmp_path), "top-k times")] == ["stock library", "top-k times"]
    with pytest.raises(RigError, match=r"no step top-k; there are exactness 1, "):
        parts.chosen(listed(tmp_path), "top-k")


def test_the_four_parts_of_the_exactness_run_hold_every_test_but_the_sanitizers_once(tmp_path: Path) -> None:
    """By pytest's own choice: which of the file's tests each part collects."""
    text = (ROOT / "tests/device/test_exact_topk_device.py").read_text(encoding="utf-8")
    tests = {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    names = {name for name in tests if name.startswith("test_")}
    collected: list[str] = []

    class Plugin:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            collected.extend(item.name for item in session.items)

    for one in listed(tmp_path):
        if one.name.startswith("exactness"):
            argv = [str(ROOT / word) if word == "tests/device" else word for word in one.argv[2:]]
            assert pytest.main([*argv, "--collect-only", "-qq", f"--rootdir={ROOT}"], [Plugin()]) == 0
    assert len(collected) == len(set(collected)) > 300
    assert {name.partition("[")[0] for name in collected} == names - {"test_the_sanitizer_finds_nothing"}


CSV = """==PROF== Connected to process 12
"ID","Process ID","Host Name","Kernel Name","Grid Size","Block Size","dram__bytes_read.sum","gpu__time_duration.sum"
"","","","","","","byte","ns"
{rows}
==PROF== Disconnected from process 12
"""
NAME = "void (anonymous namespace)::{name}<float, 16>(Arguments)"
ROW = f'"{{number}}","12","a-host","{NAME}","(1, 1, 1)","(512, 1, 1)","{{read}}","{{ns}}"'


def profiled(*names: str) -> list[dict[str, Any]]:
    rows = (ROW.format(number=at, name=name, read=f"{at + 1},000,000", ns=1500) for at, name in enumerate(names))
    return topk_profile.kernels(CSV.format(rows="\n".join(rows)).splitlines())


def test_the_profilers_table_is_read_by_shape_and_names_no_host() -> None:
    found = profiled(*["read_all", "filter_rows", "finish_rows"] * len(topk_profile.SHAPES))
    assert found[1]["kernel"] == "filter_rows" and found[1]["read_mb"] == 2.0 and found[1]["us"] == 1.5
    assert found[1]["instructions"] is None and "a-host" not in json.dumps(found)
    rows = topk_profile.shapes(found)
    assert [row["name"] for row in rows] == [f"{rows}x{width}" for rows, width in topk_profile.SHAPES]
    assert rows[0]["value"] == 3.0 and rows[0]["passes"] == 2 and rows[0]["floor"]["kernel"] == "read_all"


def test_a_profiler_without_counters_is_told_in_its_own_words() -> None:
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        topk_profile.kernels(["==ERROR== ERR_NVGPUCTRPERM", ""])
    with pytest.raises(ValueError, match="it said nothing"):
        topk_profile.kernels([])
    with pytest.raises(ValueError, match="launches for 6 shapes"):
        topk_profile.shapes(profiled("read_all", "stream_rows"))


def test_without_a_profiler_the_result_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["topk_profile", f"--json={tmp_path / 'p.json'}"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert topk_profile.main() == 1
    written = json.loads((tmp_path / "p.json").read_text())
    assert written["rows"] == [] and "no ncu" in written["not_measured"]


@pytest.mark.parametrize(
    ("tool", "text", "code", "holds"),
    [
        ("memcheck", "all right\n========= ERROR SUMMARY: 0 errors", 0, True),
        ("racecheck", "all right\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, True),
        ("memcheck", "all right\n========= ERROR SUMMARY: 1 error", 9, False),
        ("initcheck", "========= ERROR SUMMARY: 0 errors", 1, False),
        ("synccheck", "Device not supported", 0, False),
    ],
)
def test_a_sanitizer_is_clean_when_it_says_so_and_the_round_was_right(
    tool: str, text: str, code: int, holds: bool
) -> None:
    assert sanitize.verdict(tool, code, text)["holds"] is holds


def test_a_mutation_is_caught_by_a_test_that_failed_and_by_nothing_else() -> None:
    failed = "FAILED tests/device/test_x.py::test_rows[randn] - AssertionError"
    assert mutate.judged("a", 1, failed)["by"] == "test_rows[randn]" and mutate.right(mutate.judged("a", 1, failed))
    for code, out in ((0, ""), (1, f"KernelBuildError\n{failed}"), (2, "ERROR collecting"), (4, "no tests")):
        assert not mutate.right(mutate.judged("a", code, out))
    assert mutate.right(mutate.judged(mutate.WHOLE, 0, "")) and not mutate.right(mutate.judged(mutate.WHOLE, 1, failed))


def test_a_copy_for_a_mutation_collects_the_device_tests_without_anything_above_them(tmp_path: Path) -> None:
    for name in (mutate.WHOLE, next(iter(mutate.MUTATIONS))):
        root = tmp_path / name[:5]
        assert mutate.copy(root, name) == ""
        argv = [*mutate.command(name), "--collect-only"]
        env = {**os.environ, "PYTHONPATH": str(root)}
        done = subprocess.run(argv, cwd=root, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "test_ragged_output" in done.stdout, done.stdout[-2000:]


@pytest.mark.parametrize("name", mutate.MUTATIONS)
def test_every_mutation_fits_the_source(name: str) -> None:
    text = (ROOT / "sources/kernels/exact_topk.cu").read_text(encoding="utf-8")
    assert text.count(mutate.MUTATIONS[name][0]) == 1


def test_the_cases_of_merged_parts_become_rows_without_numbers_that_json_lacks() -> None:
    case = {"kernel": "flashmla_kv", "heads": 64, "rows": 6, "ranks": 2, "max_error": float("nan"), "holds": False}
    (row,) = dsa_parts.rows_of([case])
    assert row["value"] is None and row["holds"] is False and row["name"] == "flashmla_kv, 64 heads, 6 rows, 2 ranks"
    timed = {**case, "max_error": 0.001, "holds": True, "localise_us": 2.0, "attention_us": 40.0}
    assert dsa_parts.rows_of([timed])[1]["value"] == 0.05
    json.dumps(dsa_parts.rows_of([case, timed]), allow_nan=False)
