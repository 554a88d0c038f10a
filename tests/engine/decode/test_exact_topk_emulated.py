"""The kernel's own source, run on a CPU: every path on every class of rows against the oracle, and broken on purpose.

g++ compiles the source with a header that stands for CUDA (tests/kernels/emulated): a thread of a block is a fiber,
and threads take turns in a drawn order. What only a card can show (races, timing) is for tests/device.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.device.topk_data import KINDS, make
from tests.engine.decode import topk_oracle as oracle

REPOSITORY = Path(__file__).parents[3]
SOURCE = REPOSITORY / "sources" / "kernels" / "exact_topk.cu"
HEADERS = REPOSITORY / "tests" / "kernels" / "emulated"
PATHS = {"auto": 0, "resident": 1, "stream": 2, "split": 3}
POINTERS = ["scores", "lengths", "starts", "offsets", "table", "segments", "segment_table", "out", "workspace"]
LONGS = ["rows", "width", "stride", "table_rows", "table_width", "table_stride", "workspace_bytes"]
INTS = ["segment_count", "k", "page_shift", "mode", "bf16", "path", "split", "sample_rank", "processors"]
# name: width, rows, path, split, sample ranks besides the kernel's own, bfloat16, processors
SHAPES: dict[str, tuple[int, int, str, int, tuple[int, ...], bool, int]] = {
    "resident, few rows": (8189, 2, "resident", 0, (), False, 132),
    "resident, few wide rows": (10001, 2, "resident", 0, (), False, 132),
    "resident, many rows": (8189, 2, "resident", 0, (), False, 1),
    "resident, many wide rows": (9001, 2, "resident", 0, (), False, 1),
    "resident, bfloat16": (8180, 2, "resident", 0, (), True, 132),
    "one block, held": (9001, 2, "stream", 0, (1, 8192), False, 132),
    "one block, ring": (20001, 2, "stream", 0, (1,), False, 1),
    "one block, ring, bfloat16": (20001, 2, "stream", 0, (), True, 1),
    "split, held": (20001, 2, "split", 3, (8192,), False, 132),
    "split, ring": (33801, 2, "split", 2, (), False, 132),
    "split, bfloat16": (20001, 2, "split", 3, (), True, 132),
    "auto": (40001, 2, "auto", 0, (), False, 132),
}


class Arguments(ctypes.Structure):
    """``struct Arguments`` of the source; the real binding's layout is compared with the source elsewhere."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_longlong) for name in LONGS),
        *((name, ctypes.c_int) for name in INTS),
    ]


