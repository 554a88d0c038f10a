"""``tools/model.py``: its tables are the library's numbers, its refusals usage errors."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from benchmarks.sweep import AXES
from lab.models.cli import main
from lab.models.sweep import draw

ROOT = Path(__file__).parents[2]
SMALL = ["sweep", "--prefixes=1,8", "--cold=0", "--burst=1", "--slow=1", "--requests=40"]


def rows(*arguments: str) -> list[dict[str, Any]]:
    done = CliRunner().invoke(main, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert made["kind"] == "model"
    return list(made["rows"])


def test_the_ledger_has_four_and_four_and_a_half_shards() -> None:
    entry = {
        layout: sum(row["S"] for row in rows("collectives") if row["layout"] == layout and row["end"] == "entry")
        for layout in ("all-reduce", "input-sp")
    }
    assert entry == {"all-reduce": 4.0, "input-sp": 4.5}


def test_the_pool_observed_fits_its_own_budget() -> None:
    full = [row for row in rows("capacity", "--gib=6.33") if row["kv"] == "fp8" and row["keeping"] == "full copy"]
    assert {row["tokens"] for row in full} == {110_464}


def test_a_draft_a_pack_buffer_and_a_workspace_leave_less_and_a_gathered_request_less_than_four_copies() -> None:
    def held(*arguments: str) -> list[float]:
        return [row["tokens"] for row in rows("capacity", *arguments) if row["kv"] == "fp8" and row["ranks"] == 4]

    whole = held()
    for name in ("draft", "pack", "workspace"):
        assert all(less < more for less, more in zip(held(f"--{name}=0.5"), whole, strict=True))
    assert held("--draft=0.5", "--pack=0.5", "--workspace=1") == held("--gib=4.33")
    shard = next(row for row in rows("capacity") if row["keeping"] == "page shard" and row["ranks"] == 4)
    assert 3.9 < shard["times a copy"] < 4


def test_one_sender_needs_more_slices_than_four() -> None:
    slices = {row["way"]: row["slices of the busiest"] for row in rows("transfer")}
    assert slices["cp0-only"] > slices["layer-owner"] >= slices["all-cp"]


def test_a_sweep_compares_the_four_designs_and_draws_them(tmp_path: Path) -> None:
    plot = tmp_path / "sweep.svg"
    lines = rows(*SMALL, f"--plot={plot}")
    assert len(lines) == 4 * 2
    assert len({line["design"] for line in lines}) == 4
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")
    panels = draw(lines).axes
    assert {axes.get_xlabel() for axes in panels} == {
        *("independent prefixes", "share of cold prefixes", "requests at once", "slow decode, factor")
    }
    assert all(len(axes.lines) == 4 for axes in panels)


def test_the_same_seed_draws_the_same_plot(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        rows(*SMALL, f"--plot={tmp_path / name}")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_sweep_shows_a_bar_on_a_terminal_and_its_table_on_standard_output(tmp_path: Path) -> None:
    terminal, theirs = pty.openpty()
    out = tmp_path / "table.txt"
    with out.open("wb") as table:
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools/model.py"), *SMALL], stdout=table, stderr=theirs, check=False
        )
    os.close(theirs)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert done.returncode == 0
    assert "simulating" in shown and "100%" in shown and "[" in shown
    assert "(model)" in out.read_text() and "simulating" not in out.read_text()


def test_a_hundred_points_are_what_the_committed_time_is_of() -> None:
    made = json.loads((ROOT / "evidence/models/sweep.json").read_text(encoding="utf-8"))
    assert len(AXES.jobs()) == 100 == made["rows"][0]["value"]
    assert all(row["holds"] is not False for row in made["rows"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sweep", "--gib=1"], "a request has 81920"),
        (["sweep", "--prefixes=many"], "no list of numbers"),
        (["sweep", "--cold=2"], "cold share"),
        (["collectives", "--tp=3"], "equal parts"),
        (["transfer", "--buffer=100"], "does not hold one row"),
        (["capacity", "--gib=1", "--pack=2"], "are reserved of"),
        (["capacity", "--gib=inf"], "inf is no finite number"),
        (["capacity", "--gib=nan"], "nan is no finite number"),
        (["capacity", "--gib=-1"], "not in the range"),
        (["capacity", "--pack=1e300"], "cannot convert"),
        (["sweep", "--rate=nan"], "nan is no finite number"),
        (["sweep", "--slow=inf"], "no finite number"),
        (["sweep", "--plot=/nonexistent/sweep.svg"], "cannot be written"),
        (["sweep", "--plot=sweep.bmp"], "neither in .svg nor in .png"),
        (["sweep", "--plot=."], "neither in .svg"),
        (["nothing"], "No such command"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert said in done.output
