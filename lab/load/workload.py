"""What is sent and when: independent shared prefixes, suffixes of their own, and a fixed or Poisson rate."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

LETTERS = string.ascii_letters + string.digits


class Arrivals(Enum):
    FIXED = "fixed"
    POISSON = "poisson"


class Prompt(Enum):
    """How a prompt is written: token ids (exact on every model), or text, which every router takes."""

    IDS = "ids"
    TEXT = "text"


@dataclass(frozen=True)
class Workload:
    """Lengths in tokens (with ``Prompt.TEXT``: in characters). The default is the deployment's acceptance.

    rate: requests per second, whatever is answered (open loop). seconds: for how long they arrive.
    vocabulary: token ids are drawn from below it, and from 1000 up, where no special ones are.
    """

    rate: float = 3.40
    seconds: float = 600.0
    prefix: int = 73_728
    suffix: int = 8_192
    new: int = 600
    prefixes: int = 4
    arrivals: Arrivals = Arrivals.FIXED
    prompt: Prompt = Prompt.IDS
    vocabulary: int = 100_000
    seed: int = 17

    def __post_init__(self) -> None:
        if not (0 < self.rate < math.inf and 0 < self.seconds < math.inf):
            raise ValueError(f"a rate of {self.rate} requests per second for {self.seconds} s is no load")
        if min(self.prefixes, self.suffix, self.new) < 1 or self.prefix < 0:
            raise ValueError("a workload has at least one prefix, one token of suffix and one new token")
        if self.vocabulary <= 1000:
            raise ValueError(f"a vocabulary of {self.vocabulary} has no ids from 1000 up")

    def smaller(self, factor: int) -> Workload:
        """The same shape at 1/factor of every length."""
        if factor < 1:
            raise ValueError(f"a factor of {factor}")
        sizes = {name: max(getattr(self, name) // factor, 1) for name in ("suffix", "new")}
        return Workload(**{**vars(self), **sizes, "prefix": self.prefix // factor})


@dataclass(frozen=True)
class Request:
    """One request: ``at`` seconds after the start; ``prefix`` is the number of its shared part.

    leave: the client closes the connection after so many chunks of text; 0 stays to the end.
    """

    number: int
    at: float
    prefix: int
    prompt: list[int] | str
    leave: int = 0


def _words(workload: Workload, chance: random.Random, count: int) -> list[int] | str:
    if workload.prompt is Prompt.TEXT:
        return "".join(chance.choices(LETTERS, k=count))
    return [chance.randrange(1000, workload.vocabulary) for _ in range(count)]


def times(workload: Workload) -> list[float]:
    """Arrival times, seconds from the start."""
    if workload.arrivals is Arrivals.FIXED:
        return [number / workload.rate for number in range(round(workload.rate * workload.seconds))]
    chance = random.Random(f"{workload.seed} arrivals")
    at, made = 0.0, list[float]()
    while (at := at + chance.expovariate(workload.rate)) < workload.seconds:
        made.append(at)
    return made


def requests(workload: Workload) -> Iterator[Request]:
    """Everything that will be sent, one after another: all prompts together are gigabytes.

    The same seed gives the same requests. Prefixes take turns.
    """
    heads = [
        _words(workload, random.Random(f"{workload.seed} prefix {number}"), workload.prefix)
        for number in range(workload.prefixes)
    ]
    for number, at in enumerate(times(workload)):
        tail = _words(workload, random.Random(f"{workload.seed} suffix {number}"), workload.suffix)
        turn = number % workload.prefixes
        yield Request(number, at, turn, heads[turn] + tail)  # type: ignore[operator]
