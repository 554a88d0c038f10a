"""The byte ledger of the boundary between attention and MoE in a prefill of attention-TP x context-parallel ranks.

A chunk of tokens lies in equal shards on the ``cp`` ranks; the ``tp`` ranks of a shard hold partial sums of its
attention output. S is the size of one shard of activations in bytes. All layouts end where the next attention begins:
its hidden rows whole on every rank of the shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lab.models.collectives import Collective, NotDivisible, Op


class Layout(Enum):
    """How the residual is kept and where the gathers stand."""

    CP_ONLY = "cp-only"  # the stock path: attention is not split, so the exit sums over the CP group alone
    ALL_REDUCE = "all-reduce"  # all-reduce, norm on S rows, gather over CP
    INPUT_SP = "input-sp"  # reduce-scatter, norm on S / tp rows, gather over all ranks, residual gathered back
    PERSISTENT = "persistent-residual"  # as input-sp, but the residual stays in S / tp parts through the layers
    GATHER_FUSED = "gather-fused"  # as persistent, and the last gather moves behind the next replicated projection


@dataclass(frozen=True)
class Shape:
    """``chunk`` tokens of ``hidden`` numbers of ``itemsize`` bytes, over ``cp`` shards of ``tp`` ranks each."""

    chunk: int = 16_384
    hidden: int = 6_144
    itemsize: int = 2
    tp: int = 2
    cp: int = 4

    def __post_init__(self) -> None:
        if min(self.chunk, self.hidden, self.itemsize, self.tp, self.cp) < 1:
            raise ValueError("a shape has positive sizes")
        if self.chunk % self.world:
            raise NotDivisible(f"a chunk of {self.chunk} tokens has no {self.world} equal parts")

    @property
    def world(self) -> int:
        return self.tp * self.cp

    @property
    def rows(self) -> int:
        """Tokens of one shard."""
        return self.chunk // self.cp

    @property
    def shard(self) -> int:
        """S, bytes."""
        return self.rows * self.hidden * self.itemsize

    def of(self, rows: int, width: int | None = None) -> int:
        """Bytes of ``rows`` rows of ``width`` (default: hidden) numbers."""
        return rows * (self.hidden if width is None else width) * self.itemsize


def entry(layout: Layout, shape: Shape) -> tuple[Collective, ...]:
    """From the partial sums of attention to the MoE's input, whole on every rank."""
    shard, whole = shape.shard, shape.of(shape.chunk)
    if layout is Layout.CP_ONLY:
        return (Collective("CP all-gather", Op.ALL_GATHER, shape.cp, whole),)
    if layout is Layout.ALL_REDUCE:
        return (
            Collective("TP all-reduce", Op.ALL_REDUCE, shape.tp, shard),
            Collective("CP all-gather", Op.ALL_GATHER, shape.cp, whole),
        )
    parts = (
        Collective("TP reduce-scatter", Op.REDUCE_SCATTER, shape.tp, shard),
        Collective("world all-gather", Op.ALL_GATHER, shape.world, whole),
    )
    if layout is Layout.INPUT_SP:
        return (*parts, Collective("residual TP all-gather", Op.ALL_GATHER, shape.tp, shard))
    return parts


def exit_(layout: Layout, shape: Shape, projected: int | None = None) -> tuple[Collective, ...]:
    """From the partial sums of the MoE to the input of the next attention, whole on every rank of the shard.

    ``projected``: numbers per row behind the replicated projection that GATHER_FUSED gathers instead of hidden rows.
    """
    whole = shape.of(shape.chunk)
    if layout is Layout.CP_ONLY:
        return (Collective("CP reduce-scatter", Op.REDUCE_SCATTER, shape.cp, whole),)
    width = projected if layout is Layout.GATHER_FUSED else None
    return (
        Collective("world reduce-scatter", Op.REDUCE_SCATTER, shape.world, whole),
        Collective("TP all-gather", Op.ALL_GATHER, shape.tp, shape.of(shape.rows, width)),
    )


def sent(calls: tuple[Collective, ...]) -> int:
    """Bytes a rank sends in all of them."""
    return sum(call.sent for call in calls)
