"""Score rows that break selections: each class is one that a kernel somewhere got wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.device.tree import REPOSITORY

Rows = NDArray[np.float32]
Rng = np.random.Generator
_KINDS: dict[str, Callable[[Rng, int, int], Any]] = {}


def _kind(make: Callable[[Rng, int, int], Any]) -> Callable[[Rng, int, int], Any]:
    _KINDS[make.__name__.strip("_")] = make
    return make


def _normal(rng: Rng, rows: int, width: int) -> Rows:
    return rng.standard_normal((rows, width), np.float32)


@_kind
def _randn(rng: Rng, rows: int, width: int) -> Rows:
    return _normal(rng, rows, width)


def _plateau(share: float) -> Callable[[Rng, int, int], Rows]:
    def make(rng: Rng, rows: int, width: int) -> Rows:
        return np.where(rng.random((rows, width), np.float32) < share, np.float32(0), np.abs(_normal(rng, rows, width)))

    return make


for _share in (0.5, 0.9, 0.99, 0.999):
    _KINDS[f"zeros_{_share}"] = _plateau(_share)


@_kind
def _zeros_of_both_signs(rng: Rng, rows: int, width: int) -> Rows:
    made = _plateau(0.99)(rng, rows, width)
    return np.where((made == 0) & (rng.random((rows, width)) < 0.5), np.float32(-0.0), made)


@_kind
def _all_equal(rng: Rng, rows: int, width: int) -> Rows:
    return np.full((rows, width), 3.25, np.float32)


@_kind
def _two_values(rng: Rng, rows: int, width: int) -> Rows:
    made = np.zeros((rows, width), np.float32)
    for row in range(rows):  # k-1, k, k+1 and other counts of the larger value
        count = min(width, (2047, 2048, 2049, 1, 500, 6000)[row % 6])
        made[row, rng.permutation(width)[:count]] = 1
    return made


@_kind
def _ties_at_the_end(rng: Rng, rows: int, width: int) -> Rows:
    made = np.zeros((rows, width), np.float32)
    made[:, -3000:] = 1
    return made


@_kind
def _ramp_up_by_ulps(rng: Rng, rows: int, width: int) -> Rows:
    return np.broadcast_to((np.arange(width, dtype=np.uint32) + 0x3F800000).view(np.float32), (rows, width)).copy()


@_kind
def _ramp_down_by_ulps(rng: Rng, rows: int, width: int) -> Rows:
    return np.ascontiguousarray(_ramp_up_by_ulps(rng, rows, width)[:, ::-1])


@_kind
def _ramp_of_1e_13(rng: Rng, rows: int, width: int) -> Rows:
    made = np.arange(width, dtype=np.float32) * np.float32(1e-13)
    return np.stack([rng.permutation(made) for _ in range(rows)]) if rows < 40 else np.tile(made, (rows, 1))


@_kind
def _last_ten_bits(rng: Rng, rows: int, width: int) -> Rows:
    return (rng.integers(0, 1024, (rows, width), np.uint32) + 0x3F900000).astype(np.uint32).view(np.float32)


@_kind
def _hundred_plus_randn(rng: Rng, rows: int, width: int) -> Rows:
    return _normal(rng, rows, width) + np.float32(100)


@_kind
def _denormals(rng: Rng, rows: int, width: int) -> Rows:
    return rng.integers(0, 1 << 23, (rows, width), np.uint32).view(np.float32)


@_kind
def _huge(rng: Rng, rows: int, width: int) -> Rows:
    return _normal(rng, rows, width) * np.float32(1e37)


@_kind
def _any_bits(rng: Rng, rows: int, width: int) -> Rows:
    return rng.integers(0, 1 << 32, (rows, width), np.uint32).view(np.float32)


def _special(value: float, other: float) -> Callable[[Rng, int, int], Rows]:
    def make(rng: Rng, rows: int, width: int) -> Rows:
        made = np.full((rows, width), other, np.float32)
        made += _normal(rng, rows, width) if np.isfinite(other) else np.float32(0)
        for row in range(rows):
            count = min(width, (2047, 2048, 2049, 0, 1, width, width - 2048, width - 3)[row % 8])
            made[row, rng.permutation(width)[: max(count, 0)]] = value
        return made

    return make


_KINDS["plus_infinity"] = _special(np.inf, 0)
_KINDS["minus_infinity"] = _special(-np.inf, 0)
_KINDS["infinities"] = _special(np.inf, -np.inf)


@_kind
def _nan(rng: Rng, rows: int, width: int) -> Rows:
    made = _special(np.nan, 0)(rng, rows, width)
    payloads = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    return np.where(np.isnan(made), payloads[rng.integers(0, 4, (rows, width))], made)


@_kind
def _nan_and_minus_infinity(rng: Rng, rows: int, width: int) -> Rows:
    return _special(np.nan, -np.inf)(rng, rows, width)


@_kind
def _bf16_quantised(rng: Rng, rows: int, width: int) -> Rows:
    return (_normal(rng, rows, width).view(np.uint32) & 0xFFFF0000).view(np.float32)


@_kind
def _organ_pipe(rng: Rng, rows: int, width: int) -> Rows:
    return np.broadcast_to(-np.abs(np.arange(width, dtype=np.float32) - width / 2), (rows, width)).copy()


@_kind
def _winners_in_one_piece(rng: Rng, rows: int, width: int) -> Rows:
    made = _normal(rng, rows, width)
    for row in range(rows):
        at = int(rng.integers(0, max(1, width - 2500)))
        made[row, at : at + 2500] += 50
    return made


@_kind
def _periodic(rng: Rng, rows: int, width: int) -> Rows:
    made = _normal(rng, rows, width)
    made[:, :: max(1, width // 2048)] += 20
    return made


@_kind
def _smooth(rng: Rng, rows: int, width: int) -> Rows:
    made = np.sin(np.arange(width, dtype=np.float32)[None, :] / rng.uniform(50, 900, (rows, 1)).astype(np.float32))
    return made.astype(np.float32)


KINDS = tuple(_KINDS)


# Seeds that this process drew from: what a result names.
DRAWN: set[int] = set()


def random(seed: int, *more: int) -> Rng:
    """A generator whose seed is kept."""
    DRAWN.add(seed)
    return np.random.default_rng([seed, *more] if more else seed)


def make(kind: str, rows: int, width: int, seed: int) -> Rows:
    """Float32 scores ``[rows, width]`` of one class; equal arguments give equal bytes."""
    rng = random(seed, rows, width, KINDS.index(kind))
    made: Rows = np.ascontiguousarray(_KINDS[kind](rng, rows, width), dtype=np.float32)
    return made


def of_the_kernel() -> dict[str, str]:
    """What a result says of the source that was compiled, which is no module."""
    return {"source_sha256": hashlib.sha256((REPOSITORY / "sources/kernels/exact_topk.cu").read_bytes()).hexdigest()}
