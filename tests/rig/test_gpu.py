"""What runs around the engines on a GPU machine: the reference selection, what is packed, what is compared."""

from __future__ import annotations

import json
import os
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab.rig import deployment, models
from lab.rig.client import Answer
from lab.rig.engine import LISTENS, READY
from lab.rig.errors import RigError
from lab.rig.gpu import engine, pack, reference
from lab.rig.gpu.engine import Running, Variant, compared, kernel_shares
from lab.rig.member import Spec
from lab.rig.tree import REPOSITORY


def by_hand(row: list[float], length: int, start: int, k: int) -> list[int]:
    """Columns relative to ``start``, one comparison at a time; nothing shared with the reference."""
    window = row[start : start + max(length, 0)]
    best = sorted(range(len(window)), key=lambda column: (-window[column], column))[:k]
    return sorted(best) + [-1] * (k - len(best))


@pytest.mark.parametrize("k", [1, 3, 8, 40])
def test_the_reference_takes_the_best_of_each_window_and_the_lowest_of_equal_ones(k: int) -> None:
    generator = np.random.default_rng(k)
    # Few different scores, so that most rows are decided by ties.
    scores = generator.integers(0, 4, (1100, 24)).astype(np.float32)
    lengths = generator.integers(-2, 30, 1100).astype(np.int32)
    starts = generator.integers(0, 20, 1100).astype(np.int32)
    found = reference.select(torch.from_numpy(scores), torch.from_numpy(lengths), k, starts=torch.from_numpy(starts))
    assert found.dtype == torch.int32 and found.shape == (1100, k)
    rows = zip(scores.tolist(), lengths.tolist(), starts.tolist(), strict=True)
    assert found.tolist() == [by_hand(row, length, start, k) for row, length, start in rows]


def test_the_reference_adds_offsets_to_what_it_chose_alone() -> None:
    scores = torch.tensor([[1.0, 5.0, 3.0], [1.0, 5.0, 3.0]])
    found = reference.select(scores, torch.tensor([3, 1]), 2, offsets=torch.tensor([10, 20]))
    assert found.tolist() == [[11, 12], [20, -1]]


def test_the_reference_maps_to_slots_of_the_segments_table_row() -> None:
    scores = torch.tensor([[9.0, 1.0, 8.0, 7.0]] * 4)
    table = torch.tensor([[5, 6], [50, 60]], dtype=torch.int32)
    found = reference.select(
        scores,
        torch.tensor([4, 4, 2, 4]),
        3,
        table=table,
        page_size=2,
        segments=torch.tensor([0, 1, 3], dtype=torch.int32),
        segment_table=torch.tensor([1, 0], dtype=torch.int32),
        table_may_be_short=True,
    )
    # Row 0 uses table row 1, rows 1 and 2 use table row 0, row 3 is in no segment.
    assert found.tolist() == [[100, 120, 121], [10, 12, 13], [10, 11, -1], [-1, -1, -1]]


def test_a_column_beyond_a_short_table_becomes_nothing() -> None:
    found = reference.select(torch.ones(1, 6), torch.tensor([6]), 6, table=torch.tensor([[4, 7]]), page_size=2)
    assert found.tolist() == [[8, 9, 14, 15, -1, -1]]


def test_an_unknown_mode_stops_the_start() -> None:
    with pytest.raises(ValueError, match="reference or watch"):
        reference.register("both")


def test_only_kernels_that_choose_the_top_k_count_as_such() -> None:
    events = [("resident_rows<1024>", 30.0), ("moe_topk_softmax", 5.0), ("gemm", 60.0), ("topk_v2", 10.0)]
    trace = {"traceEvents": [{"cat": "kernel", "name": name, "dur": dur} for name, dur in events]}
    trace["traceEvents"].append({"cat": "cpu_op", "name": "topk", "dur": 1000.0})
    found = kernel_shares(trace, 10)
    assert (found["kernels_us"], found["topk_us"]) == (10.5, 4.0)
    assert found["topk_kernels"] == ["resident_rows<1024>", "topk_v2"]


def ran(name: str, *texts: tuple[int, ...], tree: str = "patched", like: str = "") -> Running:
    one = deployment.Deployment(Path(), [])
    return Running(Variant(name, tree, like=like), one, 1, {}, [Answer(ids=text) for text in texts])


def test_a_variant_must_bring_the_texts_of_the_one_that_it_is_like() -> None:
    left, right = ran("a", (1,), (2,)), ran("b", (1,), (3,), like="a")
    (entry,) = compared([left, right])
    assert (entry["demanded"], entry["same_texts"], entry["first_difference"]) == (2, 1, {"1": 0})


def test_of_the_stock_top_k_only_short_prompts_are_demanded() -> None:
    texts = ((1,), (2,), (3,), (4,), (5,))
    (entry,) = compared([ran("a", *texts, tree="stock"), ran("b", *texts, like="a")])
    assert (entry["demanded"], entry["same_texts"]) == (engine.SHORT, 5)


