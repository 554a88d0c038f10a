"""A discrete-event model of prefill workers: pools, shared prefixes, arrivals, and the ranks that send to decode.

Each worker admits a request once its tokens fit beside what is locked (unlocked prefixes are evicted, least recently
used first), computes what its cache does not hold, one request at a time, and keeps the tokens locked until the last
source has sent its part. It is a *model*: times follow from two given rates; nothing of them was measured.
"""

from __future__ import annotations

import random
import statistics
from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass, field
from enum import Enum

import simpy

from lab.models.capacity import Keeping, owned
from lab.models.transfer import Way, by_source


class Design(Enum):
    """A way of keeping and a way of sending; the four that the reviews asked to compare."""

    LAYER_SPLIT = "layer split, owners send"
    CP0 = "full copies, rank 0 sends"
    ROTATED = "full copies, one rank a request"
    PAGE_SHARD = "page shards, owners send"

    @property
    def keeping(self) -> Keeping:
        return {Design.LAYER_SPLIT: Keeping.LAYER_SPLIT, Design.PAGE_SHARD: Keeping.PAGE_SHARD}.get(self, Keeping.FULL)


@dataclass(frozen=True)
class Load:
    """What arrives. Lengths in tokens, ``rate`` in requests per second for all workers together.

    ``prefixes``: independent shared prefixes; ``cold``: share of requests whose prefix nobody shares; ``burst``:
    requests that arrive at the same moment; ``decode_hit``: prefix tokens that decode holds already.
    """

    requests: int = 400
    rate: float = 3.4
    prefix: int = 73_728
    fresh: int = 8_192
    prefixes: int = 4
    cold: float = 0.0
    burst: int = 1
    decode_hit: int = 0

    def __post_init__(self) -> None:
        if min(self.requests, self.prefixes, self.burst, self.fresh) < 1 or self.rate <= 0:
            raise ValueError("a load has requests, prefixes, bursts, fresh tokens and a rate above zero")
        if not 0 <= self.cold <= 1 or not 0 <= self.decode_hit <= self.prefix:
            raise ValueError(f"a cold share of {self.cold}, {self.decode_hit} tokens at decode")


@dataclass(frozen=True)
class Fleet:
    """The workers. ``pool``: distinct tokens of one; ``compute``: tokens/s of one; ``link``: bytes/s of one source.

    ``layers`` and ``row``: the model's layers and bytes of a token in one of them; ``slow``: factor on every send.
    """

    design: Design
    pool: int
    workers: int = 4
    cp: int = 4
    layers: int = 78
    row: int = 788
    compute: float = 30_000.0
    link: float = 10e9
    slow: float = 1.0

    def __post_init__(self) -> None:
        if min(self.pool, self.workers, self.cp, self.layers, self.row) < 1:
            raise ValueError("a fleet has positive sizes")
        if min(self.compute, self.link) <= 0 or self.slow < 1:
            raise ValueError("rates are above zero, and slow is a factor of 1 or more")


@dataclass
class Outcome:
    """What one run gave. Times in seconds, lengths in tokens."""

    finished: int = 0
    hits: int = 0
    evictions: int = 0
    latencies: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    peak_locked: int = 0
    peak_inside: int = 0
    sent: list[int] = field(default_factory=list)
    ended: float = 0.0

    @property
    def hit_share(self) -> float:
        return self.hits / max(self.finished, 1)

    @property
    def hot_spot(self) -> float:
        """Bytes of the busiest source over the mean of all."""
        return max(self.sent) / statistics.mean(self.sent) if any(self.sent) else 1.0

    def latency(self, quantile: float) -> float:
        """Seconds from arrival to the last byte sent."""
        if not self.latencies:
            return 0.0
        return sorted(self.latencies)[min(int(quantile * len(self.latencies)), len(self.latencies) - 1)]


class Pool:
    """One worker's tokens: prefixes by name with how many requests hold them, and fresh parts."""

    def __init__(self, environment: simpy.Environment, capacity: int) -> None:
        self.environment = environment
        self.capacity = capacity
        self.held: OrderedDict[int, list[int]] = OrderedDict()  # prefix -> [tokens, holders], oldest first
        self.fresh = 0
        self.inside = 0
        self.evictions = 0
        self.changed = environment.event()

    @property
    def used(self) -> int:
        return self.fresh + sum(size for size, _ in self.held.values())

    @property
    def locked(self) -> int:
        return self.fresh + sum(size for size, holders in self.held.values() if holders)

    def admit(self, name: int, prefix: int, fresh: int) -> bool | None:
        """Take the tokens: True for a prefix that was there, False for one that was not, None if they do not fit."""
        there = name in self.held
        locked = self.locked + (0 if there and self.held[name][1] else prefix) + fresh
        if locked > self.capacity:
            return None
        if not there:
            self.held[name] = [prefix, 0]
        self.held[name][1] += 1
        self.held.move_to_end(name)
        self.fresh += fresh
        self.inside += 1
        while self.used > self.capacity:
            victim = next(other for other, (_, holders) in self.held.items() if not holders)
            del self.held[victim]
            self.evictions += 1
        return there

    def release(self, name: int, fresh: int) -> None:
        self.held[name][1] -= 1
        self.fresh -= fresh
        self.inside -= 1
        changed, self.changed = self.changed, self.environment.event()
        changed.succeed()


