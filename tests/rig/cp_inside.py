"""Eight processes with the engine's own groups, communicators and norm around toy layers. Run inside the environment.

    python -m tests.rig.cp_inside OUT        the patched tree first on PYTHONPATH, both gates set

The same boundaries are run plain and with half of the rows, in one process, by turning the module's own switch; then
with each of the rig's planted faults of a reduction. Each process writes what it had to OUT/RANK.pt.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lab.rig.faults import FAULTS
from tests.engine.prefill.cp_ranks import SPARSE, Case, Weights, cut, rows_of
from tests.engine.prefill.cp_rig import CP, HIDDEN, TP

CASES = {
    "fp32": Case("wheel"),
    "bf16": Case("wheel", dtype=torch.bfloat16),
    "padded": Case("wheel", pad=2),
    "one row everywhere": Case("wheel", rows=1, split=False),
}

REDUCTIONS = [name for name, fault in FAULTS.items() if fault.patch in ("cp4-attention-tp2", "input-sp")]


def engine(name: str) -> Any:
    """A module of the engine, which is there in its own environment alone."""
    return importlib.import_module(f"sglang.srt.{name}")


def norm_of(weight: torch.Tensor) -> Any:
    """The engine's own norm; its native form, since the fused kernels need a GPU."""
    made = engine("layers.layernorm").RMSNorm(HIDDEN)
    made.weight.data = weight
    made._forward_method = made.forward_native
    return made


def forward(case: Case, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run all layers on this rank; give the last hidden states and residual."""
    base, cp = engine("layers.communicator"), engine("layers.communicator_dsa_cp")
    parallel = engine("runtime_context").get_parallel()
    metadata = SimpleNamespace(per_rank_actual_token=[case.rows] * CP) if case.split else None
    mode = engine("model_executor.forward_batch_info").ForwardMode.EXTEND
    batch = SimpleNamespace(attn_cp_metadata=metadata, forward_mode=mode)
    place = parallel.attn_cp_rank if case.split else 0
    hidden, residual = rows_of(case)[place * case.rows : (place + 1) * case.rows].clone(), None
    buffer = torch.full((CP * case.rows, HIDDEN), float("nan"), dtype=case.dtype)
    scattered = base.ScatterMode.SCATTERED
    for weights, sparse in zip(Weights(case.dtype).layers, SPARSE, strict=True):
        mlp = base.ScatterMode.FULL if sparse else scattered
        modes = base.LayerScatterModes(scattered, scattered, mlp, scattered, scattered)
        after, before = norm_of(weights.after), norm_of(weights.before)
        with mock.patch.object(cp, "get_local_dp_buffer", return_value=buffer):
            layer = cp.DSACPLayerCommunicator(modes, after, after, allow_reduce_scatter=True)
            residual = hidden.clone() if residual is None else hidden + residual
            hidden = before(residual.clone())
            hidden = cut(hidden, weights.up, weights.down, parallel.attn_tp_rank, parallel.attn_tp_size)
            hidden, residual = layer.prepare_mlp(hidden, residual, batch)
            if sparse:
                hidden = cut(hidden, weights.first, weights.second, rank, TP)
                if not case.split:
                    hidden = parallel.tp_group.all_reduce(hidden)
            else:
                hidden = torch.relu(hidden @ weights.first) @ weights.second
            hidden, residual = layer.postprocess_layer(hidden, residual, batch)
    assert residual is not None
    return hidden, residual


def trace(calls: list[tuple[str, str, int]]) -> None:
    """Write down every collective that the engine's groups make from now on."""
    coordinator = engine("distributed.parallel_state").GroupCoordinator
    for name in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"):
        stock = getattr(coordinator, name)

        def traced(self: Any, *args: Any, _name: str = name, _stock: Any = stock) -> Any:
            calls.append((_name, self.unique_name.partition(":")[0], args[-1].numel()))
            return _stock(self, *args)

        setattr(coordinator, name, traced)


def work(rank: int, out: Path) -> None:
    """Be rank ``rank``."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", RANK=str(rank), WORLD_SIZE=str(TP), LOCAL_RANK=str(rank))
    state = engine("distributed.parallel_state")
    state._is_cpu = True  # the other way is a custom operation that exists for CUDA alone
    state.init_distributed_environment(
        world_size=TP, rank=rank, local_rank=rank, distributed_init_method=f"file://{out / 'meeting'}", backend="gloo"
    )
    state.initialize_model_parallel(
        tensor_model_parallel_size=TP, attention_context_model_parallel_size=CP, backend="gloo"
    )
    calls: list[tuple[str, str, int]] = []
    trace(calls)
    switch, results = engine("research.input_sp"), dict[str, Any]()
    # What an engine knows from its arguments; the groups are real.
    told = {"tp_size": TP, "attn_cp_size": CP, "pp_size": 1}
    for name, case in CASES.items():
        for form in ("plain", "sp"):
            switch.ENABLED = form == "sp"
            calls.clear()
            with engine("runtime_context").get_parallel().override(**told):
                hidden, residual = forward(case, rank)
            results[f"{form} {name}"] = (hidden, residual, list(calls))
    for name in REDUCTIONS:
        fault = FAULTS[name]
        module = sys.modules[fault.module]
        switch.ENABLED, right = fault.patch == "input-sp", dict(vars(module))
        fault.plant(module)
        with engine("runtime_context").get_parallel().override(**told):
            hidden, residual = forward(CASES["fp32"], rank)
        vars(module).update(right)
        results[name] = (hidden, residual, [])
    groups = (state.get_tp_group(), state.get_attn_tp_group(), state.get_attn_cp_group())
    results["ranks"] = [list(group.ranks) for group in groups]
    torch.save(results, out / f"{rank}.pt")
    dist.barrier()


def main(out: Path) -> int:
    """Import the engine once, fork eight ranks, and wait for them; give 0 if all ended well."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    for name in ("layers.communicator_dsa_cp", "layers.layernorm", "distributed.parallel_state", "research.input_sp"):
        engine(name)
    dsa, base = engine("layers.attention.dsa.utils"), engine("layers.communicator")
    spec = SimpleNamespace(speculative_algorithm=None)
    children = []
    with (
        mock.patch.object(dsa, "is_dsa_enable_prefill_cp", return_value=True),
        mock.patch.object(base, "get_spec", return_value=spec),
        mock.patch.object(base.layernorm_sp, "layernorm_sp_enabled", return_value=False),
        mock.patch.object(engine("layers.communicator_dsa_cp"), "mla_use_prefill_cp", return_value=False),
    ):
        for rank in range(TP):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    work(rank, out)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            children.append(child)
        return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