def test_a_variant_that_did_not_answer_is_compared_with_nobody_and_is_not_green(tmp_path: Path) -> None:
    work = [ran("a", (1,)), ran("b", like="a")]
    report: dict[str, object] = {}
    engine.write(report, work, tmp_path / "out.json")
    assert report["compared"] == [] and report["green"] is False


def test_an_engine_that_fails_keeps_its_error_and_is_asked_nothing_more() -> None:
    one = ran("a")
    asked: list[str] = []

    def fail(running: Running) -> None:
        asked.append(running.variant.name)
        raise OSError("gone")

    engine.side_by_side([one], fail)
    engine.side_by_side([one], fail)
    assert asked == ["a"] and "gone" in one.found["failed"]


def test_only_files_that_the_series_changes_or_adds_are_packed(tmp_path: Path) -> None:
    for root, texts in (("stock", {"a.py": "1", "b.py": "1"}), ("patched", {"a.py": "1", "b.py": "2", "c.py": "3"})):
        for name, text in texts.items():
            path = tmp_path / root / "sglang" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    cached = tmp_path / "patched/sglang/__pycache__/b.pyc"
    cached.parent.mkdir()
    cached.touch()
    names = pack.changed(tmp_path / "stock", tmp_path / "patched")
    assert names == ["sglang/b.py", "sglang/c.py"]
    pack.archive(tmp_path / "patched", names, tmp_path / "out.tar.xz")
    with tarfile.open(tmp_path / "out.tar.xz") as source:
        assert source.getnames() == names
        assert {(member.uid, member.mtime, member.uname) for member in source} == {(0, 0, "")}


def test_an_archive_of_another_list_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def install(library: Path) -> None:
        made.append(library)
        library.mkdir()
        (library / "file").write_text("x")

    monkeypatch.setattr(pack, "install", install)
    monkeypatch.setattr(pack, "NEEDED", 1)
    pack.pack_engine(tmp_path)
    pack.pack_engine(tmp_path)
    assert len(made) == 1 and not made[0].exists()
    monkeypatch.setattr(pack, "LEFT_OUT", ("bin", "more"))
    pack.pack_engine(tmp_path)
    assert len(made) == 2


def test_a_missing_archive_is_named(tmp_path: Path) -> None:
    with pytest.raises(RigError, match="engine-0"):
        engine.unpack(tmp_path, tmp_path / "home")


def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: str = "") -> tuple[int, dict[str, Any]]:
    """Run the whole of ``gpu-engine`` with small servers in the engines' place; its exit code and its report."""

    def spec(variant: Variant, trees: object, model: object, port: int, home: Path) -> Spec:
        kernels = home / ".cache/tvm-ffi"
        kernels.mkdir(parents=True, exist_ok=True)
        (kernels / "one.so").touch()
        name = variant.name + (" wrong" if variant.name == wrong else "")
        argv = (sys.executable, str(Path(__file__).with_name("fake_engine.py")), str(port), name)
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        return Spec("E", argv, env, (READY, LISTENS), "alone", port)

    monkeypatch.setenv("PATCHBUNDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(engine, "spec", spec)
    monkeypatch.setattr(engine, "unpack", lambda pack, home: {})
    monkeypatch.setattr(models, "ensure", lambda name, make: tmp_path)
    monkeypatch.setattr(sys, "argv", ["engine", str(tmp_path), "--out", str(tmp_path / "out.json"), "--new", "3"])
    code = engine.main()
    report: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    return code, report


def test_a_whole_run_starts_every_variant_asks_it_and_writes_one_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, report = played(monkeypatch, tmp_path)
    assert (code, report["green"]) == (0, True), report
    assert set(report["runs"]) == {engine.FIRST.name, *(variant.name for variant in engine.VARIANTS)}
    assert report["compiled"] == [".cache/tvm-ffi/one.so"]
    assert report["runs"]["stock watched"]["selections"] == {"rows": 9, "wrong": 2, "unlike_again": 1}
    exact = report["runs"]["exact plain"]
    assert exact["repeated"]["60000"] == {"times": 20, "different_texts": 1}
    assert set(exact["batch_orders"]["different_texts"].values()) == {1}
    assert exact["step_kernels"]["topk_us"] == 1.0 and set(exact["step_ms"]) == {"5000", "60000"}


def test_one_variant_with_another_text_makes_the_run_red(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, report = played(monkeypatch, tmp_path, wrong="reference plain")
    assert (code, report["green"]) == (1, False)
    assert [one["right"] for one in report["compared"] if one["same_texts"] < one["demanded"]] == ["reference plain"]


def test_every_kernel_of_the_exact_top_k_is_known_by_name() -> None:
    source = (REPOSITORY / "sources/kernels/exact_topk.cu").read_text(encoding="utf-8")
    names = re.findall(r"__global__\s+void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s+)?(\w+)\(", source)
    assert len(names) == source.count("__global__") and names
    assert [name for name in names if not engine.CHOOSE.search(name)] == []
