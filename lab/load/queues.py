"""How a queue grows over a window, and by how much one may that only wanders."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence

from lab.load.accounting import Window

# As many as are soon compared in pairs.
MOST = 200


def allowed(levels: Iterable[float]) -> float:
    """By how much a queue of these lengths may grow over a window and still be one that wanders.

    Of independent arrivals a steady system holds its mean, give or take its root. Three roots is what the slope over a
    window keeps within; a queue that nothing empties leaves them behind.
    """
    return max(1.0, 3.0 * math.sqrt(statistics.median(levels)))


def grown(points: Sequence[tuple[float, float]], window: Window) -> float:
    """By how much the second value grew over the window: the median slope of all pairs of points (Theil-Sen)."""
    few = points[:: len(points) // MOST + 1]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(few, 2) if b[0] > a[0]]
    return statistics.median(slopes) * window.seconds if slopes else 0.0
