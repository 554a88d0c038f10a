"""Load an OpenAI-compatible endpoint as the deployment was judged: open loop, fixed window, strict ends, every worker's
own account. Offered load is not called sustained when queues grow.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.report import Row, show  # noqa: E402
from lab import provenance  # noqa: E402
from lab.load import workers  # noqa: E402
from lab.load.accounting import Report, Window, account, baab, paired  # noqa: E402
from lab.load.page import page  # noqa: E402
from lab.load.run import Endpoint, Log, Loop, Unusable  # noqa: E402
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


def judge(
    log: Log, window: Window, cards: int, roles: dict[str, dict[str, str]], late: float
) -> tuple[Report, list[workers.Share]]:
    """The report of a log, its workers' shares, and every mismatch between them as a reason against it."""
    report = account(log.sent, window, cards, log.clocks, late)
    report.invalid += log.troubles
    shares: list[workers.Share] = []
    for members in roles.values():
        own = []
        for name in members:
            try:
                own.append(workers.share(name, log.readings.get(name, [])))
            except workers.NoMetrics as error:
                report.invalid.append(str(error))
        if len(own) == len(members) > 0:
            report.invalid += workers.mismatches(own, len(log.sent))
        shares += own
    return report, shares


def figure(report: Report, name: str) -> float:
    return report.latency[name] if name in report.latency else float(getattr(report, name))


def rows_of(report: Report) -> list[Row]:
    return [
        Row("offered", report.offered, "req/s"),
        Row("done in the window", report.rate, "req/s"),
        Row("tokens", report.tokens_per_second, "tokens/s"),
        Row("tokens a card", report.tokens_per_card, "tokens/s"),
        Row("offered tokens a card", report.offered_tokens_per_card, "tokens/s"),
        Row("backlog grew by", report.growth, "requests"),
        *(Row(name, value, "s") for name, value in report.latency.items() if not math.isnan(value)),
        Row("failures", sum(report.failures.values()), "requests", "<= 0"),
        Row("sustained", float(report.sustained), "yes", ">= 1"),
        Row("reasons not to believe it", len(report.invalid), "reasons", "<= 0"),
    ]


def progress(seconds: float, sent: int, done: int, failed: int) -> None:
    if sys.stderr.isatty():
        click.echo(f"\r{seconds:6.0f} s  sent {sent}  done {done}  failed {failed}", err=True, nl=False)


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
@click.option("--seconds", type=float, default=600.0, show_default=True, help="For how long requests arrive.")
@click.option("--window", nargs=2, type=float, default=(120.0, 540.0), show_default=True, help="What counts, seconds.")
@click.option("--prefix", type=int, default=73_728, show_default=True)
@click.option("--suffix", type=int, default=8_192, show_default=True)
@click.option("--new", type=int, default=600, show_default=True)
@click.option("--prefixes", type=int, default=4, show_default=True)
@click.option("--scale", type=click.IntRange(1), default=1, show_default=True, help="Divide every length by this.")
@click.option("--prompt", type=click.Choice([kind.value for kind in Prompt]), default="ids", show_default=True)
@click.option("--vocabulary", type=int, default=100_000, show_default=True)
@click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds for one answer.")
@click.option("--late", type=float, default=0.1, show_default=True, help="By how much the generator may be late, s.")
@click.option("--seed", type=int, default=17, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="Write the result here as JSON, and beside it as HTML.")
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
    if span.begin >= workload.seconds:
        raise click.UsageError(f"--window begins at {span.begin:g} s, requests arrive until {workload.seconds:g} s")
    roles = {"prefill": named(prefill, "prefill"), "decode": named(decode, "decode")}
    arms = {"A": endpoint.rstrip("/"), "B": (against or endpoint).rstrip("/")}
    order = baab(pairs) if against else "A"
    everything, runs = requests(workload), []
    for arm in order:
        log = Log()
        loop = Loop(
            Endpoint(arms[arm], model, timeout), everything, workload.new, roles["prefill"] | roles["decode"],
            progress=progress,
        )  # fmt: skip
        trouble = ""
        try:
            asyncio.run(loop.run(log))
        except Unusable as error:
            raise click.ClickException(str(error)) from error
        except KeyboardInterrupt:
            trouble = "the run was interrupted"
        report, shares = judge(log, span, cards, roles, late)
        report.invalid += [trouble] if trouble else []
        runs.append((arm, log, report, shares))
        _write(out, arm, len(runs), workload, span, log, report, shares)
        for reason in report.invalid:
            click.echo(f"invalid: {reason}", err=True)
        if trouble:
            break
    rows = [row for _, _, report, _ in runs[:1] for row in rows_of(report)] if not against else []
    if against and len(runs) == len(order):
        values = {arm: [report for own, _, report, _ in runs if own == arm] for arm in "AB"}
        for name in PAIRED:
            a, b = ([figure(report, name) for report in values[arm]] for arm in "AB")
            difference = paired(name, a, b)
            rows += [
                Row(f"{name}, A", difference.a, ""),
                Row(f"{name}, B - A, n = {difference.n}", difference.mean, ""),
                Row(f"{name}, B - A, low", difference.low, ""),
                Row(f"{name}, B - A, high", difference.high, ""),
            ]
        rows.append(Row("runs not to be believed", sum(bool(one[2].invalid) for one in runs), "runs", "<= 0"))
    show(rows, as_json, provenance.of(__file__, workload.seed))


def _write(
    out: Path | None,
    arm: str,
    number: int,
    workload: Workload,
    window: Window,
    log: Log,
    report: Report,
    shares: list[workers.Share],
) -> None:
    """One file a run, so that what ran is kept whatever comes after."""
    if out is None:
        return
    path = out if number == 1 and arm == "A" else out.with_name(f"{out.stem}-{number}{arm}{out.suffix}")
    result: dict[str, Any] = {
        # Of the client: the engines' are not seen from here.
        **provenance.of(__file__, workload.seed),
        "arm": arm,
        "workload": {name: getattr(value, "value", value) for name, value in vars(workload).items()},
        "window": asdict(window),
        "report": asdict(report),
        "workers": [asdict(share) for share in shares],
        "sent": [
            {**asdict(one), "failure": one.failure.value if one.failure else None, "gaps": len(one.gaps)}
            for one in log.sent
        ],
    }
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".html").write_text(page(f"Run {number}, arm {arm}", result, log.sent, window), encoding="utf-8")


if __name__ == "__main__":
    main()
