"""The attention -> MoE boundary: eight real processes give what one process gives, at the counted bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import boundary_plot
from lab.models.boundary import Layout, Shape, entry, exit_, sent
from lab.models.collectives import Collective, NotDivisible, Op

ROOT = Path(__file__).parents[2]
EIGHT = Shape(chunk=64, hidden=32, itemsize=4, tp=2, cp=4)


def test_input_sp_raises_the_entry_from_four_to_four_and_a_half_shards() -> None:
    shape = Shape()
    assert shape.shard == 48 << 20
    assert sent(entry(Layout.ALL_REDUCE, shape)) == 192 << 20
    assert sent(entry(Layout.INPUT_SP, shape)) == 216 << 20


def test_a_persistent_residual_moves_a_gather_and_saves_none_against_all_reduce() -> None:
    shape = Shape()
    whole = {layout: sent(entry(layout, shape)) + sent(exit_(layout, shape)) for layout in Layout}
    assert whole[Layout.PERSISTENT] == whole[Layout.ALL_REDUCE] == 8 * shape.shard
    assert whole[Layout.INPUT_SP] == 8 * shape.shard + shape.shard // 2


def test_a_gather_behind_the_projection_sends_the_projections_width() -> None:
    shape = Shape()
    narrow = sent(exit_(Layout.GATHER_FUSED, shape, projected=shape.hidden // 2))
    assert sent(exit_(Layout.GATHER_FUSED, shape)) - narrow == shape.shard // 4


@pytest.mark.parametrize("bad", [{"tp": 3}, {"chunk": 0}, {"chunk": 12}])
def test_a_shape_without_equal_parts_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"equal parts|positive"):
        Shape(**bad)


def test_a_tensor_without_equal_parts_is_refused() -> None:
    with pytest.raises(NotDivisible, match="no 4 equal parts"):
        Collective("it", Op.ALL_GATHER, 4, 10)


def run(tmp_path: Path, *options: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "boundary.py"), *options],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """One small run of the whole script on eight gloo processes."""
    out = tmp_path_factory.mktemp("boundary") / "boundary.json"
    small = ["--chunk=64", "--hidden=32", "--rounds=2", "--calls=1", "--piece=4096", "--dtype=float32"]
    done = run(out.parent, "--world=8", "--device=cpu", f"--out={out}", *small)
    assert done.returncode == 0, done.stderr
    made = json.loads(out.read_text())
    assert isinstance(made, dict)
    return made


def test_every_layout_gives_on_eight_processes_what_one_process_gives(eight: dict[str, object]) -> None:
    checks = eight["checks"]
    assert isinstance(checks, dict)
    assert set(checks) == {"all-reduce", "input-sp", "persistent-residual"}
    for name, check in checks.items():
        assert check["error"] < 1e-5, name
        assert check["bitwise_all_reduce"], name


def test_every_layout_really_sends_the_bytes_of_the_ledger(eight: dict[str, object]) -> None:
    checks = eight["checks"]
    assert isinstance(checks, dict)
    for name, check in checks.items():
        layout = Layout(name)
        expected = 2 * (sent(entry(layout, EIGHT)) + sent(exit_(layout, EIGHT)))
        # Behind the last layer the parts of the residual are gathered once, so that it can be compared.
        extra = EIGHT.shard // 2 if layout is Layout.PERSISTENT else 0
        assert check["sent_bytes"] == [expected + extra] * 8, name


def test_the_result_is_whole_and_honest(eight: dict[str, object]) -> None:
    rows = eight["rows"]
    assert isinstance(rows, list)
    names = [row["name"] for row in rows]
    assert len(names) == len(set(names))
    for row in rows:
        assert {"name", "value", "unit", "must", "holds"} <= set(row)
        assert row["value"] > 0
        assert row["must"] is None and row["holds"] is None
    assert {"cp0-only", "rotated", "owner-direct"} <= {name.removeprefix("sends: ") for name in names}
    assert {"seed", "machine", "versions", "world", "script_sha256", "shape"} <= set(eight)
    sends = {row["name"]: row["busiest_bytes"] for row in rows if row["name"].startswith("sends: ")}
    assert sends["sends: cp0-only"] == 4 * sends["sends: rotated"] == 4 * sends["sends: owner-direct"]


@pytest.mark.parametrize("fault", ["exit-over-cp", "norm-before-sum", "wrong-half"])
def test_a_planted_fault_is_seen(tmp_path: Path, fault: str) -> None:
    done = run(
        tmp_path,
        "--world=4",
        "--device=cpu",
        "--chunk=32",
        "--hidden=16",
        "--check",
        "--dtype=float32",
        f"--fault={fault}",
    )
    assert done.returncode == 1
    assert "differs from one process" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--world=8", "--tp=3"], "8 ranks have no attention-TP of 3"),
        (["--world=8", "--chunk=12"], "no 8 equal parts"),
        (["--world=0"], "world"),
        (["--world=2", "--device=cuda"], "GPU"),
    ],
)
def test_a_world_that_cannot_be_is_refused_before_anything_starts(
    tmp_path: Path, options: list[str], said: str
) -> None:
    done = run(tmp_path, *options, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2
    assert said in done.stderr


def test_the_picture_of_the_two_gpus_is_drawn_from_their_result(tmp_path: Path) -> None:
    result = ROOT / "evidence" / "boundary" / "h200-x2-boundary.json"
    boundary_plot.draw(result, tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_bytes() == result.with_suffix(".svg").read_bytes()
