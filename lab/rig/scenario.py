"""A scenario: what is sent to the engines of a boot, what is done to them, and what must hold. One file each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

from lab.rig.errors import RigError
from lab.rig.measure import MEASURES

FOLDER = Path(__file__).with_name("scenarios")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_HOLD = re.compile(r"(\w+)\(([^()]*)\)\s*(==|!=|<=|>=|<|>)\s*(-?\d+(?:\.\d+)?)")
_SEND_KEYS = {"send", "to", "seed", "count", "length", "vary", "prefix", "new", "together", "flush", "timeout", "again"}


@dataclass(frozen=True)
class Send:
    """Requests that are sent.

    Attributes:
        name: what the holds call it.
        to: ``[prefill, decode]`` for a pair, ``[router]`` or ``[engine]`` alone.
        seed, count, length, vary, prefix: the prompts, see ``client.prompts``.
        new: tokens each generates.
        together: all at once; else one after another.
        flush: engines whose radix cache is emptied first.
        timeout: seconds for each request.
    """

    name: str
    to: tuple[str, ...]
    seed: int = 1
    count: int = 3
    length: int = 100
    vary: int = 0
    prefix: int = 0
    new: int = 24
    together: bool = False
    flush: tuple[str, ...] = ()
    timeout: float = 240.0


@dataclass(frozen=True)
class Kill:
    """The engine ``engine`` is killed with all its processes, ``after`` seconds into the next send."""

    engine: str


Step = Send | Kill


@dataclass(frozen=True)
class Hold:
    """One line of what must hold: a measure of named sends or engines, compared with a number."""

    text: str
    measure: str
    arguments: tuple[str, ...]
    operator: str
    bound: float

    def compare(self, value: float) -> bool:
        """Whether ``value`` is as demanded."""
        return {
            "==": value == self.bound,
            "!=": value != self.bound,
            "<=": value <= self.bound,
            ">=": value >= self.bound,
            "<": value < self.bound,
            ">": value > self.bound,
        }[self.operator]


@dataclass(frozen=True)
class Scenario:
    """One scenario.

    Attributes:
        boot: the boot it runs on.
        steps: in order.
        holds: all of them must hold; one that names a stock fault makes the scenario fail once the fault is gone.
    """

    name: str
    about: str
    boot: str
    steps: tuple[Step, ...]
    holds: tuple[Hold, ...]

    @property
    def engines(self) -> set[str]:
        """Names of the members that it sends to."""
        return {name for step in self.steps if isinstance(step, Send) for name in step.to}


def parse_hold(text: str) -> Hold:
    """Read ``measure(argument, ...) operator number``.

    Raises:
        RigError: kind ``scenario``; it is no such line, or the measure is unknown or takes other arguments.
    """
    match = _HOLD.fullmatch(text.strip())
    if match is None:
        raise RigError("scenario", f"{text!r} is not of the form measure(name, ...) < number")
    measure, inside, operator, bound = match.groups()
    arguments = tuple(word.strip() for word in inside.split(",") if word.strip())
    if measure not in MEASURES:
        raise RigError("scenario", f"{text!r}: no measure {measure!r}; known: {', '.join(sorted(MEASURES))}")
    if len(arguments) != MEASURES[measure].arguments:
        raise RigError("scenario", f"{text!r}: {measure} takes {MEASURES[measure].arguments} names")
    return Hold(text.strip(), measure, arguments, operator, float(bound))


def _send(entry: Mapping[str, Any], where: str, before: Mapping[str, Send]) -> Send:
    unknown = set(entry) - _SEND_KEYS
    if unknown:
        raise RigError("scenario", f"{where}: unknown keys {sorted(unknown)}")
    values: dict[str, Any] = {}
    if "again" in entry:
        if entry["again"] not in before:
            raise RigError("scenario", f"{where}: again = {entry['again']!r} names no send before it")
        earlier = before[entry["again"]]
        values = {key: getattr(earlier, key) for key in Send.__dataclass_fields__ if key != "flush"}
    values.update({key: value for key, value in entry.items() if key not in ("send", "again")})
    values["name"] = entry["send"]
    for key in ("to", "flush"):
        values[key] = tuple(values.get(key, ()))
    if len(values["to"]) not in (1, 2):
        raise RigError("scenario", f"{where}: to = [prefill, decode], [router] or [engine]")
    if values.get("count", 3) < 1 or values.get("new", 24) < 1 or values.get("length", 100) < 1:
        raise RigError("scenario", f"{where}: count, new and length are at least 1")
    if values.get("prefix", 0) > values.get("length", 100):
        raise RigError("scenario", f"{where}: the shared prefix is longer than the prompt")
    return Send(**values)


def parse(name: str, text: str) -> Scenario:
    """Read the text of a scenario file.

    Raises:
        RigError: kind ``scenario``.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RigError("scenario", f"scenario {name}: {error}") from error
    unknown = set(data) - {"about", "boot", "step", "hold"}
    if unknown:
        raise RigError("scenario", f"scenario {name}: unknown keys {sorted(unknown)}")
    steps: list[Step] = []
    sends: dict[str, Send] = {}
    for index, entry in enumerate(data.get("step", [])):
        where = f"scenario {name}, step {index + 1}"
        if "kill" in entry:
            if set(entry) != {"kill"}:
                raise RigError("scenario", f"{where}: unknown keys {sorted(set(entry) - {'kill'})}")
            steps.append(Kill(str(entry["kill"])))
        elif "send" in entry:
            send = _send(entry, where, sends)
            if send.name in sends or not _NAME.fullmatch(send.name):
                raise RigError("scenario", f"{where}: {send.name!r} is no new name")
            sends[send.name] = send
            steps.append(send)
        else:
            raise RigError("scenario", f"{where}: neither send nor kill")
    holds = tuple(parse_hold(line) for line in data.get("hold", []))
    if not sends or not holds:
        raise RigError("scenario", f"scenario {name}: it sends nothing, or nothing must hold")
    for hold in holds:
        for argument in hold.arguments:
            if argument.partition(".")[0] not in sends:
                raise RigError("scenario", f"scenario {name}: {hold.text!r} names no send {argument!r}")
    if "boot" not in data:
        raise RigError("scenario", f"scenario {name}: it names no boot")
    return Scenario(name, str(data.get("about", "")), str(data["boot"]), tuple(steps), holds)


def load(name: str, folder: Path = FOLDER) -> Scenario:
    """Read the scenario ``name``.

    Raises:
        RigError: kind ``scenario``.
    """
    path = folder / f"{name}.toml"
    if not _NAME.fullmatch(name) or not path.is_file():
        raise RigError("scenario", f"no scenario {name!r}; known: {', '.join(names(folder))}")
    return parse(name, path.read_text(encoding="utf-8"))


def names(folder: Path = FOLDER) -> list[str]:
    """Names of all scenarios, sorted."""
    return sorted(found.stem for found in folder.glob("*.toml"))
