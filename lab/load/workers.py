"""What the engines themselves count, read from their metrics before, during and after a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

PROMPT = "sglang:prompt_tokens_total"
CACHED = "sglang:cached_tokens_total"
MADE = "sglang:generation_tokens_total"
REQUESTS = "sglang:num_requests_total"
RUNNING = "sglang:num_running_reqs"
QUEUES = (
    "sglang:num_queue_reqs",
    "sglang:num_prefill_bootstrap_queue_reqs",
    "sglang:num_prefill_inflight_queue_reqs",
    "sglang:num_decode_prealloc_queue_reqs",
    "sglang:num_decode_transfer_queue_reqs",
)


class NoMetrics(Exception):
    """A worker whose metrics say nothing of what is accounted."""


@dataclass(frozen=True)
class Reading:
    """One look at one worker. Counters since its start; queues are sums of all that it has."""

    requests: float
    prompt: float
    cached: float
    made: float
    running: float
    queued: float


def read(text: str) -> Reading:
    """Sum a metrics page over ranks and labels.

    Raises NoMetrics if the counters of requests or tokens are missing, or the page is no metrics page.
    """
    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    except ValueError as error:
        raise NoMetrics(f"no metrics page: {error}") from error
    missing = [name for name in (PROMPT, REQUESTS) if name not in sums]
    if missing:
        raise NoMetrics(f"no {', '.join(missing)}; start the engine with --enable-metrics")
    return Reading(
        sums[REQUESTS],
        sums[PROMPT],
        sums.get(CACHED, 0.0),
        sums.get(MADE, 0.0),
        sums.get(RUNNING, 0.0),
        sum(sums.get(name, 0.0) for name in QUEUES),
    )


@dataclass(frozen=True)
class Share:
    """What one worker did in a run, and how its queue ended."""

    worker: str
    requests: int
    prompt: int
    cached: int
    computed: int
    made: int
    peak_queued: int
    left: int


def share(worker: str, readings: Sequence[Reading]) -> Share:
    """The difference between the last and the first reading. Raises NoMetrics without two, or after a restart."""
    if len(readings) < 2:
        raise NoMetrics(f"{worker}: {len(readings)} readings are no difference")
    first, last = readings[0], readings[-1]
    if last.requests < first.requests or last.prompt < first.prompt:
        raise NoMetrics(f"{worker}: its counters went back, so it was restarted")
    prompt, cached = last.prompt - first.prompt, last.cached - first.cached
    return Share(
        worker,
        round(last.requests - first.requests),
        round(prompt),
        round(cached),
        round(prompt - cached),
        round(last.made - first.made),
        round(max(reading.queued for reading in readings)),
        round(last.running + last.queued),
    )


def mismatches(shares: Sequence[Share], asked: int, expected: Mapping[str, int] | None = None) -> list[str]:
    """Where the engines' accounts and the generator's differ. ``expected``: requests of a worker, where known."""
    wrong = []
    total = sum(one.requests for one in shares)
    if total != asked:
        wrong.append(f"miscounted: the workers had {total} requests, the generator sent {asked}")
    for one in shares:
        if expected is not None and one.requests != expected.get(one.worker, 0):
            wrong.append(
                f"miscounted: {one.worker} had {one.requests} requests, {expected.get(one.worker, 0)} were sent"
            )
        if one.left:
            wrong.append(f"{one.worker} still holds {one.left} requests")
    return wrong
