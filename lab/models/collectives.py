"""What one rank sends in a collective, in the point-to-point bandwidth model.

The model counts payload alone: a reduce-scatter or an all-gather among n ranks moves (n - 1) / n of the whole tensor
from each rank, an all-reduce is both. Protocol overhead, multicast, hops, memory traffic and the choice of the
algorithm are left out, so a figure here is a byte count and never a time. Source: the review of InputSP (evidence id
``input-sp-payload``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Op(Enum):
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"


class NotDivisible(ValueError):
    """A tensor that cannot be split evenly among the ranks."""


@dataclass(frozen=True)
class Collective:
    """One call: ``whole`` is the size in bytes of the tensor that is complete on some side of it (the input of an
    all-reduce or a reduce-scatter, the output of an all-gather), ``ranks`` the size of its group.

    Raises NotDivisible if ``whole`` has no equal parts.
    """

    name: str
    op: Op
    ranks: int
    whole: int

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.whole < 0:
            raise ValueError(f"{self.name}: {self.ranks} ranks and {self.whole} bytes are no collective")
        if self.whole % self.ranks:
            raise NotDivisible(f"{self.name}: {self.whole} bytes have no {self.ranks} equal parts")

    @property
    def sent(self) -> int:
        """Bytes that each rank sends, and receives: all ranks do the same."""
        once = self.whole // self.ranks * (self.ranks - 1)
        return 2 * once if self.op is Op.ALL_REDUCE else once


def broadcast_total(ranks: int, whole: int) -> int:
    """Bytes that all ranks together send when one owner's tensor of ``whole`` bytes reaches every other rank.

    Who sends them depends on the algorithm: the owner all of them in a flat tree, each but the last in a ring.
    """
    if ranks < 1 or whole < 0:
        raise ValueError(f"{ranks} ranks and {whole} bytes are no broadcast")
    return (ranks - 1) * whole
