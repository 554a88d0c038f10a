"""The patch exact-topk on a CPU: the oracle, the funnel's routes, the checks before a launch, the build's refusals.

The kernel itself is judged on a card, in tests/device. Here the funnel is the engine's own file, of the unpatched and
of the patched tree, with fakes where it launches kernels.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.device import mutate, sanitize
from tests.device.test_exact_topk_device import SHAPES
from tests.device.topk_data import KINDS, make
from tests.engine.decode import topk_oracle as oracle
from tests.engine.decode.topk_stock import Kernels
from tests.engine.load import load, modules, stub

Tree = Callable[[str], Path]
GATE = "SGLANG_RESEARCH_EXACT_TOPK"
RESEARCH = "sglang.srt.research"
FUNNEL = "sglang/srt/layers/attention/dsa/dsa_topk_backend.py"

SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-45, 65504.0, 3.4e38]


# The oracle


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from(SPECIAL), st.floats(width=32)), max_size=40),
    st.integers(1, 12),
    st.integers(-2, 45),
    st.integers(-1, 42),
)
def test_the_oracles_formulations_agree(values: list[float], k: int, length: int, start: int) -> None:
    row = np.array(values, np.float32)
    chosen = oracle.by_sort(row, length, k, start)
    assert (chosen == oracle.by_partition(row, length, k, start)).all()
    assert chosen.tolist() == by_hand(row, length, k, start)


def by_hand(row: NDArray[np.float32], length: int, k: int, start: int) -> list[int]:
    """The window by hand too: both array formulations cut with the same function."""
    inside = [column for column in range(row.size) if 0 <= start <= column < start + length]
    return oracle.by_hand([float(row[column]) for column in inside], k)


def test_the_oracles_two_array_formulations_agree_on_ten_thousand_rows() -> None:
    rng = np.random.default_rng(5)
    for at in range(10_000):
        row = rng.choice(np.array(SPECIAL, np.float32), rng.integers(1, 50))
        k = int(rng.integers(1, 20))
        # Of every fourth row a window that may begin or end outside.
        start = int(rng.integers(-2, row.size + 2)) if at % 4 == 0 else 0
        length = int(rng.integers(-start - 3, row.size + 3)) if at % 4 == 0 else row.size
        chosen = oracle.by_sort(row, length, k, start)
        assert (chosen == oracle.by_partition(row, length, k, start)).all()
        if at % 4 == 0:
            assert chosen.tolist() == by_hand(row, length, k, start)


@pytest.mark.parametrize(
    ("row", "k", "chosen"),
    [
        ([0.0, -0.0, 0.0, -0.0], 2, [0, 1]),
        ([-0.0, 0.0], 1, [0]),
        ([float("nan"), float("-inf"), float("-inf")], 2, [1, 2]),
        ([float("nan"), float("nan"), -1.0], 2, [0, 2]),
        ([float("inf"), 1.0, float("inf")], 2, [0, 2]),
        ([1.0, 5.0, 5.0, 9.0, 5.0], 3, [1, 2, 3]),
        ([-1e-45, 0.0, 1e-45], 2, [1, 2]),
    ],
)
def test_the_contract_in_small(row: list[float], k: int, chosen: list[int]) -> None:
    assert oracle.by_sort(np.array(row, np.float32), len(row), k).tolist() == chosen


# The engine's funnel


def research(root: Path, kernels: Kernels | None = None) -> dict[str, ModuleType]:
    """Our modules of the patched tree, the gate as the environment has it, the kernel's call that of ``kernels``."""
    gates = load(root, "sglang/srt/research/gates.py")
    known = {f"{RESEARCH}.gates": gates, RESEARCH: stub(RESEARCH, gates=gates, __path__=[])}
    wiring = load(root, "sglang/srt/research/exact_topk.py", known)
    vars(known[RESEARCH])["exact_topk"] = wiring
    known[f"{RESEARCH}.exact_topk"] = wiring
    if kernels is not None:
        call = stub(f"{RESEARCH}.kernels.exact_topk", select=kernels.select, LARGEST_K=2048)
        known[f"{RESEARCH}.kernels"] = stub(f"{RESEARCH}.kernels", exact_topk=call, __path__=[])
        known[f"{RESEARCH}.kernels.exact_topk"] = call
    return known


class Funnel:
    """The engine's file with its kernels faked; ``gate`` None means unset, in a stock tree it means nothing."""

    def __init__(self, root: Path, gate: str | None, *, stock: bool, fuse: bool = True, v2: bool = True) -> None:
        self.kernels = Kernels()
        with mock.patch.dict(os.environ):
            os.environ.pop(GATE, None)
            if gate is not None:
                os.environ[GATE] = gate
            self.surroundings = {
                **self.kernels.modules(fuse, v2),
                **({} if stock else research(root, self.kernels)),
            }
            self.module = load(root, FUNNEL, self.surroundings)

    def __call__(self, backend: str, call: dict[str, Any]) -> Any:
        """Run topk_transform; gives the result, or the exception's type and text."""
        member = self.module.DSATopKBackend(backend)
        given = {**call, "topk_transform_method": self.module.TopkTransformMethod[call["topk_transform_method"]]}
        with modules(self.surroundings):
            try:
                return member.topk_transform(**given)
            except (RuntimeError, AssertionError) as error:
                return type(error), str(error)


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)


