"""The whole rig under load for minutes: workers are killed at random, clients leave, D retracts, one role is turned.

Of two Ps and two Ds one each is killed again and again, with all its processes, and started again; between two lives
P's tree is patched or reverted by the bundle's own tool. The others, and the router, live all the time: it is their
memory that must be flat. Every request must have an end, every text must be the one that its prompt had before the
load, and at the end no engine may hold anything.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import click

from lab import provenance
from lab.load.accounting import Sent
from lab.load.workload import Request
from lab.rig import boot as boots
from lab.rig.errors import RigError
from lab.rig.fleet import NEW, STOCK, Fleet, fleet
from lab.rig.rolling import Load, endpoint_of, expect, hangs, load, prompts, verdict
from lab.rig.runner import Line

BOOT = "soak"
PLACES = {
    "P0": {STOCK: "P0", NEW: "P-new"},
    "P1": {STOCK: "P1", NEW: "P-new"},
    "D0": {NEW: "D0"},
    "D1": {NEW: "D1"},
    "router": {NEW: "R"},
}
# Who is killed. The others live from the beginning to the end.
VICTIMS = ("P1", "D1")
LIVES = ("P0", "D0", "router")
# Seconds after which a request without an end hangs. Both engines give each other up after 20; D may retract it often.
LIMIT = 120.0
# Of the time, before memory is judged: caches, pools and arenas have their size then.
WARM = 0.25
# What one member may have grown by from the first quarter of its judged samples to the last, medians of each.
ALLOWED = 48 << 20
# Seconds between the start of one member and the next kill.
CALM = (8.0, 20.0)


@dataclass
class Diary:
    """What happened: kills by member, turns by verb, retractions seen, samples of memory, what ended by itself."""

    kills: Counter[str] = field(default_factory=Counter)
    turns: Counter[str] = field(default_factory=Counter)
    retractions: int = 0
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)


def growth(samples: Sequence[tuple[float, int]], whole: float, warm: float = WARM) -> int | None:
    """Bytes from the median of the first quarter of the warm samples to that of the last; None of too few."""
    judged = [size for at, size in samples if at >= warm * whole and size]
    if len(judged) < 8:
        return None
    quarter = len(judged) // 4
    return int(statistics.median(judged[-quarter:]) - statistics.median(judged[:quarter]))


def ends(sent: Sequence[Sent], expected: Sequence[str], limit: float) -> Counter[str]:
    """How many requests ended in which way: ``served``, ``wrong``, ``hung``, ``left``, or the name of a failure."""
    found: Counter[str] = Counter()
    for one in sent:
        if hangs(one, limit):
            found["hung"] += 1
        elif one.left:
            found["left"] += 1
        elif one.failure is not None:
            found[one.failure.value] += 1
        else:
            found["served" if one.text == expected[one.number % len(expected)] else "wrong"] += 1
    return found


def judge(found: Mapping[str, int], diary: Diary, whole: float) -> list[Line]:
    """What must hold. A soak in which something never happened is no soak: that is red too."""
    made = [
        Line("soak", f"{what} == 0", found.get(name, 0), not found.get(name, 0))
        for what, name in (("requests without an end", "hung"), ("wrong texts", "wrong"))
    ]
    happened = {
        "served": found.get("served", 0),
        "left by their clients": found.get("left", 0),
        "retractions": diary.retractions,
        **{f"kills of {name}": diary.kills[name] for name in VICTIMS},
        **{f"times {verb}": diary.turns[verb] for verb in (NEW, STOCK)},
    }
    made += [Line("soak", f"{what} >= 1", value, value >= 1) for what, value in happened.items()]
    for name in LIVES:
        grown = growth(diary.memory.get(name, []), whole)
        hold = f"growth of {name} <= {ALLOWED >> 20} MiB"
        note = "" if grown is not None else "too few samples"
        made.append(
            Line("soak", hold, None if grown is None else grown >> 20, grown is not None and grown <= ALLOWED, note)
        )
    for what, told in (("members lost", diary.lost), ("engines that hold something", diary.held)):
        made.append(Line("soak", f"{what} == 0", len(told), not told, "; ".join(told)))
    return made


def pause(made: Fleet, running: Load, seconds: float, diary: Diary) -> None:
    """Let time pass, and take the memory of those who live.

    Raises:
        RigError: the generator ended.
    """
    until = time.monotonic() + seconds
    while True:
        running.check()
        for name in LIVES:
            diary.memory.setdefault(name, []).append((running.now, made.memory(name)))
        if time.monotonic() >= until:
            return
        time.sleep(max(0.0, min(2.0, until - time.monotonic())))


def retractions(made: Fleet, name: str) -> int:
    """Retractions that the engine at a place has told of, one rank of each."""
    return sum(event.name == "offload" for event in made.events(name)) // 2


def disturb(made: Fleet, running: Load, until: float, chance: Random, diary: Diary, say: Callable[[str], None]) -> None:
    """Kill, turn and start members until the load has run for ``until`` seconds; the first kills take turns.

    Raises:
        RigError: a member did not come up again.
    """
    pause(made, running, chance.uniform(*CALM), diary)
    while running.now < until:
        number = sum(diary.kills.values())
        name = VICTIMS[number] if number < len(VICTIMS) else chance.choice(VICTIMS)
        place = made.places[name]
        diary.retractions += retractions(made, name) if name.startswith("D") else 0
        diary.lost += made.lost()
        if place.running is not None:
            place.running.kill(name)
        diary.kills[name] += 1
        pause(made, running, chance.uniform(0.0, 3.0), diary)
        made.stop(name)
        if len(place.variants) > 1:
            wanted = NEW if place.now == STOCK else STOCK
            made.turn(name, wanted)
            diary.turns[wanted] += 1
        made.start(name)
        say(f"{name} was killed and is {place.now} again, {running.now:.0f} s of {until:.0f}")
        pause(made, running, chance.uniform(*CALM), diary)


@click.command()
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), default=30.0, show_default=True)
@click.option("--rate", type=float, default=0.3, show_default=True, help="Requests per second.")
@click.option("--leave", type=float, default=0.1, show_default=True, help="Share of requests whose client leaves.")
@click.option("--count", "kinds", type=click.IntRange(1), default=8, show_default=True, help="Different prompts.")
@click.option("--length", type=click.IntRange(1), default=90, show_default=True, help="Tokens of the shortest.")
@click.option("--new", type=click.IntRange(2), default=24, show_default=True)
@click.option("--seed", type=int, default=71, show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the result here as JSON.")
def main(
    minutes: float, rate: float, leave: float, kinds: int, length: int, new: int, seed: int, out: Path | None
) -> None:
    """Soak the rig. Exit code 1: a request without an end, a wrong text, memory that grew, something still held."""
    began = time.monotonic()
    chance = Random(seed)
    diary = Diary()

    def say(text: str) -> None:
        click.echo(f"[{time.monotonic() - began:5.0f} s] {text}", err=True)

    texts = prompts(kinds, length, seed)
    # Twice the time: who is started last may be late. The soak ends the load.
    requests = [
        Request(number, number / rate, 0, texts[number % kinds], chance.randrange(1, new) * (chance.random() < leave))
        for number in range(int(120 * minutes * rate) + 60)
    ]
    try:
        with fleet(boots.load(BOOT), PLACES, say) as made:
            made.start_all()
            endpoint = endpoint_of(made.places["router"].port, made.places["D0"].port, LIMIT)
            expected = expect(endpoint, texts, new)
            say(f"{len(set(expected))} different texts of {kinds} prompts")
            with load(endpoint, requests, new) as running:
                try:
                    disturb(made, running, 60 * minutes, chance, diary, say)
                except (RigError, KeyboardInterrupt) as error:
                    # What was seen until then is told all the same.
                    diary.lost.append(str(error) or "interrupted")
                whole = running.now
                running.end(LIMIT + 10)
            diary.lost += made.lost()
            diary.retractions += sum(retractions(made, name) for name in ("D0", "D1"))
            diary.held = [still for name in ("P0", "P1", "D0", "D1") if (still := made.held(name))]
            sent = running.log.sent
    except RigError as error:
        for text in error.tail:
            say("  " + text)
        say(f"{error.kind}: {error}")
        sys.exit(1)
    found = ends(sent, expected, LIMIT)
    lines = judge(found, diary, whole)
    slowest = max(((one.ended or 0.0) - one.started for one in sent), default=0.0)
    told: dict[str, object] = {
        **provenance.of(__file__, seed),
        "label": "CPU, TCP loopback",
        "rate": rate,
        "limit_s": LIMIT,
        "seconds": round(whole, 1),
        "requests": len(sent),
        "ends": dict(sorted(found.items())),
        "slowest_s": round(slowest, 1),
        "kills": dict(diary.kills),
        "turns": dict(diary.turns),
        "retractions": diary.retractions,
        "memory_mib": {name: [size >> 20 for _, size in sizes] for name, sizes in diary.memory.items()},
        "lines": [line.as_json() for line in lines],
        "refusals": Counter(f"{one.failure.value}: {one.detail}"[:200] for one in sent if one.failure is not None),
    }
    if out is not None:
        out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    for key in ("seconds", "requests", "ends", "slowest_s", "kills", "turns", "retractions"):
        click.echo(f"{key}: {told[key]}")
    for line in lines:
        measured = "-" if line.measured is None else f"{line.measured:g}"
        click.echo(f"{line.hold:<40} {measured:<8} {'ok' if line.holds else 'FAIL ' + line.note}")
    click.echo(verdict(lines)[-1])
    sys.exit(not all(line.holds for line in lines))


if __name__ == "__main__":
    main()
