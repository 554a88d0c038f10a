"""How long a client waits for the error of a prefill worker, one gate at a time: real routers, scripted servers.

Stock, patched with ``SMG_PD_STRICT_ACK`` unset, patched with it set; every way in which P can fail, in pairs. The cases
are run by ``lab.router.ack``.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.engines import Lost, digests  # noqa: E402
from benchmarks.report import Row, show  # noqa: E402
from lab import provenance  # noqa: E402
from lab.load.accounting import paired, quantile  # noqa: E402

# The arms of ``lab.router.ack``, each compared with the one before.
ARMS = ("stock", "gate off", "gate on")


def acknowledgement(cases: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    """Time from P's failure to the client's end, and how often D was told; the arms in pairs.

    Raises Lost where the arms have no cases, or not the same number.
    """
    arms = list(dict.fromkeys(str(case["arm"]) for case in cases))
    for early, headers in ((False, "D's headers late"), (True, "D's headers early")):
        own = {arm: [case for case in cases if case["arm"] == arm and case["early"] == early] for arm in arms}
        times = {arm: [float(case["error_s"]) for case in of_arm] for arm, of_arm in own.items()}
        counts = {arm: len(of_arm) for arm, of_arm in own.items()}
        if not set(ARMS) <= counts.keys() or len(set(counts.values())) != 1 or not all(counts.values()):
            raise Lost(f"{headers}: the cases of {counts} are no pairs")
        for arm, of_arm in own.items():
            yield Row(f"{headers}, {arm}: cases", counts[arm], "requests")
            yield Row(f"{headers}, {arm}: error p50", quantile(times[arm], 0.5) * 1e3, "ms")
            yield Row(f"{headers}, {arm}: error, worst", max(times[arm]) * 1e3, "ms")
            told = sum(case["abort_s"] is not None for case in of_arm)
            yield Row(f"{headers}, {arm}: D was told", told, "requests")
        for a, b in itertools.pairwise(ARMS):
            difference = paired(f"{b} - {a}", times[a], times[b])
            for part in ("mean", "low", "high"):
                yield Row(f"{headers}, {b} - {a}: {part}", getattr(difference, part) * 1e3, "ms")


def acked(rounds: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The receipts of the routers that ``lab.router.ack`` ran, and every case. Raises Lost if it fails."""
    command = [sys.executable, "-m", "lab.router.ack", "--rounds", str(rounds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Lost(f"lab.router.ack: {done.stderr[-2000:]}")
    builds, *cases = map(json.loads, done.stdout.splitlines())
    return builds, cases


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=2, show_default=True, help="How often each case is run.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the result here as JSON.")
@click.option("--json", "as_json", is_flag=True)
def main(rounds: int, out: Path | None, as_json: bool) -> None:
    """Measure all cases. Exit code 1: a case could not be measured."""
    try:
        builds, cases = acked(rounds)
        rows = list(acknowledgement(cases))
    except Lost as error:
        raise click.ClickException(str(error)) from error
    head = {
        **provenance.of(__file__, None),
        "label": "CPU, loopback, scripted P and D",
        "builds": builds,
        "rounds": rounds,
    }
    head["modules"] |= digests("lab/router/ack.py", "lab/router/servers.py")
    if out is not None:
        result = {**head, "rows": [asdict(row) | {"holds": row.holds} for row in rows]}
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(rows, as_json, head)


if __name__ == "__main__":
    main()