PAGE = 4


def tables(requests: int, pages: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A page table and the same table of single slots."""
    real = torch.from_numpy(np.random.default_rng(seed).permutation(200)[: requests * pages].astype(np.int32))
    real = real.reshape(requests, pages)
    return real, (real[:, :, None] * PAGE + torch.arange(PAGE, dtype=torch.int32)).reshape(requests, -1)


def decode_shaped(rows: int = 5, width: int = 32, k: int = 6) -> dict[str, Any]:
    """One score row a request: decode, and by expanded tables verify and draft-extend."""
    real, single = tables(rows, width // PAGE, rows)
    rng = np.random.default_rng(rows)
    scores = torch.from_numpy(rng.integers(0, 4, (rows, width)).astype(np.float32))
    lengths = torch.tensor([0, 3, 6, 20, width][:rows], dtype=torch.int32)
    metadata = SimpleNamespace(
        real_page_table=real, page_table_1=single, page_size=PAGE, topk_v2_plan=torch.zeros(rows + 1, 2),
        cu_seqlens_k=torch.zeros(rows + 1, dtype=torch.int32),
    )  # fmt: skip
    return {
        "logits": scores, "lengths": lengths, "topk": k, "topk_transform_method": "PAGED", "attn_metadata": metadata,
        "cu_seqlens_q_topk": torch.arange(rows + 1, dtype=torch.int32), "topk_indices_offset": None,
        "row_starts": None, "batch_idx_list": None, "force_unfused_topk": False,
    }  # fmt: skip


def packed(method: str = "PAGED", batch: Any = None, starts: bool = True) -> dict[str, Any]:
    """Prefill: three requests of 2, 0 and 4 rows whose scores lie side by side."""
    counts, sizes = [2, 0, 4], [11, 7, 20]
    real, single = tables(3, 5, 9)
    rows, width = sum(counts), sum(sizes)
    rng = np.random.default_rng(1)
    scores = torch.from_numpy(rng.integers(0, 4, (rows, width)).astype(np.float32))
    begin = np.repeat([0, 11, 18], counts).astype(np.int32)
    lengths = torch.tensor([10, 11, 17, 18, 19, 20], dtype=torch.int32)
    metadata = SimpleNamespace(
        real_page_table=real, page_table_1=single, page_size=PAGE, topk_v2_plan=None,
        cu_seqlens_k=torch.tensor([0, 11, 18, 38], dtype=torch.int32),
    )  # fmt: skip
    return {
        "logits": scores, "lengths": lengths, "topk": 6, "topk_transform_method": method, "attn_metadata": metadata,
        "cu_seqlens_q_topk": torch.tensor([0, 2, 2, 6], dtype=torch.int32),
        "topk_indices_offset": torch.from_numpy(begin) if method == "RAGGED" else None,
        "row_starts": torch.from_numpy(begin) if starts else None, "batch_idx_list": batch, "force_unfused_topk": False,
    }  # fmt: skip


def by_token(call: dict[str, Any]) -> dict[str, Any]:
    """A chunk of a packed prefill: every row is its own request and names its table row."""
    rows = call["logits"].shape[0]
    return {
        **call,
        "cu_seqlens_q_topk": torch.arange(rows + 1, dtype=torch.int32),
        "batch_idx_list": torch.tensor([0, 0, 2, 2, 2, 2]),
    }


def without_wide_table(call: dict[str, Any]) -> dict[str, Any]:
    metadata = SimpleNamespace(**{**vars(call["attn_metadata"]), "page_table_1": None})
    return {**call, "attn_metadata": metadata}


def calls() -> dict[str, dict[str, Any]]:
    """Every branch of the funnel that a call can reach, by name."""
    more_rows = {**packed(starts=False), "cu_seqlens_q_topk": torch.tensor([0, 3, 3, 6], dtype=torch.int32)}
    return {
        "decode": decode_shaped(),
        "decode, one row": decode_shaped(rows=1, k=1),
        "decode, no wide table": without_wide_table(decode_shaped()),
        "decode, int64 lengths": {**decode_shaped(), "lengths": decode_shaped()["lengths"].long()},
        "forced unfused": {**decode_shaped(), "force_unfused_topk": True},
        "forced unfused, packed": {**packed(), "force_unfused_topk": True},
        "packed": packed(),
        "packed, no starts": more_rows,
        "packed, named table rows": packed(batch=[2, 0, 1]),
        "packed, chunk": by_token(packed()),
        "packed, no wide table": without_wide_table(packed()),
        "ragged": packed("RAGGED"),
        "ragged, no starts": packed("RAGGED", starts=False),
        "ragged, decode-shaped": {**packed("RAGGED"), "row_starts": None},
        "ragged, no offsets": {**packed("RAGGED"), "topk_indices_offset": None},
    }


@pytest.mark.parametrize("backend", ["sgl-kernel", "torch", "flashinfer"])
@pytest.mark.parametrize(("fuse", "v2"), list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("gate", [None, "", "0"])
def test_with_the_gate_unset_or_off_every_call_takes_the_stock_route(
    stock: Tree, patched: Tree, gate: str | None, fuse: bool, v2: bool, backend: str
) -> None:
    old = Funnel(stock("decode"), gate, stock=True, fuse=fuse, v2=v2)
    new = Funnel(patched("decode"), gate, stock=False, fuse=fuse, v2=v2)
    for name, call in calls().items():
        assert same(old(backend, call), new(backend, call)), name
        assert new.kernels.calls == old.kernels.calls, name
    # The torch backend calls no kernel of its own: there the outcomes above are all there is.
    assert bool(old.kernels.calls) == (backend != "torch")
    assert "ours" not in new.kernels.calls


@pytest.mark.parametrize(("fuse", "v2"), list(itertools.product([True, False], repeat=2)))
def test_with_the_gate_on_every_call_is_ours_and_means_what_the_stock_route_means(
    stock: Tree, patched: Tree, fuse: bool, v2: bool
) -> None:
    compared = 0
    old = Funnel(stock("decode"), None, stock=True, fuse=fuse, v2=v2)
    new = Funnel(patched("decode"), "1", stock=False, fuse=fuse, v2=v2)
    for name, call in calls().items():
        new.kernels.calls.clear()
        wanted, found = old("sgl-kernel", call), new("sgl-kernel", call)
        if isinstance(wanted, tuple):
            if "no wide table" in name and name.startswith("decode"):
                continue  # here ours needs less than the stock route
            assert isinstance(found, tuple) and found[0].__name__ == "ExactTopkRefused", name
            continue
        assert same(wanted, found), name
        assert new.kernels.calls == ["ours"], name
        compared += 1
    assert compared >= 11


def test_topk_func_alone_is_ours_too(patched: Tree) -> None:
    new = Funnel(patched("decode"), "1", stock=False)
    call = packed()
    with modules(new.surroundings):
        found = new.module.DSATopKBackend("sgl-kernel").topk_func(
            call["logits"], call["lengths"].long(), 6, row_starts=call["row_starts"].long()
        )
    assert new.kernels.calls == ["ours"]
    expected = oracle.expected(call["logits"].numpy(), call["lengths"].tolist(), 6, call["row_starts"].tolist())
    assert (found.numpy() == expected).all()


def test_decode_reads_the_pool_pages_and_never_the_wide_table(patched: Tree) -> None:
    new = Funnel(patched("decode"), "1", stock=False)
    call = without_wide_table(decode_shaped())
    assert isinstance(new("sgl-kernel", call), torch.Tensor)
    assert new.kernels.ours[0]["page_size"] == PAGE
    assert new.kernels.ours[0]["table"] is call["attn_metadata"].real_page_table


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cu_seqlens_q_topk": None}, "cu_seqlens_q"),
        ({"cu_seqlens_q_topk": torch.tensor([0, 6], dtype=torch.int32)}, "1 requests"),
        ({"batch_idx_list": [0, 1]}, "2 table rows"),
    ],
)
def test_packed_rows_without_their_requests_are_refused(patched: Tree, change: dict[str, Any], said: str) -> None:
    new = Funnel(patched("decode"), "1", stock=False)
    found = new("sgl-kernel", {**packed(), **change})
    assert found[0].__name__ == "ExactTopkRefused" and said in found[1]
    assert new.kernels.calls == []


def test_an_unknown_method_is_refused(patched: Tree) -> None:
    known = research(patched("decode"), Kernels())
    with modules(known), pytest.raises(RuntimeError, match="unknown selection method"):
        known[f"{RESEARCH}.exact_topk"].transform(
            torch.zeros(1, 4), torch.zeros(1), 2, SimpleNamespace(name="OTHER"), None, None, None, None, None
        )


# The start


class Start:
    """``admit`` and ``refuse`` of the patched tree."""

    def __init__(self, root: Path, gate: str | None) -> None:
        with mock.patch.dict(os.environ):
            os.environ.pop(GATE, None)
            if gate is not None:
                os.environ[GATE] = gate
            self.known = research(root, Kernels())
        self.prepared: list[Any] = []
        vars(self.known[f"{RESEARCH}.kernels.exact_topk"])["prepare"] = self.prepared.append
        self.wiring = self.known[f"{RESEARCH}.exact_topk"]

    def admit(self, **change: Any) -> None:
        backend = SimpleNamespace(
            device="cuda", dsa_index_topk=2048, real_page_size=64, hisparse_coordinator=None,
            dsa_topk_backend=SimpleNamespace(is_sgl_kernel=lambda: True, value="sgl-kernel"),
        )  # fmt: skip
        server = SimpleNamespace(enable_hierarchical_cache=False)
        for name, value in change.items():
            setattr(server if hasattr(server, name) else backend, name, value)
        with modules(self.known):
            self.wiring.admit(backend, server)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"device": "cpu"}, "cpu is not a CUDA device"),
    ({"dsa_topk_backend": SimpleNamespace(is_sgl_kernel=lambda: False, value="flashinfer")}, "flashinfer"),
    ({"hisparse_coordinator": object()}, "HiSparse"),
    ({"enable_hierarchical_cache": True}, "hierarchical cache"),
    ({"dsa_index_topk": 4096}, "4096"),
    ({"dsa_index_topk": 0}, "selects 0"),
    ({"dsa_index_topk": None}, "None"),
    ({"real_page_size": 48}, "48 is not a power of two"),
    ({"real_page_size": 0}, "0 is not a power of two"),
]


@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_a_start_that_the_gate_was_not_made_for_is_refused_by_name(
    patched: Tree, change: dict[str, Any], said: str
) -> None:
    start = Start(patched("decode"), "1")
    with pytest.raises(RuntimeError, match=re.escape(said)) as caught:
        start.admit(**change)
    assert GATE in str(caught.value)
    assert start.prepared == []
    Start(patched("decode"), None).admit(**change)


def test_a_start_builds_the_kernel_with_the_gate_on_and_touches_nothing_with_it_off(patched: Tree) -> None:
    on, off = Start(patched("decode"), "1"), Start(patched("decode"), None)
    on.admit()
    off.admit()
    assert (on.prepared, off.prepared) == (["cuda"], [])


def test_an_indexer_outside_the_funnel_is_refused(patched: Tree) -> None:
    with pytest.raises(RuntimeError, match="DeepSeek-V4"):
        Start(patched("decode"), "1").wiring.refuse("the DeepSeek-V4 indexer")
    Start(patched("decode"), None).wiring.refuse("the DeepSeek-V4 indexer")


def test_a_gate_that_is_neither_on_nor_off_stops_the_import(patched: Tree) -> None:
    with pytest.raises(ValueError, match="neither on"):
        Start(patched("decode"), "perhaps")


@pytest.mark.parametrize("name", ["dsa_backend.py", "deepseek_v4_backend.py"])
def test_both_attention_backends_ask_at_their_start(stock: Tree, patched: Tree, name: str) -> None:
    path = f"sglang/srt/layers/attention/{name}"
    old, new = ((tree("decode") / path).read_text() for tree in (stock, patched))
    asked = {
        "dsa_backend.py": "        exact_topk.admit(self, model_runner.server_args)\n",
        "deepseek_v4_backend.py": '        exact_topk.refuse("the DeepSeek-V4 indexer")\n',
    }[name]
    assert new.count(asked) == 1 and asked not in old
    before = new[: new.index(asked)]
    assert before.rindex("    def __init__(") > before.rindex("\nclass ")
    assert before.endswith("DSATopKBackend(\n            model_runner.server_args.dsa_topk_backend\n        )\n")


# The checks before a launch


@pytest.fixture(scope="module")
def call(patched: Tree) -> Any:
    """The module that calls the kernel, its library replaced by one that counts launches."""
    root = patched("decode")
    build = load(root, "sglang/srt/research/kernels/build.py")
    known = {
        RESEARCH: stub(RESEARCH, __path__=[]),
        f"{RESEARCH}.kernels": stub(f"{RESEARCH}.kernels", build=build, __path__=[]),
        f"{RESEARCH}.kernels.build": build,
    }
    return load(root, "sglang/srt/research/kernels/exact_topk.py", known)


def good() -> dict[str, Any]:
    return {
        "scores": torch.empty((6, 256), device="cuda"),
        "lengths": _ints(6),
        "k": 16,
        "starts": _ints(6),
        "table": _ints(3, 4),
        "page_size": 64,
        "segments": _ints(4),
        "segment_table": _ints(3),
    }


def _ints(*shape: int, dtype: torch.dtype = torch.int32, device: str = "cuda") -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


BAD: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "scores of a wrong type": (lambda g: {"scores": g["scores"].half()}, "float32 or bfloat16"),
    "scores of a double": (lambda g: {"scores": g["scores"].double()}, "float32 or bfloat16"),
    "scores of one dimension": (lambda g: {"scores": g["scores"][0]}, "float32 or bfloat16"),
    "scores on the host": (lambda g: {"scores": torch.empty((6, 256))}, "CUDA device"),
    "columns apart": (lambda g: {"scores": torch.empty((256, 6), device="cuda").t()}, "adjacent"),
    "every second column": (lambda g: {"scores": torch.empty((6, 512), device="cuda")[:, ::2]}, "adjacent"),
    "k of none": (lambda g: {"k": 0}, "1 to 2048"),
    "k too large": (lambda g: {"k": 2049}, "1 to 2048"),
    "k negative": (lambda g: {"k": -1}, "1 to 2048"),
    "k no number": (lambda g: {"k": True}, "1 to 2048"),
    "k a fraction": (lambda g: {"k": 16.0}, "1 to 2048"),
    "lengths of 64 bits": (lambda g: {"lengths": _ints(6, dtype=torch.int64)}, "lengths must be int32"),
    "lengths of too few rows": (lambda g: {"lengths": _ints(5)}, r"lengths must be int32 \(6,\)"),
    "lengths on the host": (lambda g: {"lengths": _ints(6, device="cpu")}, "on cuda:0"),
    "lengths apart": (lambda g: {"lengths": _ints(12)[::2]}, "contiguous"),
    "lengths in two dimensions": (lambda g: {"lengths": _ints(6, 1)}, "lengths must be int32"),
    "starts of 64 bits": (lambda g: {"starts": _ints(6, dtype=torch.int64)}, "starts must be int32"),
    "starts of too few rows": (lambda g: {"starts": _ints(1)}, "starts must be int32"),
    "offsets beside a table": (lambda g: {"offsets": _ints(6)}, "not both"),
    "offsets of 64 bits": (
        lambda g: {"offsets": _ints(6, dtype=torch.int64), "table": None, "page_size": 1, "segments": None,
                   "segment_table": None},
        "offsets must be int32",
    ),
    "a page of 48": (lambda g: {"page_size": 48}, "power of two"),
    "a page of none": (lambda g: {"page_size": 0}, "power of two"),
    "a negative page": (lambda g: {"page_size": -64}, "power of two"),
    "a table of 64 bits": (lambda g: {"table": _ints(3, 4, dtype=torch.int64)}, "table must be int32"),
    "a table of one dimension": (lambda g: {"table": _ints(12)}, "table must be"),
    "a table on the host": (lambda g: {"table": _ints(3, 4, device="cpu")}, "table must be int32"),
    "a table across": (lambda g: {"table": _ints(4, 3).t()}, "adjacent"),
    "a short table": (lambda g: {"table": _ints(3, 3)}, "short of 256"),
    "too few table rows": (lambda g: {"segment_table": None, "table": _ints(2, 4)}, "3 segments, but 2"),
    "fewer table rows than rows": (lambda g: {"segments": None, "segment_table": None}, "6 rows, but 3"),
    "table rows named for nothing": (lambda g: {"segments": None}, "needs segments"),
    "segments of 64 bits": (lambda g: {"segments": _ints(4, dtype=torch.int64)}, "segments must be int32"),
    "no segments": (lambda g: {"segments": _ints(0)}, "segments must be"),
    "too few names": (lambda g: {"segment_table": _ints(2)}, "segment_table must be int32"),
    "a page without a table": (lambda g: {"table": None, "segments": None, "segment_table": None}, "without a table"),
    "segments without a table": (lambda g: {"table": None, "page_size": 1, "segment_table": None}, "without a table"),
    "an unknown path": (lambda g: {"path": "fast"}, "path"),
    "a negative split": (lambda g: {"split": -1}, "split"),
    "a negative sample rank": (lambda g: {"sample_rank": -1}, "sample_rank"),
    "a row of 2**31 - 256": (lambda g: {"scores": torch.empty((6, 2**31 - 256), device="cuda")}, "width 2147483392"),
    "segments of two dimensions": (lambda g: {"segments": _ints(4, 1)}, "segments must be"),
    "table rows named without a table": (
        lambda g: {"table": None, "page_size": 1, "segments": None}, "without a table",
    ),
    "out of 64 bits": (lambda g: {"out": _ints(6, 16, dtype=torch.int64)}, "out must be int32"),
    "out of another shape": (lambda g: {"out": _ints(6, 15)}, "out must be int32"),
    "out on the host": (lambda g: {"out": _ints(6, 16, device="cpu")}, "out must be int32"),
    "out across": (lambda g: {"out": _ints(16, 6).t()}, "contiguous"),
    "a workspace of a wrong type": (lambda g: {"workspace": _ints(4096)}, "workspace must be"),
    "a workspace on the host": (lambda g: {"workspace": torch.empty(4096, dtype=torch.uint8)}, "workspace must be"),
    "a workspace apart": (lambda g: {"workspace": _ints(8192, dtype=torch.uint8)[::2]}, "workspace must be"),
    "a small workspace": (lambda g: {"workspace": _ints(64, dtype=torch.uint8)}, "workspace too small"),
}  # fmt: skip


class Library:
    """A kernel library that only counts."""

    def __init__(self) -> None:
        self.launches = 0

    def exact_topk_workspace(self, arguments: Any) -> int:
        return 4096

    def exact_topk_launch(self, arguments: Any, stream: Any) -> int:
        self.launches += 1
        return 0


@contextmanager
def counted(call: Any, address: int = 4096) -> Iterator[Library]:
    """Tensors without memory on a card that is not there, all at one address; gives the library that counts."""
    library = Library()
    with (
        mock.patch.object(call, "_processors", {0: 132}),
        mock.patch.object(call, "_libraries", {(9, 0): library}),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
        mock.patch.object(torch.cuda, "device", return_value=nullcontext()),
        mock.patch.object(torch.cuda, "current_stream", return_value=SimpleNamespace(cuda_stream=0)),
        mock.patch.object(torch.Tensor, "data_ptr", return_value=address),
        FakeTensorMode(),
    ):
        yield library


def test_good_arguments_are_launched(call: Any) -> None:
    with counted(call) as library:
        given = {**good(), "workspace": _ints(4096, dtype=torch.uint8)}
        made = call.select(given.pop("scores"), given.pop("lengths"), given.pop("k"), **given)
        assert (made.shape, made.dtype) == ((6, 16), torch.int32)
    assert library.launches == 1


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_named_before_anything_is_launched(call: Any, name: str) -> None:
    change, said = BAD[name]
    with counted(call) as library:
        given = good()
        given.update(change(given))
        with pytest.raises(call.TopkArgumentError, match=said):
            call.select(given.pop("scores"), given.pop("lengths"), given.pop("k"), **given)
    assert library.launches == 0


def test_a_workspace_off_a_multiple_of_16_is_named(call: Any) -> None:
    with counted(call, address=4104) as library:
        given = {**good(), "workspace": _ints(4096, dtype=torch.uint8)}
        with pytest.raises(call.TopkArgumentError, match="not aligned"):
            call.select(given.pop("scores"), given.pop("lengths"), given.pop("k"), **given)
    assert library.launches == 0


@pytest.mark.parametrize(
    ("shape", "device", "path"), [((6,), "cuda", "auto"), ((6, 9), "cpu", "auto"), ((6, 9), "cuda", "fast")]
)
def test_the_workspace_of_bad_scores_is_not_told(call: Any, shape: tuple[int, ...], device: str, path: str) -> None:
    with counted(call), pytest.raises(call.TopkArgumentError, match="scores"):
        call.workspace_bytes(torch.empty(shape, device=device), 16, path=path)


@pytest.mark.parametrize(
    ("error", "said"), [(-1, "count"), (-2, "workspace"), (-3, "resident"), (700, "CUDA error 700")]
)
def test_the_kernels_own_refusals_are_errors(call: Any, error: int, said: str) -> None:
    library = SimpleNamespace(exact_topk_error=lambda number: b"illegal address")
    with pytest.raises((ValueError, RuntimeError), match=said):
        call._succeed(library, error)
    call._succeed(library, 0)


def test_a_device_that_is_no_cuda_device_is_refused(call: Any) -> None:
    with pytest.raises(call.TopkArgumentError, match="cpu"):
        call.prepare("cpu")


def test_no_build_begins_during_a_capture(call: Any) -> None:
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        pytest.raises(call.TopkArgumentError, match="capture"),
    ):
        call.prepare("cuda")


def test_the_arguments_are_laid_out_as_the_source_says(call: Any) -> None:
    text = call.SOURCE.read_text()
    struct = text[text.index("struct Arguments {") : text.index("};", text.index("struct Arguments {"))]
    declared = re.findall(r"^  (?:const )?(void\*|int\*|long long|int) (\w+);", struct, re.MULTILINE)
    kinds = {"void*": "c_void_p", "int*": "c_void_p", "long long": "c_long", "int": "c_int"}
    assert [(name, kinds[kind]) for kind, name in declared] == [
        (name, kind.__name__.replace("c_longlong", "c_long")) for name, kind in call._Arguments._fields_
    ]


# The build


def test_the_source_beside_the_module_is_the_one_that_the_module_names(call: Any) -> None:
    assert hashlib.sha256(call.SOURCE.read_bytes()).hexdigest() == call.SOURCE_SHA256
    assert call.SOURCE.parent == Path(call.__file__).parent


def test_the_evidence_is_of_this_source_and_its_verdicts_follow_from_its_figures(call: Any) -> None:
    folder = Path(__file__).parents[3] / "evidence" / "topk"
    exact, speed, broken, clean, stock = (
        json.loads((folder / f"{name}.json").read_text())
        for name in ("exactness", "speed", "mutations", "sanitizer", "stock")
    )
    for one in (exact, speed, broken, clean, stock):
        assert one["source_sha256"] == call.SOURCE_SHA256, one["script"]
    assert broken["tests"] == {exact["script"]: exact["script_sha256"]}
    # All of them but the one that starts the sanitizers, which have a result of their own.
    assert (exact["tests"], exact["failed_tests"]) == (370, 0)
    assert exact["rows"] == sum(case["rows"] for case in exact["cases"].values()) >= 10_000
    assert exact["wrong_rows"] == exact["unequal_launches"] == 0
    # A run of a part of the tests leaves a result too.
    others = {"rows", "8192 rows", "2048 rows", "bounds", "narrow", "bf16 resident", "bf16 stream", "bf16 split"}
    assert {*SHAPES, *others} <= exact["cases"].keys()
    assert exact["row_launches"] >= 25 * exact["rows"]
    assert exact["launches_beside_noise"] >= 800 and exact["graph_replays"] >= 480
    assert all(row["wrong_rows"] == 0 for row in speed["rows"] if row["unit"] == "us")
    assert all(row["holds"] == (row["value"] <= row["must"]) for row in speed["rows"] if "must" in row)
    assert [row["name"] for row in broken["rows"]] == [mutate.WHOLE, *mutate.MUTATIONS]
    assert all(mutate.right(row) and (row["by"] or row["name"] == mutate.WHOLE) for row in broken["rows"])
    assert [row["name"] for row in clean["rows"]] == list(sanitize.TOOLS)
    own = {row["name"]: row for row in stock["rows"] if row["name"].startswith("exact_topk ")}
    # The sets of rows with a NaN are left out; of the others none is.
    assert own.keys() == {
        f"exact_topk {kind}" for kind in KINDS if not np.isnan(make(kind, 8, 4096, stock["seed"])).any()
    }
    assert all(row["holds"] and row["value"] == 0 for row in (*clean["rows"], *own.values()))


def test_the_page_tells_the_evidences_times_and_verdicts() -> None:
    root = Path(__file__).parents[3]
    page = (root / "docs" / "topk.md").read_text()
    rows = json.loads((root / "evidence" / "topk" / "speed.json").read_text())["rows"]
    told = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.split("\n") if line.startswith("| ")]
    bounded = [row for row in rows if row["unit"] == "us" and "must" in row]
    assert len(bounded) == 14
    for row in bounded:
        line = next(cells for cells in told if cells[0] == row["name"].split()[0])
        verdict = "yes" if row["holds"] else "**no**"
        figures = [f"{row[name]:g}" for name in ("floor_us", "value", "ratio", "must")]
        assert line[1:6] == [*figures, verdict]


NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release {release}, V{release}.0"; exit 0; fi
echo run >> "{log}"
{slow}
for word; do
  case "$word" in -DTOY_IDENTITY=*) said="$word" ;; esac
  if [ "$last" = -o ]; then out="$word"; fi
  last="$word"
done
{body}
"""
WRITES = 'echo "$said" > "$out"'


class Machine:
    """A toolkit folder with an nvcc of ours, a kernel source, a cache, and a loader that reads what nvcc wrote."""

    def __init__(self, folder: Path, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.build, self.log = folder, build, folder / "log"
        self.source = folder / "toy.cu"
        self.source.write_text("// a kernel\n")
        self.digest = hashlib.sha256(b"// a kernel\n").hexdigest()
        monkeypatch.setenv("CUDA_HOME", str(folder / "cuda"))
        monkeypatch.setenv("PATCHBUNDLE_CACHE", str(folder / "cache"))
        monkeypatch.setattr(build.ctypes, "CDLL", self.open)
        self.install()

    def install(self, release: str = "13.0", body: str = WRITES, slow: str = "") -> None:
        nvcc = self.folder / "cuda" / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True, exist_ok=True)
        nvcc.write_text(NVCC.format(release=release, body=body, slow=slow, log=self.log))
        nvcc.chmod(0o755)

    def open(self, path: str) -> Any:
        found = re.fullmatch(r'-DTOY_IDENTITY="(.*)"\n', Path(path).read_text())
        if found is None:
            raise OSError("no library")
        said = found[1].encode()

        def identity() -> bytes:
            return said

        return SimpleNamespace(toy_identity=identity)

    def library(self, capability: tuple[int, int] = (9, 0)) -> Any:
        return self.build.library(self.source, self.digest, capability)

    @property
    def builds(self) -> int:
        return self.log.read_text().count("run") if self.log.exists() else 0

    @property
    def entries(self) -> list[Path]:
        return [path for path in (self.folder / "cache" / "kernels").glob("toy-*") if path.is_dir()]


@pytest.fixture
def machine(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, call.build, monkeypatch)


def test_a_kernel_is_built_once_and_found_again(machine: Machine) -> None:
    for _ in range(3):
        assert machine.library().toy_identity().decode() == machine.digest
    assert machine.builds == 1
    record = json.loads((machine.entries[0] / "build.json").read_text())
    assert (record["architecture"], record["source"]) == ("90a", machine.digest)


def test_another_card_compiler_or_source_is_another_entry(machine: Machine) -> None:
    machine.library()
    machine.library((12, 0))
    machine.install(release="13.1")
    machine.library()
    machine.source.write_text("// another kernel\n")
    machine.digest = hashlib.sha256(b"// another kernel\n").hexdigest()
    machine.library()
    assert machine.builds == len(machine.entries) == 4


def test_many_that_start_at_once_build_once(machine: Machine) -> None:
    machine.install(slow="sleep 0.3")
    threads = [threading.Thread(target=machine.library) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert machine.builds == 1


@pytest.mark.parametrize("capability", [(8, 0), (9, 1), (10, 0), (12, 1)])
def test_another_card_is_refused(machine: Machine, capability: tuple[int, int]) -> None:
    with pytest.raises(machine.build.KernelBuildError, match=f"{capability[0]}.{capability[1]} is not supported"):
        machine.library(capability)
    assert machine.builds == 0


def test_a_changed_source_is_refused_even_when_the_right_one_was_built_before(machine: Machine) -> None:
    machine.library()
    machine.source.write_text("// a kernel \n")
    with pytest.raises(machine.build.KernelBuildError, match="was changed"):
        machine.library()


def test_a_missing_source_is_refused(machine: Machine) -> None:
    machine.source.unlink()
    with pytest.raises(machine.build.KernelBuildError, match="No such file"):
        machine.library()


@pytest.mark.parametrize(
    ("release", "body", "said"),
    [
        ("12.7", WRITES, "12.8 or newer"),
        ("11.8", WRITES, "12.8 or newer"),
        ("unknown", WRITES, "does not say its release"),
        ("13.0", "echo 'toy.cu(3): error: nothing' >&2; exit 2", "error: nothing"),
        ("13.0", "exit 0", "kernel cache"),
        ("13.0", 'echo rubbish > "$out"', "cannot be loaded"),
        ("13.0", """echo '-DTOY_IDENTITY="other"' > "$out" """, "says that it is"),
    ],
)
def test_a_compiler_that_does_not_do_its_work_is_an_error(machine: Machine, release: str, body: str, said: str) -> None:
    machine.install(release, body)
    with pytest.raises(machine.build.KernelBuildError, match=said):
        machine.library()


def test_a_failed_build_leaves_nothing_that_a_later_start_could_take(machine: Machine) -> None:
    machine.install(body='echo half > "$out"; exit 1')
    with pytest.raises(machine.build.KernelBuildError):
        machine.library()
    assert machine.entries == []
    machine.install()
    assert machine.library().toy_identity().decode() == machine.digest


@pytest.mark.parametrize("where", ["CUDA_HOME", "CUDA_PATH", "PATH"])
def test_no_compiler_is_an_error_and_a_named_one_is_not_searched_elsewhere(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(machine.folder / "cuda" / "bin") if where != "PATH" else str(tmp_path))
    if where == "PATH":
        monkeypatch.setattr(machine.build.shutil, "which", lambda name: None)
        monkeypatch.setattr(machine.build, "Path", lambda *parts: tmp_path / "absent" if parts[0] else None)
    else:
        monkeypatch.setenv(where, str(tmp_path / "empty"))
    with pytest.raises(machine.build.KernelBuildError, match="nvcc"):
        machine.build.compiler()


@pytest.mark.parametrize("harm", ["library", "record", "no record", "no library"])
def test_a_damaged_cache_entry_is_an_error_that_names_it(machine: Machine, harm: str) -> None:
    machine.library()
    entry = machine.entries[0]
    if harm == "library":
        (entry / "toy.so").write_text((entry / "toy.so").read_text() + "\n")
    elif harm == "record":
        record = json.loads((entry / "build.json").read_text())
        (entry / "build.json").write_text(json.dumps({**record, "architecture": "120a"}))
    else:
        (entry / {"no record": "build.json", "no library": "toy.so"}[harm]).unlink()
    with pytest.raises(machine.build.KernelBuildError, match=re.escape(str(entry))):
        machine.library()
    assert machine.builds == 1


def test_a_cache_that_others_can_write_to_is_refused(machine: Machine) -> None:
    machine.library()
    machine.entries[0].parent.chmod(0o777)
    with pytest.raises(machine.build.KernelBuildError, match="writable by it alone"):
        machine.library()


def test_a_cache_that_cannot_be_made_is_an_error(machine: Machine) -> None:
    (machine.folder / "cache").write_text("a file")
    with pytest.raises(machine.build.KernelBuildError, match="kernel cache"):
        machine.library()


def test_the_cache_folder_follows_the_users_settings(
    call: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PATCHBUNDLE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert call.build.cache() == tmp_path / "patchbundle" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert call.build.cache() == tmp_path / ".cache" / "patchbundle" / "kernels"
