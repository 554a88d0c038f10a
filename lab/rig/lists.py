"""Which scenarios run together: the short list of ``make rig``, and everything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tomllib

from lab.rig import boot, scenario
from lab.rig.boot import Boot
from lab.rig.errors import RigError
from lab.rig.scenario import Scenario

SHORT = Path(__file__).with_name("short.toml")
MOST_BOOTS = 6
# Bytes that a boot of each list may take, as a proportional set size.
MOST_MEMORY = {"short": 12 << 30, "full": 18 << 30}


@dataclass(frozen=True)
class Entry:
    """One boot of a list: its scenarios, and the seconds it took when the list was written."""

    boot: Boot
    scenarios: tuple[Scenario, ...]
    seconds: int = 0


def group(names: list[str]) -> list[Entry]:
    """Scenarios by boot, each boot once, in the order in which the names first need them.

    Raises:
        RigError: kind ``scenario``.
    """
    found: dict[str, list[Scenario]] = {}
    for name in names:
        one = scenario.load(name)
        found.setdefault(one.boot, []).append(one)
    return [Entry(boot.load(name), tuple(scenarios)) for name, scenarios in found.items()]


def short(path: Path = SHORT) -> list[Entry]:
    """The short list.

    Raises:
        RigError: kind ``scenario``; more boots than are allowed, one named twice, or a scenario of another boot.
    """
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("boot", [])
    if not 0 < len(entries) <= MOST_BOOTS:
        raise RigError("scenario", f"{path.name} has {len(entries)} boots; 1 to {MOST_BOOTS} are allowed")
    made: list[Entry] = []
    for entry in entries:
        scenarios = tuple(scenario.load(name) for name in entry["scenarios"])
        for one in scenarios:
            if one.boot != entry["name"]:
                raise RigError("scenario", f"{path.name}: {one.name} runs on {one.boot}, not on {entry['name']}")
        if not scenarios or entry["name"] in [before.boot.name for before in made]:
            raise RigError("scenario", f"{path.name}: {entry['name']} is named twice or has no scenario")
        made.append(Entry(boot.load(entry["name"]), scenarios, int(entry["seconds"])))
    return made


def full() -> list[Entry]:
    """Every scenario there is."""
    return group(scenario.names())
