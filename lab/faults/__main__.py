"""Stop the transaction everywhere, on the real bases, and print how often it was stopped and where it ended."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from lab.faults.power import Losses
from lab.faults.scene import DIRECTIONS, Scene, real
from lab.faults.sweep import KINDS, Sweep, swept
from patchbundle import manifest

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Options:
    """How far the looks go; what each means is in the options' help."""

    every: int
    every_read: bool
    middles: int
    pairs: int
    bound: int
    deeper: int
    seed: int
    jobs: int


@dataclass
class Found:
    """The points and states of one series, and the seconds of CPU time that they took."""

    base: str
    operations: int
    points: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    choices: int = 0
    states: int = 0
    seconds: float = 0.0

    def add(self, other: Found) -> None:
        self.points += other.points
        self.ends += other.ends
        self.choices += other.choices
        self.states += other.states
        self.seconds += other.seconds


@contextmanager
def scene_of(base: str) -> Iterator[Scene]:
    bundle = manifest.load(REPOSITORY)
    # In memory where that is to be had: what is synchronised is read from the calls, not from a disk.
    memory = Path("/dev/shm")
    with TemporaryDirectory(prefix="faults-", dir=memory if os.access(memory, os.W_OK) else None) as place:
        yield real(bundle, bundle.bases[base], Path(place))


def sweep(base: str, part: int, options: Options) -> Found:
    """Every ``jobs``-th point of a base, from ``part`` on."""
    began = time.process_time()
    with scene_of(base) as scene:
        found = Found(base, scene.operations)
        points = Sweep(scene, options.middles, options.pairs, options.every_read).points()
        mine = (point for number, point in enumerate(points) if number % options.jobs == part)
        for point, end in swept(mine, options.every, options.seed):
            found.points[point.kind] += 1
            found.ends[end] += 1
    found.seconds = time.process_time() - began
    return found


def lose_power(base: str, direction: str, options: Options) -> Found:
    """The losses of power in one direction."""
    began = time.process_time()
    with scene_of(base) as scene:
        losses = Losses(scene, options.bound, options.deeper, options.every, options.seed)
        losses.check(direction)
        found = Found(base, scene.operations, choices=losses.choices, states=losses.states)
    found.seconds = time.process_time() - began
    return found


@click.command()
@click.option("--role", multiple=True, help="One series; again for more. Default: all.")
@click.option("--every", default=1, show_default=True, help="Take one point, and one moment, of so many, at random.")
@click.option("--every-read", is_flag=True, help="Fail each read, not only three of those from one place in the code.")
@click.option("--middles", default=8, show_default=True, help="Recoveries that are stopped, in each direction; 0: all.")
@click.option("--pairs", default=4, show_default=True, help="Second recoveries that are killed, after each first one.")
@click.option("--bound", default=8, show_default=True, help="Choices of what is lost, at each moment of a run.")
@click.option("--deeper", default=2, show_default=True, help="Recoveries that lose their power, of each sort.")
@click.option("--seed", default=0, show_default=True, help="Of all that is random here.")
@click.option("--jobs", default=os.cpu_count() or 1, show_default=True, help="Processes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(role: tuple[str, ...], as_json: bool, **given: int) -> None:
    """Kill and fail every call of apply, revert and recover; lose the power at every call. A wrong end stops it."""
    options = Options(**given)  # type: ignore[arg-type]
    bases = {base.id: base for base in manifest.load(REPOSITORY).bases.values() if not role or base.role in role}
    results: dict[str, Found] = {}
    with ProcessPoolExecutor(options.jobs, get_context("fork")) as pool:
        tasks = [pool.submit(sweep, base, part, options) for base in bases for part in range(options.jobs)]
        tasks += [pool.submit(lose_power, base, direction, options) for base in bases for direction in DIRECTIONS]
        for done, task in enumerate(tasks, 1):
            found = task.result()
            click.echo(f"{done} of {len(tasks)}: {found.base}, {found.seconds:.0f} s", err=True)
            if found.base in results:
                results[found.base].add(found)
            else:
                results[found.base] = found
    if as_json:
        click.echo(json.dumps({"options": asdict(options), "series": [asdict(found) for found in results.values()]}))
        return
    click.echo(f"{options}\n")
    click.echo(
        f"| series | operations | {' | '.join(KINDS)} | ended old | ended new | power lost: choices | trees | CPU s |"
    )
    click.echo("|---|" + "---|" * (len(KINDS) + 6))
    for found in results.values():
        cells = [found.base, found.operations, *(found.points[kind] for kind in KINDS)]
        cells += [found.ends["old"], found.ends["new"], found.choices, found.states, round(found.seconds)]
        click.echo(f"| {' | '.join(map(str, cells))} |")
    total = sum(sum(found.points.values()) for found in results.values())
    click.echo(f"\n{total} points and {sum(found.states for found in results.values())} trees: all old or new")


if __name__ == "__main__":
    main()
