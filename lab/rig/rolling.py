"""A rolling upgrade and its roll back under load: P, D and router, stock or patched with gates on, one at a time.

Requests leave at their times whatever stands. The walk goes up in the order that docs/fleet.md calls safe, back in the
reverse one, and then meets the mixtures that are left. Nothing is drained before: the worst that an operator can do. A
request is served with the text that the stock deployment gave to its prompt, or it fails by a name within a limit. One
that does neither, or brings another text, makes the run red; so does a mixture that served nobody.
"""

from __future__ import annotations

import asyncio
import json
import string
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import click

from lab import provenance
from lab.load.accounting import Sent
from lab.load.run import Endpoint, Log, Loop, Unusable
from lab.load.stream import Failure
from lab.load.workload import Request
from lab.rig import boot as boots
from lab.rig import client
from lab.rig.errors import RigError
from lab.rig.fleet import NEW, STOCK, Fleet, fleet
from lab.rig.ports import HOST
from lab.rig.runner import Line

BOOT = "rolling"
PLACES = {
    "P": {STOCK: "P", NEW: "P-new"},
    "D": {STOCK: "D", NEW: "D-new"},
    "router": {STOCK: "R", NEW: "R-new"},
}
# One place at a time: the safe order, its way back, and all mixtures that were not met, back at the beginning.
UP = ("router", "P", "D")
WALK = (*UP, *reversed(UP), "P", "D", "P", "router", "D", "router")
# Seconds after which a request without an end hangs: both engines give each other up after 20.
LIMIT = 60.0


@dataclass(frozen=True)
class Spell:
    """A time in which one mixture stood, or in which one place was turned. Seconds of the load."""

    name: str
    begin: float
    end: float
    whole: bool


@dataclass
class Count:
    """What became of the requests of a spell."""

    served: int = 0
    wrong: int = 0
    hung: int = 0
    slowest: float = 0.0
    slowest_refused: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def ended(self) -> int:
        return self.served + self.wrong + self.hung + sum(self.refused.values())


def prompts(count: int, length: int, seed: int) -> list[str]:
    """Seeded texts of letters and digits, each of its own length."""
    chance = Random(seed)
    return ["".join(chance.choices(string.ascii_letters + string.digits, k=length + 7 * n)) for n in range(count)]


def hangs(one: Sent, limit: float) -> bool:
    """Whether a request had no end within the limit."""
    return one.ended is None or one.failure is Failure.TIMEOUT or one.ended - one.started > limit


def spell_of(one: Sent, spells: Sequence[Spell]) -> Spell:
    """The spell of a request: the mixture that stood all of its time, or else the first turn that it met."""
    end = float("inf") if one.ended is None else one.ended
    for spell in spells:
        if spell.whole and spell.begin <= one.started and end <= spell.end:
            return spell
    return next((spell for spell in spells if not spell.whole and spell.end > one.started), spells[-1])


def count(sent: Sequence[Sent], expected: Sequence[str], spells: Sequence[Spell], limit: float) -> dict[Spell, Count]:
    """What became of every request, by spell. ``expected``: digests of the right texts, prompts taking turns."""
    found = {spell: Count() for spell in spells}
    for one in sent:
        own = found[spell_of(one, spells)]
        own.slowest = max(own.slowest, (one.ended or 0.0) - one.started)
        if hangs(one, limit):
            own.hung += 1
        elif one.failure is not None:
            own.refused[one.failure.value] += 1
            own.slowest_refused = max(own.slowest_refused, (one.ended or 0.0) - one.started)
        elif one.text != expected[one.number % len(expected)]:
            own.wrong += 1
        else:
            own.served += 1
    return found


def judge(counts: Mapping[Spell, Count], mixtures: int) -> list[Line]:
    """What must hold: each mixture served somebody, no text is wrong and nobody hangs, in no spell."""
    made = []
    for spell, own in counts.items():
        for what, value in (("wrong texts", own.wrong), ("requests without an end", own.hung)):
            made.append(Line(spell.name, f"{what} == 0", value, value == 0))
        if spell.whole:
            made.append(Line(spell.name, "served >= 1", own.served, own.served >= 1))
    stood = len({spell.name for spell in counts if spell.whole})
    made.append(Line("walk", f"mixtures == {mixtures}", stood, stood == mixtures))
    return made


