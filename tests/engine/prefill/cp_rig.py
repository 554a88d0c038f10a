"""The CP communicator of a prefill tree between ranks whose collectives are rings that count what they send.

`communicator.py`, `communicator_dsa_cp.py` and our own modules are the tree's files. Process groups, norm and the toy
layers around the boundaries are here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.engine.load import Anything, load, modules, stub

SRT = "sglang.srt"
_QUESTIONS = [
    *("get_bool_env_var", "is_cuda", "is_flashinfer_available", "is_gfx95_supported"),
    *("is_gfx1250_supported", "is_hip", "is_npu"),
]
TOPOLOGY, INPUT_SP = "SGLANG_RESEARCH_DSA_CP4_ATP2", "SGLANG_RESEARCH_INPUT_SP"
TP, CP, ATTN_TP = 8, 4, 2
HIDDEN = 16


def _no(*args: Any, **kwargs: Any) -> bool:
    return False


def _use_prefill_cp(batch: Any) -> bool:
    return batch.attn_cp_metadata is not None


class RMSNorm:
    """A norm that, like the fused kernel, writes both of its inputs."""

    fp32_residual = False
    variance_size_override: int | None = None
    override_orig_dtype: torch.dtype | None = None

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual.copy_((x.float() + residual.float()).to(x.dtype))
        wide = residual.float()
        x.copy_(wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight.float())
        return x, residual


@dataclass
class Journal:
    """What one rank did: collectives in their order, and bytes that it sent."""

    calls: list[tuple[str, str, int]] = field(default_factory=list)
    sent: int = 0


class Ring:
    """A process group of the ranks ``ranks``; each collective is a ring of sends, so that bytes can be counted."""

    def __init__(self, name: str, ranks: Sequence[int], rank: int, journal: Journal) -> None:
        self.name, self.ranks, self.journal = name, list(ranks), journal
        self.rank_in_group, self.world_size = self.ranks.index(rank), len(self.ranks)
        self.after = self.ranks[(self.rank_in_group + 1) % self.world_size]
        self.before = self.ranks[(self.rank_in_group - 1) % self.world_size]

    def _pass_on(self, tensor: torch.Tensor) -> torch.Tensor:
        arrived = torch.empty_like(tensor)
        self.journal.sent += tensor.numel() * tensor.element_size()
        wait = dist.isend(tensor.contiguous(), self.after), dist.irecv(arrived, self.before)
        for request in wait:
            assert request is not None
            request.wait()
        return arrived

    def _reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        chunks = [chunk.clone() for chunk in tensor.chunk(self.world_size)]
        assert len(chunks) == self.world_size and len({chunk.shape for chunk in chunks}) == 1
        for step in range(1, self.world_size):
            arrived = self._pass_on(chunks[(self.rank_in_group - step) % self.world_size])
            chunks[(self.rank_in_group - step - 1) % self.world_size] += arrived
        return chunks[self.rank_in_group]

    def _all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = {self.rank_in_group: tensor}
        for step in range(1, self.world_size):
            tensor = parts[(self.rank_in_group - step) % self.world_size] = self._pass_on(tensor)
        return torch.cat([parts[index] for index in range(self.world_size)])

    def _note(self, operation: str, tensor: torch.Tensor) -> None:
        self.journal.calls.append((operation, self.name, tensor.numel()))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._note("all-reduce", tensor)
        flat = tensor.reshape(-1)
        padded = torch.cat([flat, flat.new_zeros(-flat.numel() % self.world_size)])
        return tensor.copy_(self._all_gather(self._reduce_scatter(padded))[: flat.numel()].view_as(tensor))

    def reduce_scatter_tensor(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        self._note("reduce-scatter", tensor)
        assert tensor.is_contiguous() and output.is_contiguous() and output.numel() * self.world_size == tensor.numel()
        output.copy_(self._reduce_scatter(tensor))

    def all_gather_into_tensor(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        self._note("all-gather", tensor)
        assert tensor.is_contiguous() and output.is_contiguous() and output.numel() == tensor.numel() * self.world_size
        output.copy_(self._all_gather(tensor))


def parallel_state(
    rank: int, journal: Journal, attn_tp: int = ATTN_TP, group: Callable[..., Any] = Ring, **changed: Any
) -> SimpleNamespace:
    """Give what the engine's parallel context says on ``rank`` of eight with ``attn_tp`` attention TP ranks."""
    cp_rank, lane = divmod(rank, attn_tp)
    pair = range(cp_rank * attn_tp, (cp_rank + 1) * attn_tp)
    state = {
        "tp_size": TP,
        "tp_rank": rank,
        "attn_tp_size": attn_tp,
        "attn_tp_rank": lane,
        "attn_cp_size": TP // attn_tp,
        "attn_cp_rank": cp_rank,
        "attn_dp_size": 1,
        "moe_tp_size": TP,
        "moe_ep_size": 1,
        "moe_dense_tp_size": 1,
        "tp_group": group("tp", range(TP), rank, journal),
        "attn_tp_group": group("attn_tp", pair, rank, journal),
        "attn_cp_group": group("attn_cp", range(lane, TP, attn_tp), rank, journal),
    }
    return SimpleNamespace(**{**state, **changed})


