"""Load an OpenAI-compatible endpoint as the deployment was judged: open loop, fixed window, strict ends, every worker's
own account. Offered load is not called sustained when queues grow.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.report import Row, show  # noqa: E402
from lab import provenance  # noqa: E402
from lab.load import workers  # noqa: E402
from lab.load.accounting import Report, Window, baab, paired  # noqa: E402
from lab.load.page import page  # noqa: E402
from lab.load.run import Endpoint, Log, Loop, Unusable  # noqa: E402
from lab.load.verdict import judge  # noqa: E402
from lab.load.workload import Arrivals, Prompt, Workload, requests  # noqa: E402

PAIRED = ("rate", "tokens_per_second", "first token p50", "first token p99", "between tokens p50", "whole p50")


def named(values: tuple[str, ...], role: str) -> dict[str, str]:
    """Addresses by name: ``NAME=URL``, or a URL that gets the role and a number."""
    made: dict[str, str] = {}
    for number, value in enumerate(values):
        name, sign, address = value.partition("=")
        name, address = (name, address) if sign and "/" not in name else (f"{role}{number}", value)
        if name in made:
            raise click.UsageError(f"--{role} {name} is named twice")
        made[name] = address.rstrip("/")
    return made


@dataclass
class Run:
    """What one run of an arm left."""

    name: str
    arm: str
    log: Log
    report: Report
    shares: list[workers.Share]


def figure(report: Report, name: str) -> float:
    return report.latency[name] if name in report.latency else float(getattr(report, name))


def bounded(run: Run, before: str = "") -> list[Row]:
    """What every run must hold, whatever else it is compared with."""
    report = run.report
    return [
        Row(f"{before}failures", sum(report.failures.values()), "requests", "<= 0"),
        Row(f"{before}backlog grew by", report.growth, "requests"),
        *(
            Row(f"{before}queue of {one.worker} grew by", one.grew, "requests", f"<= {one.allowed}")
            for one in run.shares
        ),
        Row(f"{before}sustained", float(report.sustained), "yes", ">= 1"),
        Row(f"{before}reasons not to believe it", len(report.invalid), "reasons", "<= 0"),
    ]


def alone(run: Run) -> list[Row]:
    report = run.report
    return [
        Row("offered", report.offered, "req/s"),
        Row("done in the window", report.rate, "req/s"),
        Row("tokens", report.tokens_per_second, "tokens/s"),
        Row("tokens a card", report.tokens_per_card, "tokens/s"),
        Row("offered tokens a card", report.offered_tokens_per_card, "tokens/s"),
        *(Row(name, value, "s") for name, value in report.latency.items() if not math.isnan(value)),
        *bounded(run),
    ]


def compared(runs: Sequence[Run]) -> list[Row]:
    """B - A of every figure, and what each run must hold."""
    rows: list[Row] = []
    for name in PAIRED:
        a, b = ([figure(run.report, name) for run in runs if run.arm == arm] for arm in "AB")
        # A run without an answer has no latency, and says so by itself.
        if any(map(math.isnan, a + b)):
            continue
        difference = paired(name, a, b)
        rows += [
            Row(f"{name}, A", difference.a, ""),
            Row(f"{name}, B - A, n = {difference.n}", difference.mean, ""),
            Row(f"{name}, B - A, low", difference.low, ""),
            Row(f"{name}, B - A, high", difference.high, ""),
        ]
    return rows


class Progress:
    """A line that changes on a terminal; elsewhere one in half a minute."""

    def __init__(self) -> None:
        self._next = 30.0

    def __call__(self, seconds: float, sent: int, done: int, failed: int) -> None:
        terminal = sys.stderr.isatty()
        if terminal or seconds >= self._next:
            self._next = seconds + 30.0
            click.echo(
                ("\r" if terminal else "") + f"{seconds:6.0f} s  sent {sent}  done {done}  failed {failed}",
                err=True,
                nl=not terminal,
            )


@click.command()
@click.argument("endpoint")
@click.option("--against", help="A second endpoint: both are loaded in turn, B A A B, and compared in pairs.")
@click.option("--pairs", type=click.IntRange(2), default=2, show_default=True, help="Pairs of runs with --against.")
@click.option("--model", required=True)
@click.option("--prefill", multiple=True, metavar="[NAME=]URL", help="A prefill worker, for its metrics.")
@click.option("--decode", multiple=True, metavar="[NAME=]URL", help="A decode worker, for its metrics.")
@click.option("--cards", type=click.IntRange(1), default=40, show_default=True)
@click.option("--rate", type=float, default=3.40, show_default=True, help="Requests per second.")
@click.option("--arrivals", type=click.Choice([kind.value for kind in Arrivals]), default="fixed", show_default=True)
@click.option(
    "--seconds",
    type=float,
    default=600.0,
    show_default=True,
    help="For how long requests arrive.",
)
@click.option("--window", nargs=2, type=float, default=(120.0, 540.0), show_default=True, help="What counts, seconds.")
@click.option("--prefix", type=int, default=73_728, show_default=True)
@click.option("--suffix", type=int, default=8_192, show_default=True)
@click.option("--new", type=int, default=600, show_default=True)
@click.option("--prefixes", type=int, default=4, show_default=True)
@click.option("--scale", type=click.IntRange(1), default=1, show_default=True, help="Divide every length by this.")
@click.option("--prompt", type=click.Choice([kind.value for kind in Prompt]), default="ids", show_default=True)
@click.option("--vocabulary", type=int, default=100_000, show_default=True)
@click.option(
    "--timeout",
    type=float,
    default=600.0,
    show_default=True,
    help="Seconds for one answer.",
)
@click.option("--late", type=float, default=0.1, show_default=True, help="By how much the generator may be late, s.")
@click.option(
    "--count",
    type=click.Choice(["usage", "ids"]),
    default="usage",
    show_default=True,
    help="How chunks are counted: by the engine's own count in each, which a router may drop; or by the ids of their "
    "tokens, with which the first chunk brings the whole prompt back.",
)
@click.option("--seed", type=int, default=17, show_default=True)
@click.option("--label", default="", help="Words for the result: what was loaded, and where.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Result as JSON, and beside it as HTML.")
@click.option("--json", "as_json", is_flag=True)
def main(
    endpoint: str,
    against: str | None,
    pairs: int,
    model: str,
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    cards: int,
    window: tuple[float, float],
    scale: int,
    timeout: float,
    late: float,
    count: str,
    label: str,
    out: Path | None,
    as_json: bool,
    **shape: Any,
) -> None:
    """Load ENDPOINT, the address before /v1. Exit code 1: a failure, a growing backlog, or no valid figure."""
    shape |= {"arrivals": Arrivals(shape["arrivals"]), "prompt": Prompt(shape["prompt"])}
    try:
        workload, span = Workload(**shape).smaller(scale), Window(*window)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if not (0 < timeout < math.inf and 0 <= late < math.inf):
        raise click.UsageError(f"--timeout {timeout} and --late {late} are to be seconds, the first more than 0")
    if span.end > workload.seconds:
        raise click.UsageError(
            f"--window ends at {span.end:g} s, requests arrive until {workload.seconds:g} s: "
            "a backlog cannot grow after; end the window before, or let requests arrive for longer"
        )
    if out is not None and not (out.parent.is_dir() and os.access(out.parent, os.W_OK)):
        raise click.UsageError(f"--out {out}: {out.parent} is no folder that can be written to; make it first")
    roles = {"prefill": named(prefill, "prefill"), "decode": named(decode, "decode")}
    arms = {"A": endpoint.rstrip("/"), "B": (against or endpoint).rstrip("/")}
    order = baab(pairs) if against else "A"
    runs: list[Run] = []
    lost: list[str] = []
    for number, arm in enumerate(order, 1):
        log = Log()
        loop = Loop(
            Endpoint(arms[arm], model, timeout, ids=count == "ids"), requests(workload), workload.new,
            roles["prefill"] | roles["decode"], progress=Progress(),
        )  # fmt: skip
        trouble = ""
        try:
            asyncio.run(loop.run(log))
        except Unusable as error:
            if not runs:
                raise click.ClickException(str(error)) from error
            trouble = str(error)
        except KeyboardInterrupt:
            trouble = "the run was interrupted"
        except Exception as error:
            # Hours of load are not lost by what nobody thought of.
            trouble = f"the run broke: {error!r}"
        if sys.stderr.isatty():
            click.echo(err=True)
        report, shares = judge(log, span, cards, roles, late)
        report.invalid += [trouble] if trouble else []
        run = Run(f"{number}{arm}", arm, log, report, shares)
        runs.append(run)
        for reason in report.invalid:
            click.echo(f"invalid: {reason}", err=True)
        try:
            _write(out, len(order) > 1, run, workload, span, {"label": label, "count": count})
        except OSError as error:
            lost.append(str(error))
            click.echo(f"not written: {error}", err=True)
        if trouble:
            break
    if against:
        rows = compared(runs) if len(runs) == len(order) else []
        rows += [row for run in runs for row in bounded(run, f"run {run.name}: ")]
        rows.append(Row("runs that are missing", len(order) - len(runs), "runs", "<= 0"))
    else:
        rows = alone(runs[0])
    if lost:
        rows.append(Row("results that are not written", len(lost), "files", "<= 0"))
    show(rows, as_json, provenance.of(__file__, workload.seed))


def plain(value: Any) -> Any:
    """The value as JSON has it: no number is null, and an end is its name."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def _write(out: Path | None, several: bool, run: Run, workload: Workload, window: Window, more: dict[str, str]) -> None:
    """One file a run, so that what ran is kept whatever comes after."""
    if out is None:
        return
    path = out.with_name(f"{out.stem}-{run.name}{out.suffix}") if several else out
    result: dict[str, Any] = {
        # Of the client: the engines' are not seen from here.
        **provenance.of(__file__, workload.seed),
        "arm": run.arm,
        "workload": vars(workload),
        **more,
        "window": asdict(window),
        "report": asdict(run.report),
        "workers": [asdict(share) for share in run.shares],
        "sent": [{**asdict(one), "gaps": len(one.gaps)} for one in run.log.sent],
    }
    path.write_text(json.dumps(plain(result), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    text = page(f"Run {run.name}", result, run.log.sent, window)
    path.with_suffix(".html").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