def table(counts: Mapping[Spell, Count]) -> list[str]:
    """One line a spell."""
    rows = [("what stood", "requests", "served", "wrong", "hung", "slowest", "refused within", "by name")]
    for spell, own in counts.items():
        named = ", ".join(f"{name} {number}" for name, number in sorted(own.refused.items())) or "-"
        numbers = (str(own.ended), str(own.served), str(own.wrong), str(own.hung), f"{own.slowest:.1f} s")
        rows.append((spell.name, *numbers, f"{own.slowest_refused:.1f} s" if own.refused else "-", named))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def verdict(lines: Sequence[Line]) -> list[str]:
    """What does not hold, and how much does."""
    red = [line for line in lines if not line.holds]
    told = [f"FAIL {line.scenario}: {line.hold}, measured {line.measured} {line.note}".rstrip() for line in red]
    return [*told, f"{len(lines) - len(red)} passed, {len(red)} failed"]


class Load:
    """The generator in a thread of its own; ``log`` fills while it runs."""

    def __init__(self, endpoint: Endpoint, requests: Sequence[Request], new: int) -> None:
        self.log = Log()
        self.error: BaseException | None = None
        self._over = threading.Event()
        loop = Loop(endpoint, requests, new, over=self._over.is_set)

        def run() -> None:
            try:
                asyncio.run(loop.run(self.log))
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def now(self) -> float:
        """Seconds since the load began; 0 before."""
        return time.monotonic() - self.log.began if self.log.began else 0.0

    def check(self) -> None:
        """Raise what ended the generator.

        Raises:
            RigError: kind ``request``.
        """
        if self.error is not None:
            raise RigError("request", f"the load ended: {self.error}")

    def end(self, within: float) -> None:
        """Send no more and wait for the ends of what was sent.

        Raises:
            RigError: kind ``request``; there was none within that time.
        """
        self._over.set()
        self._thread.join(within)
        self.check()
        if self._thread.is_alive():
            raise RigError("request", f"the load does not end within {within:.0f} s")


@contextmanager
def load(endpoint: Endpoint, requests: Sequence[Request], new: int) -> Iterator[Load]:
    """A load that is told to end, whatever happens."""
    made = Load(endpoint, requests, new)
    try:
        yield made
    finally:
        made._over.set()


def endpoint_of(port: int, engine_port: int, timeout: float) -> Endpoint:
    """The router's endpoint, with the name under which an engine serves its model."""
    name = client.get(engine_port, "/v1/models")["data"][0]["id"]
    return Endpoint(f"http://{HOST}:{port}", str(name), timeout)


def expect(endpoint: Endpoint, texts: Sequence[str], new: int) -> list[str]:
    """Digests of the texts that a deployment gives to prompts that come one after another.

    Raises:
        RigError: kind ``request``; one has no text.
    """
    found = []
    for number, text in enumerate(texts):
        log = Log()
        try:
            asyncio.run(Loop(endpoint, [Request(number, 0.0, 0, text)], new).run(log))
        except Unusable as error:
            raise RigError("request", str(error)) from error
        (one,) = log.sent
        if not one.done or not one.text:
            raise RigError("request", f"prompt {number} has no text: {one.failure} {one.detail}")
        found.append(one.text)
    return found


def worked(made: Fleet, name: str) -> Counter[str]:
    """What the gates of a member did since it was started: retractions of D, and requests that P sent in slices."""
    calls: Counter[str] = Counter()
    found: Counter[str] = Counter()
    for event in made.events(name):
        # Both ranks of D tell of a retraction, and each gets one call without slices.
        found["retractions"] += event.name == "offload"
        if event.name == "transfer" and event.values["kind"] == "kv":
            calls[event.values["room"]] += 1
    found["retractions"] //= 2
    found["requests sent in slices"] = sum(number > 2 for number in calls.values())
    return found


