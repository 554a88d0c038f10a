"""How many tokens a pool of a given size holds: latent rows and index keys, whole, split by layer, by page or by DCP.

Bytes of a row are those of the engine's pools: a latent of 512 numbers and 64 rotary ones, in bf16 or in the 656-byte
fp8 form (512 + 4 x 4 scales + 64 x 2 rotary); an index key of 128 fp8 numbers and one 4-byte scale. A pool has one page
of slots more than it has tokens. Source: the pools of both pinned releases, compared with them by test.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

LATENT, ROTARY, INDEX_HEAD = 512, 64, 128
PAGE = 64


class Kv(Enum):
    """How a latent row is stored: its bytes."""

    FP8 = LATENT + LATENT // 128 * 4 + ROTARY * 2
    BF16 = (LATENT + ROTARY) * 2


INDEX_ROW = INDEX_HEAD + 4


class Keeping(Enum):
    """Who keeps what of one request's KV among the ranks of a group."""

    FULL = "full copy"  # every rank keeps all layers of all tokens
    LAYER_SPLIT = "layer split"  # every rank keeps some layers of all tokens, and scratch for one of the others'
    PAGE_SHARD = "page shard"  # every rank keeps all layers of some pages, and scratch for one layer of one request
    DCP = "decode context parallel"  # latent rows striped over the ranks, index keys on every rank


@dataclass(frozen=True)
class Model:
    """A DSA model's storage. ``layers``: attention layers, those of a draft not counted; ``indexed``: those with an
    index of their own."""

    layers: int = 78
    kv: Kv = Kv.FP8
    indexed: int | None = None

    def __post_init__(self) -> None:
        if self.layers < 1 or not 0 <= self.indexes <= self.layers:
            raise ValueError(f"{self.layers} layers with {self.indexes} indexes are no model")

    @property
    def indexes(self) -> int:
        return self.layers if self.indexed is None else self.indexed

    @property
    def latent(self) -> int:
        """Bytes of one token's latent rows in all layers."""
        return self.layers * self.kv.value

    @property
    def index(self) -> int:
        """Bytes of one token's index keys in all layers."""
        return self.indexes * INDEX_ROW

    @property
    def token(self) -> int:
        return self.latent + self.index


def owned(layers: int, ranks: int) -> list[int]:
    """Layers of each rank under a layer split: as even as can be, the first ranks one more."""
    if layers < 1 or ranks < 1:
        raise ValueError(f"{layers} layers have no {ranks} owners")
    return [layers // ranks + (rank < layers % ranks) for rank in range(ranks)]


def pool(model: Model, tokens: int, layers: int | None = None, page: int = PAGE) -> int:
    """Bytes of a pool of ``tokens`` tokens on a rank that keeps ``layers`` (default: all) layers."""
    if tokens < 0 or tokens % page:
        raise ValueError(f"{tokens} tokens are no whole number of pages of {page}")
    share = model.layers if layers is None else layers
    if not 0 <= share <= model.layers:
        raise ValueError(f"{share} of {model.layers} layers")
    return (tokens + page) * (share * model.kv.value + min(share, model.indexes) * INDEX_ROW)


def scratch(model: Model, tokens: int, page: int = PAGE) -> int:
    """Bytes into which a rank takes one layer of ``tokens`` tokens from others.

    Under a layer split the tokens are those of the whole pool, under page shards those of one request.
    """
    return (tokens + page) * (model.kv.value + INDEX_ROW)


@dataclass(frozen=True)
class Reserve:
    """Bytes of a rank's budget that hold no tokens, and do not grow with them: draft, pack buffer, workspace."""

    draft: int = 0
    pack: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        return self.draft + self.pack + self.workspace


@dataclass(frozen=True)
class Budget:
    """Bytes that one rank has for KV, and what of it is reserved."""

    rank: int
    reserve: Reserve = field(default_factory=Reserve)

    @property
    def free(self) -> int:
        left = self.rank - self.reserve.total
        if left < 0:
            raise ValueError(f"{self.reserve.total} bytes are reserved of {self.rank}")
        return left


def tokens(model: Model, keeping: Keeping, ranks: int, budget: Budget, page: int = PAGE, *, gathered: int = 0) -> int:
    """Distinct tokens that a group of ``ranks`` holds, whole pages; copies on several ranks count once.

    ``gathered``: tokens of the longest request. Under page shards each rank gathers all of its pages, layer by layer,
    into scratch of one layer, so that many ranks hold less than so many times the tokens.
    """
    if ranks < 1 or gathered < 0:
        raise ValueError(f"{ranks} ranks, {gathered} tokens to gather")
    free = budget.free
    if keeping is Keeping.FULL:
        row, times = model.token, 1
    elif keeping is Keeping.LAYER_SPLIT:
        # The rank with the most layers is full first. The scratch for another owner's layer is as long as the pool.
        share = max(owned(model.layers, ranks))
        row, times = share * model.kv.value + min(share, model.indexes) * INDEX_ROW, 1
        row += scratch(model, 1, 0) if ranks > 1 else 0
    elif keeping is Keeping.PAGE_SHARD:
        row, times = model.token, ranks
        free -= scratch(model, gathered, page) if ranks > 1 and gathered else 0
    else:
        # A slot of each rank holds every ranks-th latent row, and all index keys: ranks tokens share one latent slot.
        row, times = model.latent + ranks * model.index, ranks
    return max(free // (row * page) - 1, 0) * page * times


def gain(model: Model, keeping: Keeping, ranks: int) -> float:
    """Tokens for each token of a full copy, the reserve and the extra page left out."""
    plain = 1 << 50
    return tokens(model, keeping, ranks, Budget(plain)) / tokens(model, Keeping.FULL, ranks, Budget(plain))


def fits(capacity: int, *lengths: int) -> bool:
    """Whether sequences of these lengths, each on its own, fit together. A shared prefix is named once."""
    if capacity < 0 or min(lengths, default=0) < 0:
        raise ValueError("a length is not negative")
    return sum(lengths) <= capacity
