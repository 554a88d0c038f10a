"""Stand-ins for checks: places where an engine asks for a GPU before code that runs without one.

None of them changes what is computed. Each lets the engine's own code behind it run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = [
    "YES",
    "allow_overlap",
    "full_tree_mask",
    "group_without_gpu_communicators",
    "is_cuda",
    "load_nothing",
    "no_fused_store",
    "no_pdl",
    "plain_rope",
    "same_fill_value",
    "the_cuda_forward",
]

YES = True

Function = Callable[..., Any]

_GPU_COMMUNICATORS = ("use_pynccl", "use_pymscclpp", "use_custom_allreduce", "use_torch_symm_mem_all_reduce")


def load_nothing() -> None:
    """Load no compiled operation of sgl-kernel: its libraries need the CUDA driver."""


def is_cuda() -> bool:
    """Yes. Bound in one module only, where the sole question is whether a platform may use DCP or the indexer."""
    return True


def no_pdl() -> bool:
    """No: programmatic dependent launch is an instruction inside a Triton kernel; the interpreter has none."""
    return False


def allow_overlap(server_args: Any) -> None:
    """Leave the overlap scheduler on. The stock function switches it off on a CPU when speculation is on."""


def full_tree_mask(original: Function) -> Function:
    """Wrap the choice of the tree mask's form: the full one, over all keys, as on a GPU."""

    def default_tree_mask_mode() -> Any:
        return original.__globals__["TreeMaskMode"].FULL_MASK

    return default_tree_mask_mode


def plain_rope(original: Function) -> Function:
    """Wrap the factory of rotary embeddings: without scaling use the ordinary factory of the same module.

    The CPU factory knows one kind of scaling and asserts that there is one. The ordinary factory's class holds the
    plain torch formula, which is what runs on a CPU.
    """
    ordinary: Function = original.__globals__["get_rope"]
    signature = inspect.signature(original)

    def get_rope_cpu(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        scaling = bound.arguments["rope_scaling"]
        if scaling is None or scaling.get("rope_type") in (None, "default"):
            names = [name for name in bound.arguments if name != "device"]
            return ordinary(**{name: bound.arguments[name] for name in names})
        return original(*args, **kwargs)

    return get_rope_cpu


def group_without_gpu_communicators(original: Function) -> Function:
    """Wrap the constructor of a process group: the four GPU-only communicators off, everything else as asked for.

    No flag of the engine switches pynccl off. Collectives then go through torch.distributed over gloo.
    """
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        for name in _GPU_COMMUNICATORS:
            bound.arguments[name] = False
        original(*bound.args, **bound.kwargs)

    return __init__


def no_fused_store(*_: Any) -> bool:
    """No: take the indexer's own unfused path."""
    return False


def the_cuda_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the indexer's CUDA forward: plain PyTorch and kernel calls, whatever device the tensors are on."""
    return self.forward_cuda(*args, **kwargs)


def same_fill_value(self: Any) -> int:
    """The padding length that the backend uses on CUDA."""
    value: int = self.get_cuda_graph_seq_len_fill_value()
    return value