def walk(
    made: Fleet,
    running: Load,
    steps: Sequence[str],
    least: int,
    patience: float,
    say: Callable[[str], None],
    spells: list[Spell],
    told: Counter[str],
) -> None:
    """Turn one place after the other under the load.

    Args:
        spells: is filled with what stood when.
        least: requests that a mixture must have served before the next place is turned.
        patience: seconds that they may take.
        told: is filled with what the gates did.

    Raises:
        RigError: a member did not come up.
    """

    def stand() -> None:
        begin = running.now
        until = time.monotonic() + patience
        while time.monotonic() < until:
            running.check()
            if sum(one.started >= begin and one.done for one in list(running.log.sent)) >= least:
                break
            time.sleep(0.1)
        name = "-".join(place.now for place in made.places.values())
        spells.append(Spell(name, begin, running.now, whole=True))
        say(f"{name} stood for {running.now - begin:.0f} s")

    stand()
    for name in steps:
        begin, place = running.now, made.places[name]
        wanted = NEW if place.now == STOCK else STOCK
        told.update(worked(made, name))
        made.stop(name)
        made.turn(name, wanted)
        made.start(name)
        spells.append(Spell(f"{name} to {wanted}", begin, running.now, whole=False))
        say(f"{name} is {wanted} after {running.now - begin:.0f} s")
        stand()


def result(
    counts: Mapping[Spell, Count], lines: Sequence[Line], sent: Sequence[Sent], told: Mapping[str, int], seed: int
) -> dict[str, object]:
    """All of it for a file."""
    return {
        **provenance.of(__file__, seed),
        "label": "CPU, TCP loopback",
        **told,
        "green": all(line.holds for line in lines),
        "spells": [
            {**vars(spell), **vars(own), "refused": dict(own.refused)} for spell, own in counts.items()
        ],
        "lines": [line.as_json() for line in lines],
        "refusals": Counter(f"{one.failure.value}: {one.detail}"[:200] for one in sent if one.failure is not None),
    }  # fmt: skip


@click.command()
@click.option("--rate", type=float, default=0.7, show_default=True, help="Requests per second.")
@click.option("--count", "kinds", type=click.IntRange(1), default=6, show_default=True, help="Different prompts.")
@click.option("--length", type=click.IntRange(1), default=90, show_default=True, help="Tokens of the shortest.")
@click.option("--new", type=click.IntRange(1), default=16, show_default=True)
@click.option("--least", type=click.IntRange(1), default=4, show_default=True, help="Requests served by a mixture.")
@click.option("--seed", type=int, default=61, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the result here as JSON.")
def main(rate: float, kinds: int, length: int, new: int, least: int, seed: int, out: Path | None) -> None:
    """Walk through all eight mixtures under load. Exit code 1: a wrong text, a hang, a mixture that serves none."""
    began = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"[{time.monotonic() - began:5.0f} s] {text}", err=True)

    texts = prompts(kinds, length, seed)
    # As many as an hour would take; the walk ends the load.
    requests = [Request(number, number / rate, 0, texts[number % kinds]) for number in range(int(3600 * rate))]
    spells: list[Spell] = []
    told: Counter[str] = Counter()
    trouble = ""
    try:
        with fleet(boots.load(BOOT), PLACES, say) as made:
            made.start_all()
            endpoint = endpoint_of(made.places["router"].port, made.places["D"].port, LIMIT)
            expected = expect(endpoint, texts, new)
            say(f"{len(set(expected))} different texts of {kinds} prompts")
            with load(endpoint, requests, new) as running:
                try:
                    walk(made, running, WALK, least, LIMIT, say, spells, told)
                except (RigError, KeyboardInterrupt) as error:
                    # What was seen until then is told all the same.
                    trouble = str(error) or "interrupted"
                running.end(LIMIT + 10)
            lost = made.lost()
            sent = running.log.sent
    except RigError as error:
        for text in error.tail:
            say("  " + text)
        say(f"{error.kind}: {error}")
        sys.exit(1)
    counts = count(sent, expected, spells, LIMIT) if spells else {}
    lines = judge(counts, 2 ** len(PLACES))
    lines.append(Line("walk", "turns that failed == 0", bool(trouble), not trouble, trouble))
    lines.append(Line("walk", "members lost == 0", len(lost), not lost, "; ".join(lost)))
    lines += [
        Line("walk", f"{what} >= 1", told[what], told[what] >= 1) for what in ("retractions", "requests sent in slices")
    ]
    if out is not None:
        out.write_text(json.dumps(result(counts, lines, sent, told, seed), indent=1) + "\n", encoding="utf-8")
    for row in (*table(counts), *verdict(lines)):
        click.echo(row)
    sys.exit(not all(line.holds for line in lines))


if __name__ == "__main__":
    main()
