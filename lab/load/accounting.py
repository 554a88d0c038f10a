"""What a run amounts to: rates in a fixed window, latencies, the backlog verdict, and reasons not to believe it."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lab.load.stream import Failure


@dataclass(frozen=True)
class Sent:
    """One request as the generator saw it. Seconds from the start; ``ended`` is None while it still runs.

    text: a digest of what it brought, so that answers to one prompt can be compared. detail: of the failure. left: the
    client closed the connection on purpose.
    """

    number: int
    due: float
    started: float
    first: float | None
    ended: float | None
    failure: Failure | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    gaps: tuple[float, ...] = ()
    counted: bool = True
    worker: str = ""
    text: str = ""
    detail: str = ""
    left: bool = False

    @property
    def done(self) -> bool:
        return self.ended is not None and self.failure is None and not self.left


@dataclass(frozen=True)
class Clock:
    """Two clocks read at the same moment, in seconds: one that only runs, and the wall's."""

    steady: float
    wall: float


@dataclass(frozen=True)
class Window:
    """Seconds from the start between which requests count, by their end."""

    begin: float
    end: float

    def __post_init__(self) -> None:
        if not 0 <= self.begin < self.end:
            raise ValueError(f"a window from {self.begin} to {self.end} s")

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def holds(self, at: float | None) -> bool:
        return at is not None and self.begin <= at < self.end


@dataclass
class Report:
    """Figures of a run. ``invalid`` names each reason for which its rates say nothing."""

    offered: float
    done: int
    failures: dict[str, int]
    rate: float
    tokens_per_second: float
    tokens_per_card: float
    offered_tokens_per_card: float
    sustained: bool
    growth: float
    latency: dict[str, float]
    invalid: list[str] = field(default_factory=list)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed; NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(-int(-share * len(ordered) // 1) - 1, 0)] if ordered else float("nan")


def outstanding(sent: Sequence[Sent], at: float) -> int:
    """Requests that were due and had not ended."""
    return sum(1 for one in sent if one.due <= at and (one.ended is None or one.ended > at))


def growth(sent: Sequence[Sent], window: Window, points: int = 41) -> float:
    """By how many requests the backlog grew over the window: the median slope of all pairs of points (Theil-Sen)."""
    step = window.seconds / (points - 1)
    levels = [outstanding(sent, window.begin + step * number) for number in range(points)]
    slopes = [(levels[b] - levels[a]) / (step * (b - a)) for a in range(points) for b in range(a + 1, points)]
    return statistics.median(slopes) * window.seconds


def account(
    sent: Sequence[Sent],
    window: Window,
    cards: int,
    clocks: Sequence[Clock] = (),
    late: float = 0.1,
    jump: float = 0.5,
) -> Report:
    """Account for everything that was sent.

    late: seconds by which the generator may miss a request's time. jump: seconds by which two clocks may part.
    """
    if cards < 1:
        raise ValueError(f"{cards} cards")
    due = [one for one in sent if window.holds(one.due)]
    ended = [one for one in sent if one.done and window.holds(one.ended)]
    tokens = sum(one.prompt_tokens + one.tokens for one in ended) / window.seconds
    # What the requests that arrived in the window carry, answered or not: the mean of those whose size is known.
    sizes = [one.prompt_tokens + one.tokens for one in sent if one.done]
    offered = len(due) / window.seconds
    grown = growth(sent, window)
    report = Report(
        offered=offered,
        done=len(ended),
        failures=dict(Counter(one.failure.value for one in sent if one.failure is not None)),
        rate=len(ended) / window.seconds,
        tokens_per_second=tokens,
        tokens_per_card=tokens / cards,
        offered_tokens_per_card=offered * statistics.mean(sizes) / cards if sizes else 0.0,
        # One request, or one in twenty, is what a steady queue wanders by.
        sustained=grown <= max(1.0, 0.05 * len(due)),
        growth=grown,
        latency={},
    )
    firsts = [one.first - one.due for one in ended if one.first is not None]
    gaps = [gap for one in ended for gap in one.gaps]
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
        report.latency[f"first token {name}"] = quantile(firsts, share)
        report.latency[f"between tokens {name}"] = quantile(gaps, share)
        report.latency[f"whole {name}"] = quantile([one.ended - one.due for one in ended if one.ended], share)
    report.invalid += list(_reasons(sent, due, ended, window, clocks, late, jump))
    return report


def _reasons(
    sent: Sequence[Sent],
    due: Sequence[Sent],
    ended: Sequence[Sent],
    window: Window,
    clocks: Sequence[Clock],
    late: float,
    jump: float,
) -> list[str]:
    reasons: list[str] = []
    if not due:
        reasons.append("no request was due in the window")
    if not ended:
        reasons.append("no request ended in the window")
    shortest = min((one.ended - one.started for one in ended if one.ended is not None), default=0.0)
    if shortest > window.seconds:
        reasons.append(f"the window of {window.seconds:g} s is shorter than one request, {shortest:.1f} s")
    missed = quantile([one.started - one.due for one in due], 0.99)
    if due and missed > late:
        reasons.append(f"the generator did not hold its rate: p99 of its delay is {missed:.3f} s, at most {late:g} s")
    parted = [abs((b.wall - a.wall) - (b.steady - a.steady)) for a, b in itertools.pairwise(clocks)]
    if parted and max(parted) > jump:
        reasons.append(f"clock jump: the wall clock moved {max(parted):.1f} s against the steady one")
    if any(one.done and not one.counted for one in sent):
        reasons.append("the server does not count tokens by chunk, so lost and doubled chunks are not seen")
    return reasons


@dataclass(frozen=True)
class Difference:
    """A paired difference, B - A, with the 95 % interval of its mean."""

    name: str
    a: float
    b: float
    mean: float
    low: float
    high: float
    n: int


def paired(name: str, a: Sequence[float], b: Sequence[float], seed: int = 17) -> Difference:
    """Compare pairs by resampling the pairs. Raises ValueError without at least two pairs."""
    if len(a) != len(b) or len(a) < 2:
        raise ValueError(f"{name}: {len(a)} and {len(b)} values are no two pairs")
    differences = [right - left for left, right in zip(a, b, strict=True)]
    chance = random.Random(seed)
    means = sorted(statistics.mean(chance.choices(differences, k=len(differences))) for _ in range(2000))
    return Difference(
        name, statistics.mean(a), statistics.mean(b), statistics.mean(differences), means[50], means[1949], len(a)
    )


def baab(pairs: int) -> str:
    """The order of arms for that many pairs: each quartet is B A A B, so that a drift falls on both arms."""
    if pairs < 1:
        raise ValueError(f"{pairs} pairs")
    return ("BAAB" * ((pairs + 1) // 2))[: 2 * pairs]
