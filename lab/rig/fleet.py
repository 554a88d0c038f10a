"""Members that stop, turn and start one by one while the others serve: each has a keeper of its own.

A *place* is a member with its ports; what stands there is one of several variants, by name: a stock engine, a patched
one with its gates. The tree of a place that has both is its own copy, which the bundle's tool turns.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from lab.rig import client, deployment, engine, environment, leash, ports, runner, trees
from lab.rig import tree as engine_tree
from lab.rig.boot import Boot, Part, RouterPart
from lab.rig.deployment import Deployment, Event
from lab.rig.errors import RigError
from lab.rig.member import Spec
from lab.rig.tree import RELEASES, Tree

STOCK, NEW = "stock", "new"
Say = Callable[[str], None]


@dataclass
class Place:
    """One member.

    Attributes:
        variants: names of the boot's engines or routers, by ``STOCK`` and ``NEW``.
        now: the variant that stands there.
        tree: its own, where it has both variants.
    """

    name: str
    variants: Mapping[str, str]
    port: int
    other_port: int
    now: str
    tree: Tree | None = None
    running: Deployment | None = None
    starts: int = 0


@dataclass
class Fleet:
    """The places of a boot. Made by ``fleet``, which ends whatever still runs.

    Attributes:
        places: by name; a router comes after the engines behind it.
    """

    boot: Boot
    places: Mapping[str, Place]
    trees_of: Mapping[tuple[str, str], Tree]
    pythons: Mapping[str, Path]
    say: Say = lambda text: None
    limit: float = 300.0
    packages: dict[str, Path | None] = field(default_factory=dict)
    starters: ThreadPoolExecutor | None = None

    def member(self, place: Place) -> Part | RouterPart:
        """What the boot says of the variant that stands there."""
        name = place.variants[place.now]
        return next((one for one in self.boot.routers if one.name == name), None) or self.boot.part(name)

    def engine(self, place: Place) -> engine.Engine:
        """The engine of a place."""
        part = self.member(place)
        if not isinstance(part, Part):
            raise RigError("scenario", f"{place.name} is no engine")
        found = dict(self.trees_of)
        if place.tree is not None:
            part = replace(part, tree="own")
            found[part.role, "own"] = place.tree
        part = replace(part, name=place.name)
        return runner.make_engine(part, found, self.pythons, place.port, place.other_port)

    def spec(self, place: Place, folder: Path) -> Spec:
        """How the member of a place is started."""
        part = self.member(place)
        if isinstance(part, Part):
            return engine.engine_spec(self.engine(place), folder)
        build = part.build or "wheel"
        if build not in self.packages:
            self.packages[build] = engine.router_package(build, folder, self.pythons["decode"])
        behind = {name: self.engine(self.places[name]) for name in (*part.prefill, *part.decode)}
        made = engine.router_spec(
            place.name,
            self.pythons["decode"],
            place.port,
            place.other_port,
            [behind[name] for name in part.prefill],
            [behind[name] for name in part.decode],
            self.packages[build],
            part.flags,
            part.env,
        )
        # Its keeper knows of nobody else.
        return replace(made, after=())

    def start(self, name: str) -> None:
        """Start the member of a place and wait until it is ready.

        Raises:
            RigError: it crashed, or is not ready in time.
        """
        place = self.places[name]
        place.starts += 1
        folder = deployment.new_folder(f"{self.boot.name}-{name}-{place.starts}")
        running = Deployment(folder, [self.spec(place, folder)])
        running.up(self.limit)
        place.running = running
        part = self.member(place)
        if isinstance(part, RouterPart):
            deployment.wait_for_router(place.port, len(part.prefill) + len(part.decode), running.check, self.limit)

    def start_all(self) -> None:
        """Start every place, the engines at once and the routers after them.

        Raises:
            RigError: as ``start``.
        """
        routers = [name for name, place in self.places.items() if isinstance(self.member(place), RouterPart)]
        engines = [name for name in self.places if name not in routers]
        # A keeper ends with the thread that started it, so these live as long as the fleet.
        self.starters = ThreadPoolExecutor(len(engines))
        for started in [self.starters.submit(self.start, name) for name in engines]:
            started.result()
        for name in routers:
            self.start(name)
        self.say(f"{', '.join(self.places)} are ready")

    def stop(self, name: str) -> None:
        """End the member of a place at once, as its host would lose it; nothing is drained."""
        place = self.places[name]
        if place.running is not None:
            place.running.down()
            place.running = None

    def end(self) -> None:
        """End all members."""
        for name in reversed(list(self.places)):
            self.stop(name)
        if self.starters is not None:
            self.starters.shutdown()

    def turn(self, name: str, variant: str) -> None:
        """Let another variant stand at a place that is stopped.

        Raises:
            RigError: kinds ``apply``, ``drift``, and ``scenario`` for a variant that the place does not have.
        """
        place = self.places[name]
        if variant not in place.variants or place.running is not None:
            raise RigError("scenario", f"{name} runs, or has no variant {variant!r}")
        if place.tree is not None and variant != place.now:
            runner.turn_trees({(place.tree.role, "own"): place.tree}, "apply" if variant == NEW else "revert", self.say)
        place.now = variant

    def lost(self) -> list[str]:
        """What ended by itself, by name and reason."""
        found = []
        for place in self.places.values():
            if place.running is not None:
                try:
                    place.running.check()
                except RigError as error:
                    found.append(f"{place.name}: {error}")
        return found

    def memory(self, name: str) -> int:
        """Proportional set size in bytes of all processes of a place; 0 while it does not run."""
        running = self.places[name].running
        if running is None:
            return 0
        with contextlib.suppress(RigError):
            return sum(leash.memory(member["pid"]) for member in running.state()["members"].values())
        return 0

    def events(self, name: str) -> list[Event]:
        """All lines of the observer of the member that runs at a place."""
        running = self.places[name].running
        return [] if running is None else deployment.parse_events(running.log(name))

    def held(self, name: str, within: float = 60.0) -> str:
        """What an engine still holds once it is idle, as words; empty if nothing."""
        place = self.places[name]
        if place.running is None:
            return f"{name} does not run"
        place.running.mark()
        try:
            client.flush(place.port, within)
        except OSError as error:
            return f"{name} is not idle after {within:.0f} s ({error})"
        part = self.member(place)
        ranks = part.tp if isinstance(part, Part) else 1
        until = time.monotonic() + runner.KEEPER_LAG
        told: list[Event] = []
        while len(told) < ranks and time.monotonic() < until:
            told = [event for event in place.running.events(name) if event.name == "pools"]
            time.sleep(0.05)  # What an engine printed is in its log once the keeper's turn came.
        if len(told) < ranks:
            return f"{name} does not say what it holds"
        left = {key: sum(abs(event.number(key)) for event in told) for key in ("tokens", "requests")}
        return f"{name} holds {left['tokens']} tokens and {left['requests']} requests" if any(left.values()) else ""


@contextmanager
def fleet(boot: Boot, variants: Mapping[str, Mapping[str, str]], say: Say) -> Iterator[Fleet]:
    """Make the places, each with its first variant, and start nothing; at the end stop all that runs.

    Args:
        variants: by place, the names of the boot's members by variant; engines before the routers.

    Raises:
        RigError: kinds ``memory``, ``environment``, ``tree`` and others.
    """
    runner.need(boot, {names[next(iter(names))] for names in variants.values()})
    parts = {part.name: part for part in boot.parts}
    chosen = ports.free(2 * len(variants))
    pythons = {role: environment.ensure(release, say) for role, release in sorted(RELEASES.items())}
    # A place with two variants turns its own tree: only engines with one variant need one as it is made here.
    whole = {
        (parts[name].role, parts[name].tree if len(names) == 1 else "stock")
        for names in variants.values()
        for name in names.values()
        if name in parts
    }
    trees_of = trees.gather({}, whole, allow_drift=False, say=say)
    deployment.runs_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="own-", dir=deployment.runs_folder()) as folder:
        places = {}
        for number, (name, names) in enumerate(variants.items()):
            first = next(iter(names))
            place = Place(name, names, chosen[2 * number], chosen[2 * number + 1], first)
            part = parts.get(names[first])
            if part is not None and len(names) > 1:
                if first != STOCK:
                    raise RigError("scenario", f"{name}: a tree that is turned begins as {STOCK}")
                root = Path(folder) / name / "tree"
                shutil.copytree(trees_of[part.role, "stock"].root, root)
                place.tree = engine_tree.find(part.role, root)
            places[name] = place
        made = Fleet(boot, places, trees_of, pythons, say)
        try:
            yield made
        finally:
            made.end()