def compiled(folder: Path, source: Path = SOURCE) -> Path:
    """The library of ``source``; ``folder`` keeps it."""
    made = folder / "kernel.so"
    # Not one generator for all libraries of the process: the order of threads would hang on the tests before.
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-fno-gnu-unique", "-w", "-x", "c++", f"-I{HEADERS}"]
    command += ['-DEXACT_TOPK_IDENTITY="emulated"', "-o", str(made), str(source)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return made


def opened(library: Path) -> Any:
    loaded = ctypes.CDLL(str(library))
    loaded.exact_topk_workspace.restype = ctypes.c_longlong
    return loaded


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(scope="module")
def kernel(library: Path) -> Any:
    return opened(library)


def select(
    kernel: Any,
    scores: NDArray[np.float32],
    lengths: list[int],
    k: int,
    starts: list[int],
    path: str = "auto",
    split: int = 0,
    rank: int = 0,
    bf16: bool = False,
    processors: int = 132,
) -> NDArray[np.int32]:
    rows, width = scores.shape
    given: Any = (scores.view(np.uint32) >> 16).astype(np.uint16) if bf16 else scores
    memory = np.zeros(given.nbytes + 64, np.uint8)
    at = -memory.ctypes.data % 16  # the alignment that torch gives
    memory[at : at + given.nbytes] = given.view(np.uint8).ravel()
    before = memory.copy()
    held = [np.array(values, np.int32) for values in (lengths, starts)]
    out = np.full((rows, k), -777, np.int32)
    arguments = Arguments(
        scores=memory.ctypes.data + at, lengths=held[0].ctypes.data, starts=held[1].ctypes.data,
        out=out.ctypes.data, rows=rows, width=width, stride=width, k=k, bf16=int(bf16), path=PATHS[path],
        split=split, sample_rank=rank, processors=processors,
    )  # fmt: skip
    needed = kernel.exact_topk_workspace(ctypes.byref(arguments))
    workspace = np.full(needed + 16, 0xEE, np.uint8)
    arguments.workspace = workspace.ctypes.data + -workspace.ctypes.data % 16
    arguments.workspace_bytes = needed
    assert kernel.exact_topk_launch(ctypes.byref(arguments), None) == 0
    assert (memory == before).all()
    return out


def case(kind: str, shape: str) -> tuple[NDArray[np.float32], list[int], int, list[int]]:
    """Scores with bait outside each row's window, the lengths, k, the starts."""
    width, rows, _, _, _, bf16, _ = SHAPES[shape]
    scores = make(kind, rows, width, 7)
    starts = [(row * 5 + 1) % 8 for row in range(rows)]
    lengths = [width - 9 if row else 4097 + len(kind) for row in range(rows)]
    for row in range(rows):
        scores[row, : starts[row]] = np.inf
        scores[row, starts[row] + lengths[row] :] = np.inf if row % 2 else np.nan
    if bf16:
        scores = (scores.view(np.uint32) & 0xFFFF0000).view(np.float32)
    at = KINDS.index(kind)
    return scores, lengths, 2048 if at % 2 else (1, 2, 16, 512, 1024, 2047, 2048)[(len(shape) + at) % 7], starts


def wrong(kernel: Any, kind: str, shape: str) -> list[int]:
    """Forced sample ranks (0: the kernel's own) at which some row is not the oracle's."""
    scores, lengths, k, starts = case(kind, shape)
    _, _, path, split, ranks, bf16, processors = SHAPES[shape]
    wanted = oracle.expected(scores, lengths, k, starts)
    return [
        rank
        for rank in (0, *ranks)
        if (select(kernel, scores, lengths, k, starts, path, split, rank, bf16, processors) != wanted).any()
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_path_gives_the_oracles_rows(kernel: Any, kind: str) -> None:
    assert {shape: ranks for shape in SHAPES if (ranks := wrong(kernel, kind, shape))} == {}


def test_lengths_and_starts_outside_the_row_give_empty_or_cut_windows(kernel: Any) -> None:
    scores = make("randn", 8, 5000, 1)
    starts = [-1, 5000, 5001, 2**31 - 1, 4999, 1000, -(2**31), 2000]
    lengths = [3000, 10, 10, 10, 10, 2**31 - 1, 5000, -(2**31)]
    wanted = oracle.expected(scores, lengths, 2048, starts)
    for path in ("resident", "stream", "split"):
        assert (select(kernel, scores, lengths, 2048, starts, path) == wanted).all(), path


def test_the_threads_order_changes_nothing(library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for shape in ("resident, few rows", "one block, held", "split, held"):
        scores, lengths, k, starts = case("zeros_0.99", shape)
        found = []
        for seed in (1, 2, 3):
            monkeypatch.setenv("EMULATED_SEED", str(seed))  # a library reads it once
            copy = shutil.copy(library, tmp_path / f"{len(list(tmp_path.iterdir()))}.so")
            found.append(select(opened(Path(copy)), scores, lengths, k, starts, SHAPES[shape][2], SHAPES[shape][3]))
        assert (found[0] == found[1]).all() and (found[0] == found[2]).all()


def wrong_on_a_late_plateau(kernel: Any) -> bool:
    """A row in 64 parts, its k-th score among equal ones that only parts from the 38th on have."""
    rng = np.random.default_rng(3)
    scores = -rng.random((1, 66000), np.float32) - 1
    scores[0, 40000:] = 0
    scores[0, rng.choice(66000, 300, replace=False)] = 1 + rng.random(300, np.float32)
    wanted = oracle.expected(scores, [66000], 2048, [0])
    return bool((select(kernel, scores, [66000], 2048, [0], "split", 64) != wanted).any())


def test_a_plateau_in_the_later_parts_gives_the_oracles_row(kernel: Any) -> None:
    assert not wrong_on_a_late_plateau(kernel)


LATE_PLATEAU = "late plateau"
# What must be noticed: text of the source, what to put there, the class and shape that notice it
BROKEN: dict[str, tuple[str, str, str, str]] = {
    "the tie rule flipped": (
        "column_of(first, i) < cut.limit",
        "column_of(first, i) >= cut.limit",
        "all_equal",
        "resident, few rows",
    ),
    "the tie rule flipped among few": ("<< 32 | ~column;", "<< 32 | column;", "last_ten_bits", "resident, few rows"),
    "candidates capped": ("a.k) || kept > S::kRoom)", "a.k))", "zeros_0.5", "one block, held"),
    "length read as unsigned": (
        "long long length = a.lengths[number];",
        "long long length = static_cast<unsigned>(a.lengths[number]);",
        "",
        "",
    ),
    "the tail forgotten": (
        "if (threadIdx.x == 32 && inner.ragged_last)",
        "if (false && inner.ragged_last)",
        "ramp_up_by_ulps",
        "one block, held",
    ),
    "plateau: later parts read from the first list": (
        "late[1] = __ballot_sync(kFull, two);",
        "late[1] = 0;",
        LATE_PLATEAU,
        "",
    ),
    "in order: equal ones counted from the warp's own first": (
        "over = before & 0xFFFFu, same = before >> 16;",
        "over = before & 0xFFFFu, same = 0;",
        LATE_PLATEAU,
        "",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_noticed(name: str, tmp_path: Path) -> None:
    old, new, kind, shape = BROKEN[name]
    text = SOURCE.read_text()
    assert text.count(old) == 1
    source = tmp_path / "broken.cu"
    source.write_text(text.replace(old, new))
    broken = opened(compiled(tmp_path, source))
    if kind == LATE_PLATEAU:
        assert wrong_on_a_late_plateau(broken)
        return
    if kind:
        assert wrong(broken, kind, shape)
        return
    scores = make("randn", 1, 3000, 1)
    assert (select(broken, scores, [-4], 16, [0]) != -1).any()


def test_what_the_kernel_cannot_serve_is_refused_before_a_launch(kernel: Any) -> None:
    def launch(**given: int) -> int:
        arguments = Arguments(**{"k": 16, "rows": 1, "width": 100, "processors": 132, **given})
        return int(kernel.exact_topk_launch(ctypes.byref(arguments), None))

    assert launch(k=0) == launch(k=2049) == launch(rows=-1) == launch(width=-1) == launch(path=4) == -1
    assert launch(width=20000, path=1) == -3
    assert launch(width=200000, path=3, workspace_bytes=10) == -2
    assert launch(rows=0) == 0
