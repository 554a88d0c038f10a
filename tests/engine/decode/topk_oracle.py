"""What the exact top-k must return, by sorting: numpy alone, nothing shared with the kernel.

Two formulations that are compared with each other, and a third for short rows in plain Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def keys(row: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Give unsigned integers in the order of float32 ``row``: -0.0 as 0.0, every NaN as 0."""
    bits = np.where(row == 0, np.uint32(0), row.view(np.uint32))
    ordered = np.where(bits >> 31 != 0, ~bits, bits | np.uint32(0x80000000))
    return np.where(np.isnan(row), np.uint32(0), ordered).astype(np.uint32)


def window(row: NDArray[np.float32], length: int, start: int) -> NDArray[np.float32]:
    """Cut the columns that count: ``length`` from ``start``, as far as there are any."""
    if start < 0 or start > row.size:
        return row[:0]
    return row[start : start + max(length, 0)]


def by_sort(row: NDArray[np.float32], length: int, k: int, start: int = 0) -> Ints:
    """The chosen columns, relative to ``start``, ascending: a full stable sort by key, then column."""
    cut = window(row, length, start)
    order = np.lexsort((np.arange(cut.size), ~keys(cut)))
    return np.sort(order[:k]).astype(np.int64)


def by_partition(row: NDArray[np.float32], length: int, k: int, start: int = 0) -> Ints:
    """The same from the k-th key: all above it, then the first ones equal to it."""
    cut = window(row, length, start)
    m = min(cut.size, k)
    if m == 0:
        return np.empty(0, np.int64)
    key = keys(cut)
    threshold = np.partition(key, cut.size - m)[cut.size - m]
    above = np.flatnonzero(key > threshold)
    equal = np.flatnonzero(key == threshold)[: m - above.size]
    return np.sort(np.concatenate([above, equal])).astype(np.int64)


def by_hand(row: Sequence[float], k: int) -> list[int]:
    """The same for a whole short row, one comparison at a time: repeatedly the best column that is left."""

    def better(a: float, b: float) -> bool:
        return (isnan(b) and not isnan(a)) or a > b

    left = list(range(len(row)))
    taken: list[int] = []
    while left and len(taken) < k:
        best = left[0]
        for column in left[1:]:
            if better(row[column], row[best]):
                best = column
        left.remove(best)
        taken.append(best)
    return sorted(taken)


def padded(chosen: Ints, k: int, place: Callable[[Ints], Ints] | None = None) -> NDArray[np.int32]:
    """An output row: ``chosen`` through ``place``, then -1 up to ``k``."""
    out = np.full(k, -1, np.int32)
    out[: chosen.size] = chosen if place is None else place(chosen)
    return out


def paged(table_row: NDArray[np.int32] | None, page_size: int) -> Callable[[Ints], Ints]:
    """The map from a column to a slot; -1 where the table row (or the table) has no such page."""

    def place(columns: Ints) -> Ints:
        slots = [-1] * columns.size
        for i, column in enumerate(columns.tolist()):
            page, within = divmod(column, page_size)
            if table_row is not None and page < table_row.size:
                slots[i] = int(table_row[page]) * page_size + within
        return np.array(slots, np.int64)

    return place


def expected(
    scores: NDArray[np.float32], lengths: Sequence[int], k: int, starts: Sequence[int] | None = None
) -> NDArray[np.int32]:
    """Raw output for every row of ``scores`` [rows, width]."""
    begin: Any = [0] * len(lengths) if starts is None else starts
    out = np.empty((len(lengths), k), np.int32)
    for at, (row, length, start) in enumerate(zip(scores, lengths, begin, strict=True)):
        out[at] = padded(by_partition(row, length, k, start), k)
    return out
