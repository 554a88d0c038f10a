"""What the engines themselves count, read from their metrics before, during and after a run."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from lab.load.accounting import Sent, Window
from lab.load.queues import allowed, grown

OURS = "sglang:"
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
    """One look at one worker, ``at`` seconds into the run.

    Counters since its start; queues are sums of all that it has.
    """

    requests: float
    prompt: float
    cached: float
    made: float
    running: float
    queued: float
    at: float = 0.0


def read(text: str, at: float = 0.0) -> Reading:
    """Sum a metrics page over ranks and labels.

    Raises NoMetrics if it tells nothing of the engine, or a counter is no number, or it is no metrics page.
    """
    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    except (ValueError, LookupError) as error:
        raise NoMetrics(f"no metrics page: {error!r}") from error
    if not any(name.startswith(OURS) for name in sums):
        raise NoMetrics(f"no {OURS}*; start the engine with --enable-metrics")
    made = Reading(
        # A counter appears with its first request.
        sums.get(REQUESTS, 0.0),
        sums.get(PROMPT, 0.0),
        sums.get(CACHED, 0.0),
        sums.get(MADE, 0.0),
        sums.get(RUNNING, 0.0),
        sum(sums.get(name, 0.0) for name in QUEUES),
        at,
    )
    if not all(map(math.isfinite, vars(made).values())):
        raise NoMetrics("a counter or a queue is no number")
    return made


@dataclass(frozen=True)
class Share:
    """What one worker did in a run, and its queue.

    queued_begin, queued_end: when the window began and ended. grew: over the window; allowed: by how much it may.
    left: at the end of the run, with what runs.
    """

    worker: str
    requests: int
    prompt: int
    cached: int
    computed: int
    made: int
    queued_begin: int
    queued_end: int
    peak_queued: int
    grew: float
    allowed: float
    left: int


def share(worker: str, readings: Sequence[Reading], window: Window) -> Share:
    """The difference between the last and the first reading. Raises NoMetrics without two, or after a restart."""
    if len(readings) < 2:
        raise NoMetrics(f"{worker}: {len(readings)} readings are no difference")
    for before, after in itertools.pairwise(readings):
        if after.requests < before.requests or after.prompt < before.prompt:
            raise NoMetrics(f"{worker}: its counters went back, so it was restarted")
    first, last = readings[0], readings[-1]
    prompt, cached = last.prompt - first.prompt, last.cached - first.cached
    begin, end = ([one for one in readings if one.at <= at] or [first] for at in (window.begin, window.end))
    held = [(one.at, one.queued) for one in readings if window.holds(one.at)]
    return Share(
        worker,
        round(last.requests - first.requests),
        round(prompt),
        round(cached),
        round(prompt - cached),
        round(last.made - first.made),
        round(begin[-1].queued),
        round(end[-1].queued),
        round(max(reading.queued for reading in readings)),
        grown(held, window),
        allowed([queued for _, queued in held] or [0.0]),
        round(last.running + last.queued),
    )


def mismatches(shares: Sequence[Share], sent: Sequence[Sent], decode: bool = False) -> list[str]:
    """Where the accounts of all workers of a role and the generator's differ.

    Tokens are compared where every request was answered whole: nobody knows how far the others came. What decode made
    is what was brought; prefill makes a token of its own.
    """
    wrong = []
    total = sum(one.requests for one in shares)
    if total != len(sent):
        wrong.append(f"miscounted: the workers had {total} requests, the generator sent {len(sent)}")
    # An endpoint may say who answered.
    named = Counter(one.worker for one in sent)
    if set(named) <= {one.worker for one in shares}:
        wrong += [
            f"miscounted: {one.worker} had {one.requests} requests, {named[one.worker]} were sent"
            for one in shares
            if one.requests != named[one.worker]
        ]
    if all(one.done for one in sent):
        pairs = [("prompt tokens", sum(one.prompt for one in shares), sum(one.prompt_tokens for one in sent))]
        if decode:
            pairs.append(("tokens made", sum(one.made for one in shares), sum(one.tokens for one in sent)))
        wrong += [
            f"miscounted: the workers had {theirs} {what}, the answers say {ours}"
            for what, theirs, ours in pairs
            if theirs != ours
        ]
    wrong += [f"{one.worker} still holds {one.left} requests" for one in shares if one.left]
    return wrong