Steps = Generator[simpy.Event, object, None]


class Run:
    """One simulation."""

    def __init__(self, fleet: Fleet, load: Load, seed: int) -> None:
        self.fleet, self.load = fleet, load
        self.chance = random.Random(seed)
        self.environment = simpy.Environment()
        self.pools = [Pool(self.environment, fleet.pool) for _ in range(fleet.workers)]
        self.compute = [simpy.Resource(self.environment) for _ in range(fleet.workers)]
        self.sources = [[simpy.Resource(self.environment) for _ in range(fleet.cp)] for _ in range(fleet.workers)]
        self.queues = [simpy.Resource(self.environment) for _ in range(fleet.workers)]
        self.outcome = Outcome(sent=[0] * (fleet.workers * fleet.cp))

    def parts(self, number: int, tokens: int) -> list[int]:
        """Bytes of each source for request ``number``."""
        fleet = self.fleet
        layers = owned(fleet.layers, fleet.cp)
        if fleet.design is Design.LAYER_SPLIT:
            return by_source(Way.LAYER_OWNER, layers, tokens, fleet.row)
        if fleet.design is Design.PAGE_SHARD:
            return by_source(Way.PAGE_OWNER, layers, tokens, fleet.row)
        whole = by_source(Way.CP0, layers, tokens, fleet.row)
        if fleet.design is Design.ROTATED:
            turn = number // fleet.workers % fleet.cp
            whole = whole[-turn:] + whole[:-turn]
        return whole

    def send(self, worker: int, source: int, size: int) -> Steps:
        with self.sources[worker][source].request() as turn:
            yield turn
            yield self.environment.timeout(size / self.fleet.link * self.fleet.slow)
        self.outcome.sent[worker * self.fleet.cp + source] += size

    def request(self, number: int, name: int, worker: int) -> Steps:
        load, pool, outcome = self.load, self.pools[worker], self.outcome
        arrived = self.environment.now
        # First come, first served: a request that does not fit blocks those behind it, as the scheduler's queue does.
        with self.queues[worker].request() as first:
            yield first
            there = pool.admit(name, load.prefix, load.fresh)
            while there is None:
                yield pool.changed
                there = pool.admit(name, load.prefix, load.fresh)
        outcome.waits.append(self.environment.now - arrived)
        outcome.hits += there
        outcome.peak_locked = max(outcome.peak_locked, pool.locked)
        outcome.peak_inside = max(outcome.peak_inside, pool.inside)
        with self.compute[worker].request() as turn:
            yield turn
            yield self.environment.timeout((load.fresh + (0 if there else load.prefix)) / self.fleet.compute)
        parts = self.parts(number, load.prefix - load.decode_hit + load.fresh)
        sends = [self.environment.process(self.send(worker, source, size)) for source, size in enumerate(parts) if size]
        yield self.environment.all_of(sends)
        pool.release(name, load.fresh)
        outcome.finished += 1
        outcome.latencies.append(self.environment.now - arrived)

    def arrivals(self) -> Steps:
        load, number = self.load, 0
        while number < load.requests:
            yield self.environment.timeout(self.chance.expovariate(load.rate / load.burst))
            for _ in range(min(load.burst, load.requests - number)):
                cold = self.chance.random() < load.cold
                # A cold prefix has a name of its own; a shared one always goes to the same worker, as the router's tree
                # would send it.
                name = load.prefixes + number if cold else self.chance.randrange(load.prefixes)
                worker = (number if cold else name) % self.fleet.workers
                self.environment.process(self.request(number, name, worker))
                number += 1

    def run(self) -> Outcome:
        """Raises ValueError if no request would ever fit."""
        if self.load.prefix + self.load.fresh > self.fleet.pool:
            raise ValueError(f"{self.load.prefix + self.load.fresh} tokens never fit {self.fleet.pool}")
        self.environment.process(self.arrivals())
        self.environment.run()
        self.outcome.ended = self.environment.now
        self.outcome.evictions = sum(pool.evictions for pool in self.pools)
        return self.outcome


def simulate(fleet: Fleet, load: Load, seed: int = 17) -> Outcome:
    """Run until every request is done; the same seed gives the same outcome."""
    return Run(fleet, load, seed).run()
