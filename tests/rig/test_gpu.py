"""What runs around the engines on a GPU machine: the reference selection, what is packed, what is compared."""

from __future__ import annotations

import json
import os
import re
import sys
import tarfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from lab.rig import deployment, models
from lab.rig.client import Answer
from lab.rig.engine import LISTENS, READY
from lab.rig.errors import RigError
from lab.rig.gpu import engine, pack, reference, seeds
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


def events(*kernels: tuple[str, float], steps: int) -> list[dict[str, Any]]:
    """A trace of so many steps, each with these kernels, one after another."""
    found = []
    for step in range(steps):
        for place, (name, dur) in enumerate(kernels):
            found.append({"cat": "kernel", "name": name, "dur": dur, "ts": 1000.0 * step + place})
    return found


def test_only_kernels_that_choose_the_top_k_count_as_such() -> None:
    kernels = (("resident_rows<1024>", 30.0), ("moe_topk_softmax", 5.0), ("gemm", 60.0), ("topk_v2", 10.0))
    trace = {"traceEvents": [*events(*kernels, steps=11), {"cat": "cpu_op", "name": "topk", "dur": 1000.0, "ts": 1.0}]}
    found = kernel_shares(trace, 10)
    assert (found["kernels_us"], found["topk_us"], found["profiled_steps"]) == (105.0, 40.0, 10)
    assert found["topk_kernels"] == ["resident_rows<1024>", "topk_v2"]


def test_a_trace_is_cut_to_whole_steps() -> None:
    kernels = events(("layer", 4.0), ("head", 1.0), ("layer", 4.0), steps=12)
    # It begins behind the first kernel of a step and ends before the last one of another.
    found, whole = engine.whole_steps(kernels[1:-1], 10)
    assert (whole, sum(one["dur"] for one in found)) == (11, 11 * 9.0)


def test_a_trace_in_which_nothing_runs_once_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="once a step"):
        engine.whole_steps(events(("layer", 1.0), steps=30), 10)


def test_only_intervals_of_whole_batches_make_a_time_and_the_first_of_them_does_not() -> None:
    line = (
        "Decode batch, #running-req: {}, #token: 9, token usage: 0.01, {}, gen throughput (token/s): {}, #queue-req: 0"
    )
    log = "\n".join(
        line.format(*values)
        for values in (
            (64, "cuda graph: True", "10.00"),
            (64, "cuda graph: True", "32000.00"),
            (63, "cuda graph: True", "1.00"),
            (64, "cuda graph: False", "16000.00"),
        )
    )
    found = engine.decode_lines(log, 64)
    assert [(one.step_ms, one.graph) for one in found] == [(2.0, True), (4.0, False)]
    assert engine.decode_lines(log, 16) == []


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


def test_where_the_top_k_is_no_noise_every_bit_is_demanded(tmp_path: Path) -> None:
    left, right = ran("seed stock", (1,), (2,), tree="stock"), ran("off", (1,), (2,), like="seed stock")
    right.variant = Variant("off", "patched", like="seed stock", bitwise=True)
    for logprob, holds in ((-0.5, True), (-0.25, False)):
        left.answers = [Answer(ids=(one,), logprobs=(-0.5,)) for one in (1, 2)]
        right.answers = [Answer(ids=(one,), logprobs=(logprob,)) for one in (1, 2)]
        report: dict[str, Any] = {}
        engine.write(report, [left, right], tmp_path / "out.json")
        assert report["compared"][0]["demanded"] == 2
        assert report["verdicts"]["off as seed stock"] is holds


def test_an_engine_that_was_not_asked_leaves_its_verdicts_open(tmp_path: Path) -> None:
    report: dict[str, Any] = {}
    engine.write(report, [ran("exact plain")], tmp_path / "out.json")
    assert set(report["verdicts"].values()) == {None} and report["green"] is False


def test_a_part_that_fails_takes_no_other_part_with_it() -> None:
    one = ran("a")
    asked: list[str] = []

    def fail(running: Running) -> None:
        asked.append(running.variant.name)
        raise OSError("gone")

    engine.side_by_side([one], fail, "orders")
    engine.side_by_side([one], fail, "steps")
    assert asked == ["a", "a"] and set(one.found["parts_failed"]) == {"orders", "steps"}
    assert "gone" in one.found["parts_failed"]["steps"] and "failed" not in one.found


