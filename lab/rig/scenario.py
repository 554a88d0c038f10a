"""A scenario: what is sent to the engines of a boot, what is done to them, and what must hold. One file each."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

from lab.rig.errors import RigError
from lab.rig.measure import MEASURES

FOLDER = Path(__file__).with_name("scenarios")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_HOLD = re.compile(r"(\w+)\(([^()]*)\)\s*(==|!=|<=|>=|<|>)\s*(-?\d+(?:\.\d+)?)")
_OPERATION = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
TURNS = ("apply", "revert")


@dataclass(frozen=True)
class Send:
    """Requests that are sent.

    Attributes:
        name: what the holds call it.
        to: ``[prefill, decode]`` for a pair, ``[router]`` or ``[engine]`` alone.
        seed, count, length, vary, prefix: the prompts, see ``client.prompts``.
        new: tokens each generates.
        together: all at once; else one after another.
        gathered: P gets one after another, and D starts none before all are there: the same batches in every run.
        flush: engines whose radix cache is emptied first.
        timeout: seconds for each request.
        kill: member that is killed with all its processes meanwhile.
        says: it is to end by itself, with these words in its log; what is left of it is killed then. With no member to
            kill, the words of which each error counted by ``told`` must hold all.
        at: when: after so many tokens of any request, or once the member printed the observer's line of this name.
        leave: tokens after which each client closes its connection; 0 stays to the end.
        stream: read the answers as streams.
        fails: the requests are meant to fail, so nobody waits to learn whether an engine was lost by it.
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
    gathered: bool = False
    flush: tuple[str, ...] = ()
    timeout: float = 400.0
    kill: str = ""
    says: str = ""
    at: int | str = 1
    leave: int = 0
    stream: bool = False
    fails: bool = False

    @property
    def members(self) -> set[str]:
        """Names of the members that it needs."""
        return {*self.to, *self.flush, self.kill} - {""}


@dataclass(frozen=True)
class Drain:
    """Engines are asked what they still hold, once they say that they are idle; then their caches are emptied.

    Attributes:
        name: what the holds call it.
        engines: names of the engines.
        within: seconds within which each must become idle.
    """

    name: str
    engines: tuple[str, ...]
    within: float = 60.0

    @property
    def members(self) -> set[str]:
        """Names of the members that it needs."""
        return set(self.engines)


@dataclass(frozen=True)
class Turn:
    """The deployment is ended, the bundle is applied to (or reverted from) its own trees, and it is started again."""

    verb: str

    @property
    def members(self) -> set[str]:
        """It needs nobody."""
        return set()


@dataclass(frozen=True)
class Refusal:
    """One engine more is started by itself, and must not come up.

    Attributes:
        name: what the holds call it.
        engine: of the boot; it is not started with the others.
        says: words among its last lines.
    """

    name: str
    engine: str
    says: str

    @property
    def members(self) -> set[str]:
        """Nobody whom the boot has to start for it."""
        return set()


Step = Send | Drain | Turn | Refusal


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
        return bool(_OPERATION[self.operator](value, self.bound))


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
        """Names of the members that it needs."""
        return {name for step in self.steps for name in step.members}

    @property
    def refused(self) -> set[str]:
        """Names of the engines that are started by themselves."""
        return {step.engine for step in self.steps if isinstance(step, Refusal)}


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
    hold = Hold(text.strip(), measure, arguments, operator, float(bound))
    # No measure but the signed ones is ever below 0.
    if not MEASURES[measure].signed and operator in (">", ">=") and hold.compare(0.0):
        raise RigError("scenario", f"{text!r} holds whatever is measured")
    return hold


def _send(entry: Mapping[str, Any], where: str, before: Mapping[str, Step]) -> Send:
    _known(entry, {"send", "again", *Send.__dataclass_fields__} - {"name"}, where)
    values: dict[str, Any] = {}
    if "again" in entry:
        earlier = before.get(entry["again"])
        if not isinstance(earlier, Send):
            raise RigError("scenario", f"{where}: again = {entry['again']!r} names no send before it")
        # The same requests; what was done to the engines meanwhile is not done again.
        once = ("flush", "kill", "says", "at", "leave")
        values = {key: getattr(earlier, key) for key in Send.__dataclass_fields__ if key not in once}
    values.update({key: value for key, value in entry.items() if key not in ("send", "again")})
    values["name"] = entry["send"]
    for key in ("to", "flush"):
        values[key] = tuple(values.get(key, ()))
    send = Send(**values)
    if len(send.to) not in (1, 2):
        raise RigError("scenario", f"{where}: to = [prefill, decode], [router] or [engine]")
    if send.gathered and len(send.to) != 2:
        raise RigError("scenario", f"{where}: only a pair's requests can be gathered")
    if send.says and not send.kill and not send.fails:
        text = "without kill = the member that says it, or fails = true, where clients are told it"
        raise RigError("scenario", f"{where}: says = {send.says!r} {text}")
    if send.count < 1 or send.new < 1 or send.length < 1:
        raise RigError("scenario", f"{where}: count, new and length are at least 1")
    if send.prefix > send.length:
        raise RigError("scenario", f"{where}: the shared prefix is longer than the prompt")
    return send


