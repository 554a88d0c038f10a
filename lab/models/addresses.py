"""The address chain of KV sharded by page: token -> prefill owner and its slot -> decode owner and its slot.

Nothing in the pinned releases keeps pages this way; it is the reference for a design, as an executable mapping.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A slot in one rank's own pool."""

    rank: int
    slot: int


@dataclass(frozen=True)
class Shards:
    """Global pages dealt to ``owners`` prefill ranks in turn."""

    owners: int
    page: int = 64

    def __post_init__(self) -> None:
        if self.owners < 1 or self.page < 1:
            raise ValueError(f"{self.owners} owners of pages of {self.page}")

    def place(self, location: int) -> Place:
        """Where a global slot is kept."""
        if location < 0:
            raise ValueError(f"slot {location}")
        page, offset = divmod(location, self.page)
        return Place(page % self.owners, page // self.owners * self.page + offset)

    def location(self, place: Place) -> int:
        """The inverse."""
        if not 0 <= place.rank < self.owners or place.slot < 0:
            raise ValueError(f"{place} is in no pool")
        page, offset = divmod(place.slot, self.page)
        return (page * self.owners + place.rank) * self.page + offset


@dataclass(frozen=True)
class Stripes:
    """Virtual slots of a decode group dealt to its ranks one by one."""

    ranks: int

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"{self.ranks} ranks")

    def place(self, slot: int) -> Place:
        if slot < 0:
            raise ValueError(f"slot {slot}")
        return Place(slot % self.ranks, slot // self.ranks)

    def location(self, place: Place) -> int:
        if not 0 <= place.rank < self.ranks or place.slot < 0:
            raise ValueError(f"{place} is in no pool")
        return place.slot * self.ranks + place.rank


@dataclass(frozen=True)
class Move:
    """One row's way."""

    token: int
    source: Place
    destination: Place


@dataclass(frozen=True)
class Chain:
    """Both ends of one request: ``sources[i]`` is the global prefill slot of token i, ``destinations[i]`` its virtual
    decode slot. Raises ValueError where a slot is given out twice or the lengths differ."""

    shards: Shards
    stripes: Stripes
    sources: tuple[int, ...]
    destinations: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.sources) != len(self.destinations):
            raise ValueError(f"{len(self.sources)} tokens go to {len(self.destinations)} slots")
        for name, slots in (("source", self.sources), ("destination", self.destinations)):
            if len(set(slots)) != len(slots):
                raise ValueError(f"a {name} slot is given out twice")

    def moves(self) -> Iterator[Move]:
        for token, (source, destination) in enumerate(zip(self.sources, self.destinations, strict=True)):
            yield Move(token, self.shards.place(source), self.stripes.place(destination))

    def between(self, owner: int, rank: int) -> list[Move]:
        """What one prefill owner sends to one decode rank."""
        return [move for move in self.moves() if move.source.rank == owner and move.destination.rank == rank]

    def token(self, destination: Place) -> int:
        """The way back from a decode rank's slot. Raises KeyError if the request has none there."""
        slot = self.stripes.location(destination)
        try:
            return self.destinations.index(slot)
        except ValueError:
            raise KeyError(f"{destination} holds no token of this request") from None