def test_a_part_for_which_there_is_no_time_is_named(tmp_path: Path) -> None:
    run = engine.Run(tmp_path, tmp_path / "out.json", 3, 0.0, None)
    run.work = [ran("a", (1,))]
    run.part("orders", run.work, lambda running: pytest.fail("begun"))
    assert json.loads((tmp_path / "out.json").read_text())["runs"]["a"]["parts_failed"]["orders"] == "the 0 s were over"


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
    # Small servers answer any length; only the time of the bodies grows with it.
    monkeypatch.setattr(engine, "CONTEXTS", (8, 80, 128))
    monkeypatch.setattr(engine, "LENGTHS", (40, 50, 60, 70, 80))
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
    assert set(report["runs"]) == {
        variant.name for variant in (engine.FIRST, *engine.VARIANTS, *engine.WIDES, *engine.SEEDS)
    }
    assert report["compiled"] == [".cache/tvm-ffi/one.so"]
    assert report["runs"]["stock watched"]["selections"] == {"rows": 9, "wrong": 2, "unlike_again": 1}
    exact = report["runs"]["exact plain"]
    assert exact["repeated"]["60000"] == {"times": 20, "different_texts": 1}
    assert [exact["batch_orders"][name]["times"] for name in ("cached", "cold")] == [len(engine.ORDERS), engine.COLD]
    assert set(exact["batch_orders"]["cold"]["different_texts"].values()) == {1}
    assert set(exact["step_ms"]) == {"5000", "60000"}
    assert [entry["requests"] for entry in report["orders"]] == 2 * [4 * len(engine.ORDERS), 4 * engine.COLD]
    for name in ("stock wide", "exact wide"):
        points = report["runs"][name]["wide"]
        assert [(point["context"], point["batch"]) for point in points] == [
            (context, batch) for context in engine.CONTEXTS for batch in engine.BATCHES
        ]
        assert {(point["topk_us"], point["kernels_us"], point["graphs"]) for point in points} == {(10.0, 100.0, True)}
        assert [point["step_ms"] for point in points[:3]] == [2.0, 32.0, 128.0]
        assert points[0]["topk_share_of_step"] == 0.005 and points[0]["topk_share_of_kernels"] == 0.1
    assert report["runs"]["seed stock poisoned"]["seeds"] == {"loops": 5, "poisoned": 5}
    assert set(report["verdicts"].values()) == {True}
    assert report["script_sha256"] and {"lab/rig/gpu/reference.py", "lab/rig/gpu/seeds.py"} <= report["modules"].keys()


