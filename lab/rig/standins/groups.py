"""Stand-ins for collectives that the engine registers as custom operations for CUDA tensors only.

The group's own functions behind the operations run; over gloo on a CPU.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

__all__ = ["all_gather_into_tensor", "reduce_scatter_tensor"]


def _group(name: str) -> Any:
    """The live process group of this name.

    Raises:
        KeyError: no such group. ValueError: it was destroyed.
    """
    group = vars(sys.modules["sglang.srt.distributed.parallel_state"])["_groups"][name]()
    if group is None:
        raise ValueError(f"group {name} is destroyed")
    return group


def all_gather_into_tensor(output: Tensor, input: Tensor, group_name: str) -> None:
    """Gather ``input`` of every rank into ``output``, rank after rank along the first dimension."""
    _group(group_name)._all_gather_into_tensor(output, input)


def reduce_scatter_tensor(output: Tensor, input: Tensor, group_name: str) -> None:
    """Sum ``input`` over the ranks; ``output`` is this rank's part along the first dimension."""
    _group(group_name)._reduce_scatter_tensor(output, input)
