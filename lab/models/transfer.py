"""What moves from prefill to decode: descriptors, batches and bytes by source, for each way of keeping and of sending.

A descriptor is one contiguous piece of memory at both ends; a batch is what one transfer call carries. Source of the
paths: the senders of the pinned prefill release (evidence id ``slice-item``); counts are compared with the real
send methods by test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


def zigzag(chunk: int, cp: int) -> list[list[range]]:
    """Tokens that each CP rank computes: 2 x cp equal segments, rank r takes segments r and 2 x cp - 1 - r."""
    if cp < 1 or chunk % (2 * cp):
        raise ValueError(f"a chunk of {chunk} tokens has no {2 * cp} equal segments")
    size = chunk // (2 * cp)
    return [
        [range(segment * size, (segment + 1) * size) for segment in (rank, 2 * cp - 1 - rank)] for rank in range(cp)
    ]


@dataclass(frozen=True)
class HeadSlices:
    """The slice path for MHA and GQA between different attention-TP sizes: one item is one token's heads of one
    destination rank, in one layer, of K or of V."""

    layers: int
    heads: int
    head: int
    itemsize: int
    source_tp: int
    destination_tp: int

    def __post_init__(self) -> None:
        if self.destination_tp < self.source_tp or self.destination_tp % self.source_tp:
            raise ValueError(f"TP {self.destination_tp} does not divide the heads of TP {self.source_tp}")
        if self.heads % self.destination_tp:
            raise ValueError(f"{self.heads} heads have no {self.destination_tp} equal parts")

    @property
    def item(self) -> int:
        """Bytes of a descriptor, and the stride at the destination."""
        return self.heads // self.destination_tp * self.head * self.itemsize

    @property
    def stride(self) -> int:
        """Bytes from one token to the next at the source."""
        return self.heads // self.source_tp * self.head * self.itemsize

    @property
    def batches(self) -> int:
        """Transfer calls for a chunk, to one destination rank."""
        return 2 * self.layers

    def descriptors(self, tokens: int) -> int:
        """Descriptors of one batch: heads of neighbouring tokens are apart at the source unless TP is the same."""
        return 1 if self.item == self.stride else tokens

    def batch(self, tokens: int) -> int:
        """Bytes of one batch."""
        return tokens * self.item

    def to_each(self, tokens: int) -> int:
        """Bytes that one destination rank gets of a chunk; all of them from one source rank."""
        return self.batches * self.batch(tokens)

    def from_each(self, tokens: int) -> int:
        """Bytes that one source rank sends of a chunk, to all destination ranks that its heads are for."""
        return self.destination_tp // self.source_tp * self.to_each(tokens)


class Way(Enum):
    """Which source rank sends what of one request."""

    CP0 = "cp0-only"  # rank 0 sends all layers of all tokens
    ALL_CP = "all-cp"  # every rank sends all layers of its range of tokens
    LAYER_OWNER = "layer-owner"  # every rank sends its layers of all tokens
    PAGE_OWNER = "page-owner"  # every rank sends all layers of its pages


def by_source(way: Way, layers: list[int], tokens: int, row: int, page: int = 64) -> list[int]:
    """Bytes that each source sends of one request of ``tokens`` tokens, ``row`` bytes a token and layer.

    ``layers``: how many layers each source owns; their sum is the model's.
    """
    sources, depth = len(layers), sum(layers)
    if sources < 1 or tokens < 0 or row < 1:
        raise ValueError(f"{sources} sources, {tokens} tokens, {row} bytes")
    pages = -(-tokens // page)
    if way is Way.CP0:
        return [depth * tokens * row] + [0] * (sources - 1)
    if way is Way.LAYER_OWNER:
        return [own * tokens * row for own in layers]
    if way is Way.ALL_CP:
        # Whole pages, contiguous ranges, the first sources one page more.
        shares = [pages // sources + (rank < pages % sources) for rank in range(sources)]
        ends = [min(sum(shares[: rank + 1]) * page, tokens) for rank in range(sources)]
    else:
        full = [sum(1 for number in range(rank, pages, sources)) * page for rank in range(sources)]
        if pages and tokens % page:
            full[(pages - 1) % sources] -= page - tokens % page
        return [depth * own * row for own in full]
    return [depth * (end - begin) * row for begin, end in zip([0, *ends], ends, strict=False)]


def _shares(way: Way, layers: list[int], tokens: int, page: int) -> Iterator[tuple[int, list[range]]]:
    """(layers, tokens) that each source sends."""
    sources, depth, pages = len(layers), sum(layers), -(-tokens // page)
    begin = 0
    for rank, own in enumerate(layers):
        if way is Way.CP0:
            yield (depth, [range(tokens)]) if rank == 0 else (depth, [])
        elif way is Way.LAYER_OWNER:
            yield own, [range(tokens)]
        elif way is Way.ALL_CP:
            end = min(begin + (pages // sources + (rank < pages % sources)) * page, tokens)
            yield depth, [range(begin, end)]
            begin = end
        else:
            yield (
                depth,
                [range(number * page, min((number + 1) * page, tokens)) for number in range(rank, pages, sources)],
            )


def by_pair(
    way: Way, layers: list[int], tokens: int, row: int, ranks: int, page: int = 64, *, copies: bool = False
) -> list[list[int]]:
    """Bytes that each source sends to each of ``ranks`` decode ranks, arguments else as in ``by_source``.

    Latent rows under DCP are dealt to the ranks one by one. ``copies``: every rank gets every row, as index keys do
    under DCP, and latent rows without it.
    """
    by_source(way, layers, tokens, row, page)  # for what it refuses
    if ranks < 1:
        raise ValueError(f"{ranks} decode ranks")
    return [
        [
            own * row * sum(len(part) if copies else len(part[(rank - part.start) % ranks :: ranks]) for part in parts)
            for rank in range(ranks)
        ]
        for own, parts in _shares(way, layers, tokens, page)
    ]


def crossing(prompt: int, decode_hit: int, page: int = 64) -> tuple[int, int]:
    """(tokens whose latent rows cross, tokens whose index keys cross) of a request: whole pages.

    The sender's own prefix hit saves computing and no bytes; decode's hit saves latent rows. Index keys are state, and
    are sent whole.
    """
    if prompt < 1 or not 0 <= decode_hit <= prompt or decode_hit % page:
        raise ValueError(f"{prompt} tokens with {decode_hit} of them at decode")
    whole = -(-prompt // page) * page
    return whole - decode_hit, whole


def runs(slots: list[int]) -> int:
    """Contiguous runs in a list of slots: what is contiguous at one end."""
    return sum(1 for before, slot in zip([None, *slots], slots, strict=False) if before is None or slot != before + 1)


def paired_runs(source: list[int], destination: list[int]) -> int:
    """Descriptors that carry these rows: pieces contiguous at both ends."""
    if len(source) != len(destination):
        raise ValueError(f"{len(source)} rows go to {len(destination)} places")
    count = 0
    for place, pair in enumerate(zip(source, destination, strict=True)):
        before = (source[place - 1] + 1, destination[place - 1] + 1) if place else None
        count += pair != before
    return count


@dataclass(frozen=True)
class Packing:
    """A registered buffer of ``buffer`` bytes through which rows of all layers are gathered before they are sent.

    ``items``: bytes of a row in each layer. ``grid``: rows that one launch of the gather kernel may take.
    """

    buffer: int
    items: tuple[int, ...]
    grid: int

    @property
    def row(self) -> int:
        return sum(self.items)

    @property
    def cap(self) -> int:
        """Rows of one slice. Raises ValueError if the buffer does not hold one."""
        rows = min(self.buffer // self.row, self.grid)
        if rows < 1:
            raise ValueError(f"a buffer of {self.buffer} bytes does not hold one row of {self.row}")
        return rows

    def fits(self, rows: int) -> bool:
        """Whether the whole send goes at once, as the stock engine requires."""
        return rows * self.row <= self.buffer and rows <= self.grid

    def slices(self, rows: int) -> list[range]:
        """The slices in the order of sending; one after the other through the same buffer."""
        cap = self.cap
        return [range(begin, min(begin + cap, rows)) for begin in range(0, rows, cap)]


def broadcast_latency(index: float, latent: float, indexer: float) -> float:
    """Visible seconds that a layer split adds to one layer: the index first, the latent while the indexer runs."""
    return index + max(0.0, latent - indexer)
