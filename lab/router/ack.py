"""How long a client waits for the error of a prefill worker: stock, patched with the gate off, patched with it on.

Scripted P and D on this machine, real routers side by side; P fails in each way in turn, D waits for KV until its own
timeout. Prints the receipts of the builds as one JSON object, then one a case. ``benchmarks/strict_ack.py`` runs it and
compares the arms.
"""

from __future__ import annotations

import contextlib
import json
import sys

import click

from lab.router.build import Builder, BuildError
from lab.router.harness import Bench, chat
from lab.router.servers import FAILURES
from patchbundle.errors import BundleError

GATE = {"SMG_PD_STRICT_ACK": "1"}
ARMS = {"stock": ("stock", {}), "gate off": ("patched", {}), "gate on": ("patched", GATE)}
# What P reports of itself; a P that is silent has no moment of failure.
REPORTED = tuple(mode for mode in FAILURES if not mode.startswith("hang"))
# Seconds: when P fails after the request, how long D waits for KV, and when a client leaves.
P_FAILS, D_WAITS, LIMIT = 0.1, 1.0, 10.0
# Each kind of failure in the order B A A B of the three arms, so that a drift falls on all of them. D's headers are
# late in one half and early in the other, by turns, so that an arm's place is not the same in all late cases.
ORDER = ("stock", "gate off", "gate on", "gate on", "gate off", "stock")


def ask(bench: Bench, mode: str, early: bool) -> dict[str, float | None]:
    """Seconds from P's failure to the client's end and to D's abort, None where D was not told; and the status."""
    bench.run(bench.script(p_mode=mode, p_delay=P_FAILS, d_timeout=D_WAITS, d_headers_early=early))
    answer = bench.run(bench.ask(chat(True), seconds=LIMIT))
    seen, _ = bench.run(bench.settle(5.0))
    failed = min(float(event["t"]) for event in seen.events("P.report"))
    told = [float(event["t"]) - failed for event in seen.events("D.abort")]
    return {"error_s": answer.ended - failed, "abort_s": min(told, default=None), "status": answer.status}


def cases(turn: int) -> list[tuple[str, bool]]:
    """The cases of one kind of failure in their order: the arm, and whether D's headers are early."""
    return [(arm, (place >= len(ARMS)) ^ (turn % 2 == 1)) for place, arm in enumerate(ORDER)]


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="How often each case is run.")
def main(rounds: int) -> None:
    """Run every case in every arm."""
    try:
        built = {variant: Builder().build(variant) for variant in sorted({variant for variant, _ in ARMS.values()})}
    except (BuildError, BundleError) as error:
        raise click.ClickException(str(error)) from error
    sys.stdout.write(json.dumps({variant: result.receipt for variant, result in built.items()}) + "\n")
    with contextlib.ExitStack() as stack:
        benches = {
            arm: stack.enter_context(Bench(built[variant], environment=gates)) for arm, (variant, gates) in ARMS.items()
        }
        for number in range(rounds):
            for index, mode in enumerate(REPORTED):
                for arm, early in cases(number + index):
                    case = {"mode": mode, "early": early, "round": number, "arm": arm, **ask(benches[arm], mode, early)}
                    sys.stdout.write(json.dumps(case) + "\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    main()