def test_one_variant_with_another_text_makes_the_run_red(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, report = played(monkeypatch, tmp_path, wrong="reference plain")
    assert (code, report["green"]) == (1, False)
    assert [one["right"] for one in report["compared"] if one["same_texts"] < one["demanded"]] == ["reference plain"]
    wrong = {words for words, holds in report["verdicts"].items() if not holds}
    assert wrong == {"reference plain as exact plain", "exact plain: every order as the reference"}


def test_plain_and_speculative_patched_is_compared_with_stock_to_the_last_bit() -> None:
    """With every gate unset, and with a selection on both sides that does not depend on the order of threads."""
    variants = {one.name: one for one in (engine.FIRST, *engine.VARIANTS, *engine.SEEDS)}
    pairs = [
        (variants[one.like], one) for one in variants.values() if one.bitwise and one.tree != variants[one.like].tree
    ]
    assert sorted(any("speculative" in flag for flag in one.flags) for _, one in pairs) == [False, True]
    for left, right in pairs:
        assert (left.tree, right.tree) == ("stock", "patched")
        assert (left.flags, left.env, left.model) == (right.flags, right.env, right.model)
        assert "--dsa-topk-backend=torch" in right.flags and not any("RESEARCH" in name for name in right.env)
        assert not engine.noisy(left, right)


def test_a_bit_between_plain_stock_and_plain_patched_makes_the_run_red(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, report = played(monkeypatch, tmp_path, wrong="patched plain by torch")
    assert (code, report["green"]) == (1, False)
    assert {words for words, holds in report["verdicts"].items() if not holds} == {
        "patched plain by torch as stock plain by torch"
    }


def test_every_kernel_of_the_exact_top_k_is_known_by_name() -> None:
    source = (REPOSITORY / "sources/kernels/exact_topk.cu").read_text(encoding="utf-8")
    names = re.findall(r"__global__\s+void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s+)?(\w+)\(", source)
    assert len(names) == source.count("__global__") and names
    assert [name for name in names if not engine.CHOOSE.search(name)] == []


def test_of_the_seed_patchs_conditions_one_alone_is_left_out() -> None:
    module = ModuleType("seed")

    def need(holds: bool, condition: str) -> None:
        if not holds:
            raise ValueError(condition)

    vars(module)["_need"] = need
    seeds.admit_alone(module)
    module._need(False, seeds.NOT_ASKED)
    for other in ("--disaggregation-mode decode, found prefill", "speculative decoding"):
        with pytest.raises(ValueError, match=re.escape(other)):
            module._need(False, other)


def test_that_condition_is_worded_as_the_patch_words_it() -> None:
    source = (REPOSITORY / "sources/decode/seed.py").read_text(encoding="utf-8")
    before, mode = seeds.NOT_ASKED.rsplit(" ", 1)
    assert f'f"{before} {{args.disaggregation_mode}}"' in source and mode == "null"


def test_poison_leaves_one_entry_of_a_seed_and_counts_it(capsys: pytest.CaptureFixture[str]) -> None:
    drafted = []

    class Worker:
        def draft(self, batch: Any) -> str:
            drafted.append(batch.spec_info.dsa_topk_indices)
            return "drafted"

    class Scheduler:
        def flush_cache(self) -> bool:
            return True

    poison = seeds.Poison()
    poison.install(cast(ModuleType, SimpleNamespace(EagleDraftWorker=Worker)))
    poison.tell(cast(ModuleType, SimpleNamespace(Scheduler=Scheduler)))
    seed = torch.tensor([[4, 5, 6], [7, 8, 9]])
    for indices in (seed, None):
        batch = SimpleNamespace(spec_info=SimpleNamespace(dsa_topk_indices=indices))
        assert Worker().draft(batch) == "drafted"
    assert drafted[0].tolist() == [[4, -1, -1], [7, -1, -1]] and drafted[1] is None
    assert seed.tolist() == [[4, 5, 6], [7, 8, 9]]
    assert Scheduler().flush_cache() is True
    assert "rig: seeds loops=2 poisoned=2" in capsys.readouterr().err


def test_an_unknown_word_for_the_seeds_stops_the_start() -> None:
    with pytest.raises(ValueError, match="alone, poison"):
        seeds.register("alone,both")


def variable(variant: Variant) -> dict[str, str]:
    """The variables of the engine that runs ``variant``."""
    trees = {"stock": Path("/stock"), "patched": Path("/patched")}
    return dict(engine.spec(variant, trees, Path("/model"), 1, Path("/home")).env)


def test_an_engine_loads_the_hooks_that_its_variables_are_for_and_no_others() -> None:
    by_name = {one.name: variable(one)["PATCHBUNDLE_RIG_HOOKS"] for one in (*engine.VARIANTS, *engine.SEEDS)}
    assert by_name["stock plain"] == by_name["seed gate off"] == by_name["seed stock"] == ""
    assert by_name["reference plain"] == "lab.rig.gpu.reference"
    assert by_name["seed gate on"] == by_name["seed stock poisoned"] == "lab.rig.gpu.seeds"


def test_the_wide_engines_have_room_for_their_largest_batch() -> None:
    for variant in engine.WIDES:
        argv = engine.spec(variant, {"stock": Path("/s"), "patched": Path("/p")}, Path("/m"), 1, Path("/h")).argv
        last = dict(flag.split("=", 1) for flag in argv if "=" in flag)
        assert int(last["--context-length"]) > max(engine.CONTEXTS) + 1 + engine.DECODED
        assert int(last["--max-running-requests"]) >= max(engine.BATCHES)
        pages = 2 * max(engine.BATCHES) * 64
        assert int(last["--max-total-tokens"]) > max(engine.CONTEXTS) + max(engine.BATCHES) * engine.DECODED + pages
        assert models.get(variant.model).config["max_position_embeddings"] >= int(last["--context-length"])
        # An interval that began before, those that make the time, and those during which the profiler starts and works.
        assert engine.DECODED > engine.INTERVAL * (1 + engine.TIMES) + 2 * engine.PROFILED