class Tree:
    """The communicator's files of one tree, loaded with the named gates set and all others unset."""

    def __init__(self, root: Path, gates: Mapping[str, str] | None = None) -> None:
        self.root = root
        self.parallel: Any = None
        self.dtype = torch.float32
        self.buffer_rows = 0
        self._known = self._surroundings()
        environment = {name: text for name, text in os.environ.items() if not name.startswith("SGLANG_RESEARCH_")}
        with mock.patch.dict(os.environ, {**environment, **(gates or {})}, clear=True):
            if (root / "sglang/srt/research").is_dir():
                self._known[f"{SRT}.research"] = stub(f"{SRT}.research", __path__=[])
                self.gates = self.load("sglang/srt/research/gates.py")
                self.topology = self.load("sglang/srt/research/cp_topology.py")
                self.input_sp = self.load("sglang/srt/research/input_sp.py")
                for name in ("narrow_topology", "pcp4_dcp2", "gather_preload"):
                    self.load(f"sglang/srt/research/{name}.py")
            self.base = self.load("sglang/srt/layers/communicator.py")
            self.communicator = self.load("sglang/srt/layers/communicator_dsa_cp.py")

    def load(self, path: str) -> Any:
        """Load a file of the tree; later files find it under its own name."""
        module = load(self.root, path, self._known)
        parent, _, name = module.__name__.rpartition(".")
        if parent == f"{SRT}.research":
            setattr(self._known[parent], name, module)
        self._known[module.__name__] = module
        return module

    def active(self) -> Any:
        """Answer imports inside functions of the tree's files, for the time of the block."""
        return modules(self._known)

    def _surroundings(self) -> dict[str, ModuleType]:
        layers = f"{SRT}.layers"
        names = [f"{SRT}.distributed", f"{SRT}.distributed.device_communicators.pynccl_allocator"]
        names += [f"{layers}.aux_hidden_states", f"{layers}.quantization.fp8_utils", f"{SRT}.speculative.spec_info"]
        names += [f"{SRT}.model_executor.{name}" for name in ("forward_batch_info", "forward_context")]
        known: dict[str, ModuleType] = {name: Anything(name) for name in names}

        def say(name: str, **attributes: Any) -> None:
            known[name] = module = Anything(name)
            vars(module).update(attributes)

        say(f"{SRT}.environ", envs=_Off())
        say(f"{SRT}.utils", **dict.fromkeys(_QUESTIONS, _no))
        say(f"{layers}.layernorm_sp", layernorm_sp_enabled=_no)
        vars(known.setdefault(layers, Anything(layers)))["layernorm_sp"] = known[f"{layers}.layernorm_sp"]
        vars(known[layers])["__path__"] = []
        say(f"{layers}.flashinfer_comm_fusion", is_flashinfer_allreduce_unavailable=lambda: True)
        say(f"{layers}.moe", get_moe_a2a_backend=lambda: SimpleNamespace(is_none=lambda: True))
        vars(known[f"{layers}.moe"])["should_use_dp_reduce_scatterv"] = _no
        say(f"{layers}.utils.cp_utils", mla_use_prefill_cp=_no, is_mla_prefill_cp_enabled=_no)
        use = {"dsa_use_prefill_cp": _use_prefill_cp, "is_dsa_enable_prefill_cp": lambda: True}
        say(f"{layers}.attention.dsa.utils", **use)
        graph = {"Backend": SimpleNamespace(), "Phase": SimpleNamespace(), "check_cuda_graph_backend": _no}
        say(f"{SRT}.model_executor.cuda_graph_config", **graph)
        say(f"{SRT}.runtime_context", get_parallel=lambda: self.parallel)
        vars(known[f"{SRT}.runtime_context"])["get_platform"] = lambda: SimpleNamespace(is_sm90=False, is_sm100=False)
        group = {
            "get_local_dp_buffer": lambda group: torch.full((self.buffer_rows, HIDDEN), float("nan"), dtype=self.dtype),
            "attn_cp_all_gather_into_tensor": lambda out, x: self.parallel.attn_cp_group.all_gather_into_tensor(out, x),
            "attn_cp_reduce_scatter_tensor": lambda out, x: self.parallel.attn_cp_group.reduce_scatter_tensor(out, x),
            "is_enable_moe_cp_allgather": _no,
            "is_dp_attention_enabled": lambda: True,
            "get_moe_cp_size": lambda: 1,
        }
        say(f"{layers}.dp_attention", **group)
        return known

    def layer(self, norm: Any, sparse: bool) -> Any:
        """Construct the tree's communicator of one layer whose experts take all rows (sparse) or its own (dense)."""
        modes = self.base.ScatterMode
        scattered, mlp = modes.SCATTERED, modes.FULL if sparse else modes.SCATTERED
        with self.active():
            shape = self.base.LayerScatterModes(scattered, scattered, mlp, scattered, scattered)
            return self.communicator.DSACPLayerCommunicator(shape, norm, norm, allow_reduce_scatter=True)


class _Off:
    """An environment object in which every switch is off."""

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(get=_no)
