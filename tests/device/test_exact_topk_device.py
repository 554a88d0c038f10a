"""The real kernel on a real card against the oracle: every class of rows on every path, byte for byte.

Run by hand on a machine with an H200: ``pytest -m device tests/device``. EVIDENCE names the JSON file to write; runs of
other tests of this file that name the same one add to it, so that the tests can be shared out among processes.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab import provenance
from tests.device import sanitize
from tests.device.topk_data import DRAWN, KINDS, make, random
from tests.device.tree import install
from tests.engine.decode import topk_oracle as oracle

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

cuda: Any = torch.cuda  # its streams are not typed
POISON = -777
LAUNCHES = 25
KS = (1, 2, 16, 512, 1024, 2047, 2048)
# name: width, rows, path, split, sample ranks to force besides the kernel's own
SHAPES: dict[str, tuple[int, int, str, int, tuple[int, ...]]] = {
    "resident, few rows": (8189, 40, "resident", 0, (0,)),
    "resident, few wide rows": (16381, 30, "resident", 0, (0,)),
    "resident, many rows": (8189, 140, "resident", 0, (0,)),
    "resident, many wide rows": (16381, 140, "resident", 0, (0,)),
    "stream": (33000, 24, "stream", 0, (0, 1, 8192)),
    "stream, many rows": (20000, 140, "auto", 0, (0, 1)),
    "split by 2": (40000, 8, "split", 2, (0, 8192)),
    "split by 17": (131080, 8, "split", 17, (0, 1, 8192)),
    "split by 64": (66000, 8, "split", 64, (0,)),
    "auto": (131080, 6, "auto", 0, (0,)),
    "stream, a million": ((1 << 20) + 9, 2, "stream", 0, (0, 1)),
    "auto, a million": ((1 << 20) + 9, 2, "auto", 0, (0,)),
}
# fmt: off
LENGTHS = (-4, -1, 0, 1, 3, 511, 1023, 2047, 2048, 2049, 2051, 4095, 4096, 4097, 8181, 8189, 8191, 8192, 8193, 16373,
           16384, 16385, 30938, 32767, 32768, 32769, 65504, 65535, 65537, 81919, 81920, 131071, 131072, 131073,
           262145, 1 << 20, (1 << 20) + 5)
# fmt: on
# What several runs add up.
SUMS = (
    "rows",
    "row_launches",
    "wrong_rows",
    "unequal_launches",
    "launches_beside_noise",
    "graph_replays",
    "tests",
    "failed_tests",
)
counts: dict[str, Any] = {"rows": 0, "row_launches": 0, "wrong_rows": 0, "unequal_launches": 0, "cases": {}}


@pytest.fixture(scope="session")
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    began = time.monotonic()
    module = install(tmp_path_factory.mktemp("tree"))
    module.prepare("cuda:0")
    counts["build_s"] = round(time.monotonic() - began, 1)
    yield module
    if path := os.environ.get("EVIDENCE"):
        nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=False).stdout.split("\n")
        counts.update(provenance.of(__file__, None))
        # Each case draws from the seed that its test names.
        counts["seeds"] = sorted(DRAWN)
        counts["nvcc"] = next((line for line in nvcc if "release" in line), "")
        counts["processors"] = torch.cuda.get_device_properties(0).multi_processor_count
        counts["source_sha256"] = module.SOURCE_SHA256
        # What is written is of a run that may have failed elsewhere: the counts alone would not tell.
        counts["tests"], counts["failed_tests"] = request.session.testscollected, request.session.testsfailed
        write(Path(path))


def write(path: Path) -> None:
    """Write the counts, added to what other tests of the same bytes have left there."""
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        before = json.loads(file.read() or "{}")
        same = ("script_sha256", "source_sha256", "modules")
        if before and any(before[name] != counts[name] for name in same):
            raise ValueError(f"{path}: made by other bytes; remove it first")
        for name in SUMS:
            if name in before or name in counts:
                counts[name] = before.get(name, 0) + counts.get(name, 0)
        counts["cases"] = {**before.get("cases", {}), **counts["cases"]}
        counts["seeds"] = sorted({*before.get("seeds", []), *counts["seeds"]})
        file.truncate(0)
        file.write(json.dumps(counts, indent=1, sort_keys=True) + "\n")


def lengths_for(width: int, rows: int, lead: int) -> list[int]:
    """Rows lengths that fit ``width``: mostly the longest ones, the rest in turn."""
    fit = [n for n in LENGTHS if n + lead <= width]
    return [fit[-1 - (i % len(fit))] if i % 4 else width - lead - (i % 3) for i in range(rows)]


def launch(kernel: Any, scores: torch.Tensor, lengths: torch.Tensor, k: int, **options: Any) -> torch.Tensor:
    out = torch.full((scores.shape[0], k), POISON, dtype=torch.int32, device="cuda")
    result: torch.Tensor = kernel.select(scores, lengths, k, out=out, **options)
    return result


def check(
    kernel: Any,
    name: str,
    scores: np.ndarray[Any, Any],
    lengths: list[int],
    starts: list[int] | None,
    k: int,
    **options: Any,
) -> None:
    """Compare every row with the oracle, and every launch with the first one."""
    dtype = torch.bfloat16 if options.pop("bf16", False) else torch.float32
    host = torch.from_numpy(scores).to(dtype)
    device = host.cuda()
    given = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    if starts is not None:
        options["starts"] = torch.tensor(starts, dtype=torch.int32, device="cuda")
    first = launch(kernel, device, given, k, **options)
    unequal = sum(not torch.equal(launch(kernel, device, given, k, **options), first) for _ in range(LAUNCHES - 1))
    wanted = oracle.expected(host.float().numpy(), lengths, k, starts)
    wrong = int((first.cpu().numpy() != wanted).any(axis=1).sum())
    untouched = host.numel() == 0 or torch.equal(device.cpu().view(torch.uint8), host.view(torch.uint8))
    case = counts["cases"].setdefault(name, {"rows": 0, "wrong_rows": 0, "unequal_launches": 0})
    for record in (case, counts):
        record["rows"] += len(lengths)
        record["wrong_rows"] += wrong
        record["unequal_launches"] += unequal
    counts["row_launches"] += len(lengths) * LAUNCHES
    assert (wrong, unequal, untouched) == (0, 0, True), f"{name}: {wrong} wrong rows, {unequal} unequal launches, {k=}"


# Of the shapes of a million columns a third of the classes, for time.
CASES = [
    (kind, shape) for shape in SHAPES for at, kind in enumerate(KINDS) if SHAPES[shape][0] <= 1 << 20 or at % 3 == 0
]


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_every_class_of_rows_on_every_path_is_the_oracles_choice(kernel: Any, kind: str, shape: str) -> None:
    width, rows, path, split, ranks = SHAPES[shape]
    scores = make(kind, rows, width, 7)
    k = 2048 if KINDS.index(kind) % 2 else KS[(len(shape) + KINDS.index(kind)) % len(KS)]
    starts = [(row * 5 + 1) % 8 for row in range(rows)]
    lengths = lengths_for(width, rows, 8)
    for row in range(rows):  # what lies outside must not matter: the best and the worst values there are
        scores[row, : starts[row]] = np.inf
        scores[row, starts[row] + max(lengths[row], 0) :] = np.inf if row % 2 else np.nan
    for rank in ranks:
        check(kernel, shape, scores, lengths, starts, k, path=path, split=split, sample_rank=rank)
    if starts is not None and rows > 8:
        check(kernel, f"{shape}, no starts", scores, lengths, None, 2048, path=path, split=split)


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_scores(kernel: Any, kind: str) -> None:
    for width, rows, path in (
        (8180, 12, "resident"),
        (16370, 8, "resident"),
        (40001, 8, "stream"),
        (70003, 5, "split"),
    ):
        scores = make(kind, rows, width, 8)
        check(kernel, f"bf16 {path}", scores, lengths_for(width, rows, 8), [(r * 3) % 9 for r in range(rows)], 2048,
              path=path, bf16=True)  # fmt: skip


@pytest.mark.parametrize("rows", [1, 2, 6, 7, 15, 16, 17, 30, 31, 64, 65, 132, 133, 256, 384])
def test_any_number_of_rows(kernel: Any, rows: int) -> None:
    for width in (8192, 20000, 81920 if rows < 140 else 24000):
        check(kernel, "rows", make("zeros_0.9", rows, width, rows), [width - r % 5 for r in range(rows)], None, 2048)


def test_thousands_of_rows(kernel: Any) -> None:
    scores = make("randn", 8192, 8192, 3)
    check(kernel, "8192 rows", scores, [8192 - r % 7000 for r in range(8192)], None, 2048)
    check(kernel, "2048 rows", make("bf16_quantised", 2048, 9001, 3), [9001 - r % 2 for r in range(2048)], None, 2048)


@pytest.mark.parametrize("path", ["resident", "stream", "split"])
def test_a_start_or_length_outside_the_row_is_an_empty_or_a_cut_window(kernel: Any, path: str) -> None:
    scores = make("randn", 8, 5000, 1)
    starts = [-1, 5000, 5001, 2**31 - 1, 4999, 1000, -(2**31), 2000]
    lengths = [3000, 10, 10, 10, 10, 2**31 - 1, 5000, -(2**31)]
    check(kernel, "bounds", scores, lengths, starts, 2048, path=path)


@pytest.mark.parametrize("width", [0, 1, 3, 64, 2047, 2048, 2049])
def test_rows_narrower_than_k(kernel: Any, width: int) -> None:
    for path in ("auto", "resident", "stream", "split"):
        check(kernel, "narrow", make("nan", 5, width, 2), [width, width + 9, 1, 0, -1], None, 2048, path=path)


def test_no_rows_are_no_launch(kernel: Any) -> None:
    empty = torch.empty((0, 100), device="cuda")
    assert kernel.select(empty, torch.empty(0, dtype=torch.int32, device="cuda"), 16).shape == (0, 16)


@pytest.mark.parametrize("layout", ["odd stride", "view", "expanded"])
def test_layouts(kernel: Any, layout: str) -> None:
    base = torch.from_numpy(make("zeros_0.9", 9, 40003, 5)).cuda()
    scores = {"odd stride": base[:, 1:40000], "view": base[2:7, 8:], "expanded": base[3:4].expand(9, -1)}[layout]
    lengths = torch.full((scores.shape[0],), scores.shape[1], dtype=torch.int32, device="cuda")
    wanted = oracle.expected(scores.cpu().numpy(), lengths.tolist(), 2048)
    for path in ("auto", "stream", "split"):
        assert (launch(kernel, scores, lengths, 2048, path=path).cpu().numpy() == wanted).all(), path


@pytest.mark.parametrize(("rows", "width"), [(8193, 262144), (16400, 262144)])
def test_rows_beyond_two_and_four_billion_elements(kernel: Any, rows: int, width: int) -> None:
    scores = torch.zeros((rows, width), device="cuda", dtype=torch.bfloat16 if rows > 9000 else torch.float32)
    picked = [0, rows // 2, rows - 1]
    for row in picked:
        scores[row] = torch.from_numpy(make("randn", 1, width, row)[0]).cuda()
    lengths = torch.full((rows,), 2048, dtype=torch.int32, device="cuda")
    lengths[picked] = width
    out = launch(kernel, scores, lengths, 2048).cpu().numpy()
    for row in picked:
        wanted = oracle.by_partition(scores[row].float().cpu().numpy(), width, 2048)
        assert (out[row] == wanted).all(), row
    assert (out[1] == np.arange(2048)).all()


@pytest.mark.parametrize("path", ["resident", "stream", "split"])
def test_ragged_output_adds_each_rows_offset(kernel: Any, path: str) -> None:
    scores, lengths = make("zeros_0.9", 6, 9000, 4), [9000, 4000, 2048, 7, 0, -3]
    offsets = [5, 100000, 0, 3, 9, 1]
    out = launch(kernel, torch.from_numpy(scores).cuda(), torch.tensor(lengths, dtype=torch.int32, device="cuda"), 2048,
                 offsets=torch.tensor(offsets, dtype=torch.int32, device="cuda"), path=path)  # fmt: skip
    for row in range(6):
        chosen = oracle.by_sort(scores[row], lengths[row], 2048)
        wanted = oracle.padded(chosen, 2048, lambda columns, by=offsets[row]: columns + by)  # type: ignore[misc]
        assert (out[row].cpu().numpy() == wanted).all(), row


@pytest.mark.parametrize("path", ["resident", "stream", "split"])
@pytest.mark.parametrize("page", [1, 16, 64, 256])
def test_paged_output_is_the_slot_in_the_rows_own_table(kernel: Any, path: str, page: int) -> None:
    rng = random(page)
    rows, width = 9, 9000
    scores, lengths = make("zeros_0.9", rows, width, 4), [9000, 4000, 2048, 7, 0, -3, 8999, 5000, 6000]
    pages = -(-width // page)
    table = rng.integers(0, 1 << 20, (5, pages + 3), np.int32)
    segments = [0, 2, 2, 6, 8]  # row 8 is in no segment, segment 1 has no rows
    segment_table = [3, 0, 4, 9]  # table row 9 does not exist
    given = {"table": torch.from_numpy(table).cuda()[:, : pages + 1], "page_size": page, "path": path}
    cases: dict[str, tuple[dict[str, Any], list[int | None]]] = {
        "segments": ({"segments": segments}, [0, 0, 2, 2, 2, 2, 3, 3, None]),
        "segment table": (
            {"segments": segments, "segment_table": segment_table}, [3, 3, 4, 4, 4, 4, None, None, None],
        ),
    }  # fmt: skip
    for name, (extra, owner) in cases.items():
        options = {key: torch.tensor(value, dtype=torch.int32, device="cuda") for key, value in extra.items()}
        out = launch(kernel, torch.from_numpy(scores).cuda(), torch.tensor(lengths, dtype=torch.int32, device="cuda"),
                     2048, **given, **options).cpu().numpy()  # fmt: skip
        for row in range(rows):
            at = owner[row]
            place = oracle.paged(None if at is None else table[at, : pages + 1], page)
            assert (out[row] == oracle.padded(oracle.by_sort(scores[row], lengths[row], 2048), 2048, place)).all(), (
                name,
                row,
            )


def test_a_short_table_is_never_read_beyond_its_end(kernel: Any) -> None:
    scores = torch.from_numpy(make("randn", 2, 9000, 1)).cuda()
    lengths = torch.tensor([9000, 640], dtype=torch.int32, device="cuda")
    table = torch.arange(20, dtype=torch.int32, device="cuda").reshape(2, 10)
    with pytest.raises(kernel.TopkArgumentError, match="short"):
        kernel.select(scores, lengths, 2048, table=table, page_size=64)
    out = kernel.select(scores, lengths, 2048, table=table, page_size=64, table_may_be_short=True).cpu().numpy()
    for row in range(2):
        chosen = oracle.by_sort(scores[row].cpu().numpy(), int(lengths[row]), 2048)
        wanted = oracle.padded(chosen, 2048, oracle.paged(table[row].cpu().numpy(), 64))
        assert (out[row] == wanted).all()


@pytest.mark.parametrize("kind", ["randn", "zeros_0.99", "bf16_quantised", "all_equal"])
def test_two_hundred_launches_beside_other_work_give_the_same_bytes(kernel: Any, kind: str) -> None:
    noise, side = torch.randn(3000, 3000, device="cuda"), cuda.Stream()
    for rows, width in ((1, 131072), (6, 81920), (200, 30000), (64, 8192)):
        scores = torch.from_numpy(make(kind, rows, width, 6)).cuda()
        lengths = torch.full((rows,), width, dtype=torch.int32, device="cuda")
        wanted = oracle.expected(scores.cpu().numpy(), [width] * rows, 2048)
        first = launch(kernel, scores, lengths, 2048)
        assert (first.cpu().numpy() == wanted).all()
        for i in range(200):
            with torch.cuda.stream(side):
                if i % 3 == 0:
                    noise = torch.relu(noise @ noise).clamp(max=1)
            options = {"path": "split", "split": 1 + i % 40} if i % 2 and width > 16384 else {}
            assert torch.equal(launch(kernel, scores, lengths, 2048, **options), first), i
        counts["row_launches"] += 200 * rows
    counts["launches_beside_noise"] = counts.get("launches_beside_noise", 0) + 800


def test_graphs_follow_changed_lengths_and_two_run_at_once(kernel: Any) -> None:
    rng = random(0)
    graphs = []
    for rows, width in ((3, 131072), (64, 60000)):
        scores = torch.from_numpy(make("zeros_0.9", rows, width, 9)).cuda()
        lengths = torch.zeros(rows, dtype=torch.int32, device="cuda")
        stream, graph = cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            outs = [kernel.select(scores, lengths, 2048), kernel.select(scores, lengths, 1000)]
        graphs.append((scores, lengths, graph, outs, stream))
    replays = 0
    for _ in range(12):
        wanted = []
        for scores, lengths, _, outs, _ in graphs:
            new = rng.integers(-3, scores.shape[1] + 1, scores.shape[0])
            lengths.copy_(torch.from_numpy(new.astype(np.int32)))
            for out in outs:
                out.fill_(POISON)
            host = scores.cpu().numpy()
            wanted.append([oracle.expected(host, new.tolist(), k) for k in (2048, 1000)])
        torch.cuda.synchronize()
        for _ in range(20):
            for _, _, graph, _, stream in graphs:
                with torch.cuda.stream(stream):
                    graph.replay()
                replays += 1
        torch.cuda.synchronize()
        for (_, _, _, outs, _), pair in zip(graphs, wanted, strict=True):
            for out, right in zip(outs, pair, strict=True):
                assert (out.cpu().numpy() == right).all()
    counts["graph_replays"] = replays


def test_a_workspace_of_the_callers_needs_no_initial_value_and_is_checked(kernel: Any) -> None:
    scores = torch.from_numpy(make("randn", 2, 131072, 3)).cuda()
    lengths = torch.full((2,), 131072, dtype=torch.int32, device="cuda")
    needed = kernel.workspace_bytes(scores, 2048)
    assert needed > 0
    workspace = torch.full((needed,), 255, dtype=torch.uint8, device="cuda")
    first = kernel.select(scores, lengths, 2048, workspace=workspace)
    assert (first.cpu().numpy() == oracle.expected(scores.cpu().numpy(), [131072] * 2, 2048)).all()
    for bad in (workspace[:-1], workspace[1:], workspace.cpu(), torch.empty(needed, dtype=torch.int8, device="cuda")):
        with pytest.raises(kernel.TopkArgumentError, match="workspace"):
            kernel.select(scores, lengths, 2048, workspace=bad)


def test_an_unbuilt_kernel_is_not_built_during_a_capture(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scores, lengths = torch.randn(2, 9000, device="cuda"), torch.full((2,), 9000, dtype=torch.int32, device="cuda")
    monkeypatch.setattr(kernel, "_processors", {})
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        lengths.add_(1)  # an empty capture would warn
        with pytest.raises(kernel.TopkArgumentError, match="capture"):
            kernel.select(scores, lengths, 2048)
    torch.cuda.synchronize()


def test_the_sanitizer_finds_nothing(kernel: Any) -> None:
    found = sanitize.under_all()
    assert all(row["holds"] for row in found), found
