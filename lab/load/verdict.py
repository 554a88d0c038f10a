"""Whether a load was sustained, whether its window can tell, and whether the workers' accounts are the generator's."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from lab.load import workers
from lab.load.accounting import Clock, Report, Sent, Window, account, outstanding
from lab.load.queues import allowed
from lab.load.run import Log

POINTS = 41


def arrivals_end(sent: Sequence[Sent]) -> float:
    """Until when requests arrived: the next one is missed after twice the longest time between two of them."""
    due = sorted(one.due for one in sent)
    longest = max((b - a for a, b in itertools.pairwise(due)), default=0.0)
    return due[-1] + 2 * longest if due else 0.0


def reported(
    sent: Sequence[Sent], window: Window, cards: int, clocks: Sequence[Clock] = (), late: float = 0.1
) -> Report:
    """The account of a log, and the verdict on its backlog.

    A backlog can grow while requests arrive, and only then: a window that goes on afterwards shows how it shrinks.
    """
    report = account(sent, window, cards, clocks, late)
    step = window.seconds / (POINTS - 1)
    levels = [outstanding(sent, window.begin + step * number) for number in range(POINTS)]
    report.sustained = report.sustained and report.growth <= allowed(levels)
    until = arrivals_end(sent)
    if sent and window.end > until:
        report.sustained = False
        report.invalid.append(
            f"requests arrived until {until:.1f} s, the window ends at {window.end:g} s: a backlog cannot grow after"
        )
    return report


def judge(
    log: Log, window: Window, cards: int, roles: Mapping[str, Iterable[str]], late: float
) -> tuple[Report, list[workers.Share]]:
    """The report of a log and the workers' shares. Every mismatch between them is a reason against the report.

    roles: names of workers; those of each role together get every request.
    """
    report = reported(log.sent, window, cards, log.clocks, late)
    report.invalid += log.troubles
    shares: list[workers.Share] = []
    for role, members in roles.items():
        own, missing = list[workers.Share](), False
        for name in members:
            try:
                own.append(workers.share(name, log.readings.get(name, []), window))
            except workers.NoMetrics as error:
                report.invalid.append(str(error))
                missing = True
        if own and not missing:
            report.invalid += workers.mismatches(own, log.sent, role == "decode")
        shares += own
    report.sustained = report.sustained and all(one.grew <= one.allowed for one in shares)
    return report, shares
