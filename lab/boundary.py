"""The attention -> MoE boundary as running code: the layouts of ``lab.models.boundary`` over torch.distributed.

Any device and backend, any world that factors into attention-TP x CP. Rank r is TP rank r % tp of CP shard r // tp, as
the engine numbers them, so that the shards of all ranks in order are the chunk in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as functional

from lab.models.boundary import Layout, Shape

EPSILON = 1e-5
# Torch 2.13 renamed both; a GPU machine with decode's torch has the old names alone.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Group:
    """One process group and this process' place in it."""

    def __init__(self, ranks: list[int], handle: dist.ProcessGroup, me: int) -> None:
        self.ranks = ranks
        self.handle = handle
        self.place = ranks.index(me)

    @property
    def size(self) -> int:
        return len(self.ranks)


class Transport(Protocol):
    """The three collectives. Tensors are contiguous and split along their first dimension."""

    def all_reduce(self, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        """The sum over the group, same shape. ``tensor`` may be overwritten."""

    def reduce_scatter(self, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        """This rank's part of the sum, ``[rows / size, ...]``."""

    def all_gather(self, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        """All parts in rank order, ``[rows * size, ...]``."""


class Native:
    """The backend's own collectives."""

    def all_reduce(self, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        dist.all_reduce(tensor, group=group.handle)
        return tensor

    def reduce_scatter(self, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        part = tensor.new_empty((tensor.shape[0] // group.size, *tensor.shape[1:]))
        _reduce_scatter(part, tensor, group=group.handle)
        return part

    def all_gather(self, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        whole = tensor.new_empty((tensor.shape[0] * group.size, *tensor.shape[1:]))
        all_gather_single(whole, tensor, group=group.handle)
        return whole


class Ring:
    """The same from point-to-point sends, each counted: ``sent`` is what this rank handed to the network, bytes."""

    def __init__(self) -> None:
        self.sent = 0

    def _exchange(self, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        """Give ``tensor`` to the next rank, take the previous rank's."""
        after = group.ranks[(group.place + 1) % group.size]
        before = group.ranks[(group.place - 1) % group.size]
        tensor = tensor.contiguous()
        arrived = torch.empty_like(tensor)
        self.sent += tensor.numel() * tensor.element_size()
        for pending in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, after), dist.P2POp(dist.irecv, arrived, before)]
        ):
            pending.wait()
        return arrived

    def all_reduce(self, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        return self.all_gather(self.reduce_scatter(tensor, group), group)

    def reduce_scatter(self, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        parts = [part.clone() for part in tensor.chunk(group.size)]
        for step in range(group.size - 1):
            arrived = self._exchange(parts[(group.place - step - 1) % group.size], group)
            parts[(group.place - step - 2) % group.size] += arrived
        return parts[group.place]

    def all_gather(self, tensor: torch.Tensor, group: Group) -> torch.Tensor:
        parts = [tensor] * group.size
        for step in range(group.size - 1):
            place = (group.place - step - 1) % group.size
            parts[place] = tensor = self._exchange(tensor, group)
        return torch.cat(parts)


class Mesh:
    """The process groups of one shape. All ranks of the world make it together.

    Raises ValueError if the world is not ``shape.tp * shape.cp`` processes.
    """

    def __init__(self, shape: Shape) -> None:
        world, me = dist.get_world_size(), dist.get_rank()
        if world != shape.world:
            raise ValueError(f"{world} processes are not attention-TP {shape.tp} x CP {shape.cp}")
        self.shape = shape
        self.tp_rank, self.cp_rank = me % shape.tp, me // shape.tp
        shards = [[c * shape.tp + t for t in range(shape.tp)] for c in range(shape.cp)]
        rings = [[c * shape.tp + t for c in range(shape.cp)] for t in range(shape.tp)]
        self.tp = self._own(shards, me)
        self.cp = self._own(rings, me)
        self.world = self._own([list(range(world))], me)

    @staticmethod
    def _own(every: list[list[int]], me: int) -> Group:
        """Every rank takes part in making every group, also those it does not belong to."""
        handles = [dist.new_group(ranks) for ranks in every]
        return next(Group(ranks, handle, me) for ranks, handle in zip(every, handles, strict=True) if me in ranks)


@dataclass(frozen=True)
class Weights:
    """One layer's RMSNorm weights, each ``[hidden]``: before the MoE and before the next attention."""

    moe: torch.Tensor
    attention: torch.Tensor


# (layer, hidden rows) -> partial sums of the same shape: this rank's share of attention or of the MoE.
Part = Callable[[int, torch.Tensor], torch.Tensor]


def norm(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm of each row."""
    return functional.rms_norm(hidden, (hidden.shape[-1],), weight, EPSILON)


@dataclass(frozen=True)
class Boundary:
    """Runs layers in one layout. ``hidden`` and ``residual`` are the shard's rows, ``[chunk / cp, hidden]``."""

    layout: Layout
    mesh: Mesh
    transport: Transport

    def _half(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's part of the shard's rows, as memory of its own: a fused add-and-norm writes into it."""
        return rows.chunk(self.mesh.tp.size)[self.mesh.tp_rank].clone()

    def run(
        self,
        attention: Part,
        moe: Part,
        weights: list[Weights],
        hidden: torch.Tensor,
        residual: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The hidden rows and the residual behind the last layer, both whole on every rank of the shard."""
        persistent = self.layout is Layout.PERSISTENT
        if persistent:
            residual = self._half(residual)
        for layer, weight in enumerate(weights):
            partial = attention(layer, hidden)
            full, residual = self.enter(partial, residual, weight)
            hidden, residual = self.leave(moe(layer, full), residual, weight)
        if persistent:
            residual = self.transport.all_gather(residual, self.mesh.tp)
        return hidden, residual

    def enter(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: Weights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The MoE's input, ``[chunk, hidden]``, and the residual as this layout keeps it."""
        mesh, transport = self.mesh, self.transport
        if self.layout is Layout.ALL_REDUCE:
            residual = residual + transport.all_reduce(partial, mesh.tp)
            return transport.all_gather(norm(residual, weight.moe), mesh.cp), residual
        if self.layout not in (Layout.INPUT_SP, Layout.PERSISTENT):
            raise ValueError(f"the layout {self.layout.value} is arithmetic only")
        part = transport.reduce_scatter(partial, mesh.tp)
        half = residual if self.layout is Layout.PERSISTENT else self._half(residual)
        half = half.add_(part) if self.layout is Layout.INPUT_SP else half + part
        full = transport.all_gather(norm(half, weight.moe), mesh.world)
        if self.layout is Layout.INPUT_SP:
            half = transport.all_gather(half, mesh.tp)
        return full, half

    def leave(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: Weights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The next attention's input, ``[chunk / cp, hidden]``, and the residual as this layout keeps it."""
        mesh, transport = self.mesh, self.transport
        part = transport.reduce_scatter(partial, mesh.world)
        if self.layout is Layout.PERSISTENT:
            residual = residual + part
            return transport.all_gather(norm(residual, weight.attention), mesh.tp), residual
        residual = residual + transport.all_gather(part, mesh.tp)
        return norm(residual, weight.attention), residual


@dataclass(frozen=True)
class Toy:
    """Attention and MoE small enough to be checked: each rank scales by its own factors, the sum is the model.

    ``attention``: ``[layers, tp, hidden]``, ``moe``: ``[layers, world, hidden]``. The MoE squares what it gets, so
    that a sum taken in the wrong place does not come out right by linearity.
    """

    attention: torch.Tensor
    moe: torch.Tensor
    weights: list[Weights]
    hidden: torch.Tensor
    residual: torch.Tensor

    @classmethod
    def make(cls, shape: Shape, layers: int, seed: int, dtype: torch.dtype, device: torch.device) -> Toy:
        """The whole chunk's values, the same on every rank: ``hidden`` and ``residual`` are ``[chunk, hidden]``."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(device, dtype)

        return cls(
            normal(layers, shape.tp, shape.hidden),
            normal(layers, shape.world, shape.hidden),
            [Weights(1 + normal(shape.hidden) / 8, 1 + normal(shape.hidden) / 8) for _ in range(layers)],
            normal(shape.chunk, shape.hidden),
            normal(shape.chunk, shape.hidden),
        )

    def attend(self, layer: int, hidden: torch.Tensor, tp_rank: int) -> torch.Tensor:
        return hidden * self.attention[layer, tp_rank]

    def mix(self, layer: int, hidden: torch.Tensor, rank: int) -> torch.Tensor:
        return hidden * hidden * self.moe[layer, rank]

    def single(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden rows and residual of the whole chunk from one process, ``[chunk, hidden]`` in float64."""
        hidden, residual = self.hidden.double(), self.residual.double()
        attention, moe = self.attention.double(), self.moe.double()
        for layer, weight in enumerate(self.weights):
            residual = residual + hidden * attention[layer].sum(0)
            full = norm(residual, weight.moe.double())
            residual = residual + full * full * moe[layer].sum(0)
            hidden = norm(residual, weight.attention.double())
        return hidden, residual

    def distributed(self, boundary: Boundary) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's shard of the same."""
        mesh = boundary.mesh
        rows = slice(mesh.cp_rank * mesh.shape.rows, (mesh.cp_rank + 1) * mesh.shape.rows)
        rank = mesh.world.place
        return boundary.run(
            lambda layer, hidden: self.attend(layer, hidden, mesh.tp_rank),
            lambda layer, hidden: self.mix(layer, hidden, rank),
            self.weights,
            self.hidden[rows],
            self.residual[rows],
        )


class Sending:
    """How prefill ranks send the same bytes to decode ranks: the first half of the world are sources, the others take.

    ``requests`` pieces of ``size`` bytes each; piece i goes to destination i % n. CP0 sends all of them, or the source
    changes from piece to piece, or every source sends its n-th part of each.
    """

    WAYS = ("cp0-only", "rotated", "owner-direct")

    def __init__(self, way: str, world: int, requests: int, size: int) -> None:
        sources = world // 2
        if world < 2 or world % 2:
            raise ValueError(f"{world} ranks have no equal halves of sources and destinations")
        if way not in self.WAYS:
            raise ValueError(f"{way} is none of {', '.join(self.WAYS)}")
        if size % sources:
            raise ValueError(f"a piece of {size} bytes has no {sources} equal parts")
        self.way, self.sources, self.requests, self.size = way, sources, requests, size

    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """(source, destination, bytes) in the order of sending."""
        for request in range(self.requests):
            destination = self.sources + request % self.sources
            if self.way == "cp0-only":
                yield 0, destination, self.size
            elif self.way == "rotated":
                # Not request % sources: that would tie each source to one destination.
                yield (request + request // self.sources) % self.sources, destination, self.size
            else:
                for source in range(self.sources):
                    yield source, destination, self.size // self.sources

    def busiest(self) -> int:
        """Bytes of the source that sends the most."""
        load = dict.fromkeys(range(self.sources), 0)
        for source, _, size in self.pieces():
            load[source] += size
        return max(load.values())

    def run(self, buffer: torch.Tensor) -> None:
        """Send or take this rank's pieces. ``buffer``: uint8, at least ``size`` bytes, on the group's device."""
        me = dist.get_rank()
        calls = [
            dist.P2POp(
                dist.isend if source == me else dist.irecv, buffer[:size], destination if source == me else source
            )
            for source, destination, size in self.pieces()
            if me in (source, destination)
        ]
        for pending in dist.batch_isend_irecv(calls) if calls else ():
            pending.wait()