def _need_an_end(where: str, send: Send, holds: Sequence[Hold]) -> None:
    """Refuse to count the failed requests of ``send`` alone: one whose client gave up waiting is a failed one too.

    Raises:
        RigError: kind ``scenario``.
    """
    about = [hold for hold in holds if hold.arguments[0].partition(".")[0] == send.name]
    if send.says and not send.kill and not any(hold.measure == "told" for hold in about):
        raise RigError("scenario", f"{where}: says = {send.says!r} asks for told({send.name}), which looks for it")
    # Who ended by words that were asked for took the requests with it.
    if (send.says and send.kill) or not any(hold.measure == "errors" and not hold.compare(0.0) for hold in about):
        return
    if not any(hold.measure == "told" and hold.operator == "==" and hold.bound > 0 for hold in about):
        seconds = [hold for hold in about if hold.measure == "seconds"]
        ended = any(hold.operator in ("<", "<=") and hold.bound < send.timeout for hold in seconds)
        left = any(hold.operator in (">", ">=") and hold.bound >= send.timeout for hold in seconds)
        if not (ended or left):
            raise RigError(
                "scenario",
                f"{where}: errors({send.name}) would also count clients that gave up after {send.timeout:g} s; "
                f"add told({send.name}) == N, or seconds({send.name}) below or from that time on",
            )


def _known(entry: Mapping[str, Any], keys: set[str], where: str) -> None:
    if unknown := set(entry) - keys:
        raise RigError("scenario", f"{where}: unknown keys {sorted(unknown)}")


def _step(entry: Mapping[str, Any], where: str, before: Mapping[str, Step]) -> Step:
    if "send" in entry:
        return _send(entry, where, before)
    if "drain" in entry:
        _known(entry, {"drain", "engines", "within"}, where)
        if not entry.get("engines"):
            raise RigError("scenario", f"{where}: drain needs engines = [...]")
        return Drain(entry["drain"], tuple(entry["engines"]), float(entry.get("within", Drain.within)))
    if "turn" in entry:
        _known(entry, {"turn"}, where)
        if entry["turn"] not in TURNS:
            raise RigError("scenario", f"{where}: turn = one of {', '.join(TURNS)}")
        return Turn(entry["turn"])
    if "refusal" in entry:
        _known(entry, {"refusal", "engine", "says"}, where)
        if not entry.get("engine") or not entry.get("says"):
            raise RigError("scenario", f"{where}: refusal needs engine = and says =")
        return Refusal(entry["refusal"], entry["engine"], entry["says"])
    raise RigError("scenario", f"{where}: neither send, drain, turn nor refusal")


def parse(name: str, text: str) -> Scenario:
    """Read the text of a scenario file.

    Raises:
        RigError: kind ``scenario``.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RigError("scenario", f"scenario {name}: {error}") from error
    _known(data, {"about", "boot", "step", "hold"}, f"scenario {name}")
    steps: list[Step] = []
    named: dict[str, Step] = {}
    for index, entry in enumerate(data.get("step", [])):
        where = f"scenario {name}, step {index + 1}"
        step = _step(entry, where, named)
        if not isinstance(step, Turn):
            if step.name in named or not _NAME.fullmatch(step.name):
                raise RigError("scenario", f"{where}: {step.name!r} is no new name")
            named[step.name] = step
        steps.append(step)
    holds = tuple(parse_hold(line) for line in data.get("hold", []))
    if not any(isinstance(step, Send) for step in steps) or not holds:
        raise RigError("scenario", f"scenario {name}: it sends nothing, or nothing must hold")
    for hold in holds:
        for argument in hold.arguments:
            if argument.partition(".")[0] not in named:
                raise RigError("scenario", f"scenario {name}: {hold.text!r} names no send or drain {argument!r}")
    for step in steps:
        if isinstance(step, Send):
            _need_an_end(f"scenario {name}", step, holds)
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
