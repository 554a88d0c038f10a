"""One HTML file of a run, with its plots inside."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from lab.html import document, svg, table
from lab.load.accounting import Sent, Window, outstanding


def plots(sent: Sequence[Sent], window: Window) -> Figure:
    """Outstanding requests and the time to the first token, over time."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    backlog, first = figure.subplots(2, 1, sharex=True)
    last = max((one.ended or one.due for one in sent), default=1.0)
    places = [last * number / 200 for number in range(201)]
    backlog.step(places, [outstanding(sent, place) for place in places], where="post")
    backlog.set_ylabel("outstanding requests")
    begun = [one for one in sent if one.first is not None and one.done]
    first.plot([one.due for one in begun], [(one.first or 0) - one.due for one in begun], ".", markersize=4)
    first.set_ylabel("first token, s after it was due")
    first.set_xlabel("s")
    for axes in (backlog, first):
        axes.axvspan(window.begin, min(window.end, last), alpha=0.1)
    return figure


def page(title: str, result: Mapping[str, Any], sent: Sequence[Sent], window: Window) -> str:
    """The whole page."""
    report = result["report"]
    figures = [
        {"what": name, "value": value} for name, value in report.items() if isinstance(value, int | float | bool)
    ]
    latency = [{"what": name, "s": value} for name, value in report["latency"].items()]
    failures = [{"failure": name, "requests": count} for name, count in report["failures"].items()]
    reasons = "".join(f'<p class="bad">invalid: {html.escape(reason)}</p>' for reason in report["invalid"])
    return document(
        title,
        f"{reasons}<h2>Figures</h2>{table(figures)}<h2>Seconds</h2>{table(latency)}<h2>Failures</h2>{table(failures)}"
        f"<h2>Workers</h2>{table(result['workers'])}<h2>Over time</h2>{svg(plots(sent, window))}",
    )
