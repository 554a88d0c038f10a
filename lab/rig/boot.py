"""A boot: which engines stand beside each other, with which flags, gates and trees. One small file each.

Scenarios whose engines take the same arguments share a boot, since starting the engines is most of the time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomllib

from lab.rig import models
from lab.rig.errors import RigError

FOLDER = Path(__file__).with_name("boots")
TREES = ("stock", "patched", "own")
MODES = ("prefill", "decode", "alone")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_ENGINE_KEYS = {"like", "role", "mode", "tree", "flags", "env", "gates", "tp", "dtype", "tokens", "model", "gated"}


@dataclass(frozen=True)
class Part:
    """One engine of a boot as its file names it.

    Attributes:
        role: ``prefill`` or ``decode``: which release.
        mode: what it does in the pair; ``alone`` for an engine that does both.
        tree: ``stock``, ``patched``, or ``own``: a copy of stock for this run alone, which a scenario may turn.
        gates: switches of our patches; listed apart from ``env`` so that a reader sees what is on.
        gated: without its gates it does not start, or what it is sent ends the engine behind it.
        tp: tensor parallel ranks, a process each.
    """

    name: str
    role: str
    mode: str
    tree: str = "stock"
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    gates: Mapping[str, str] = field(default_factory=dict)
    tp: int = 1
    dtype: str = "float32"
    tokens: int = 4096
    model: str = ""
    gated: bool = False


DP_AWARE = "--dp-aware"


@dataclass(frozen=True)
class RouterPart:
    """The router of a boot: the engines behind it, in order, and its flags.

    ``build`` is ``stock`` or ``patched`` for one built from this repository; empty for that of the command line.
    """

    name: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    build: str = ""

    def __post_init__(self) -> None:
        # A stock router takes "127.0.0.1:PORT@0" for a host of another name, and asks the network for it.
        if DP_AWARE in self.flags and self.build != "patched":
            raise RigError("scenario", f"router {self.name}: {DP_AWARE} before P and D needs build = 'patched'")


@dataclass(frozen=True)
class RefuserPart:
    """A stand-in front of the prefill engine ``of`` that answers every request with ``status`` after ``seconds``."""

    name: str
    of: str
    status: int = 500
    seconds: float = 1.0


@dataclass(frozen=True)
class Boot:
    """One set of engines, with their routers.

    Attributes:
        memory: MiB of proportional set sizes that all of it was seen to take; 0 where that was not measured.
    """

    name: str
    about: str
    model: str
    parts: tuple[Part, ...]
    routers: tuple[RouterPart, ...] = ()
    refusers: tuple[RefuserPart, ...] = ()
    memory: int = 0

    def part(self, name: str) -> Part:
        """The engine called ``name``.

        Raises:
            RigError: kind ``scenario``; there is none.
        """
        for part in self.parts:
            if part.name == name:
                return part
        raise RigError("scenario", f"boot {self.name} has no engine {name!r}")

    @property
    def needs_patched(self) -> set[str]:
        """Roles of which a patched tree is needed."""
        return {part.role for part in self.parts if part.tree == "patched"}

    def trees(self, names: set[str]) -> set[tuple[str, str]]:
        """Role and kind of every tree that must be there before the engines called ``names`` start."""
        return {(part.role, "stock" if part.tree == "own" else part.tree) for part in self.parts if part.name in names}


def _words(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise RigError("scenario", f"{where}: a list of strings is needed")
    return tuple(value)


def _variables(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(word, str) for word in value.values()):
        raise RigError("scenario", f"{where}: a table of strings is needed")
    return dict(value)


def _engine(name: str, data: Mapping[str, Any], known: Mapping[str, Part], model: str, where: str) -> Part:
    unknown = set(data) - _ENGINE_KEYS
    if unknown:
        raise RigError("scenario", f"{where}: unknown keys {sorted(unknown)}")
    base: Part | None = None
    if "like" in data:
        base = known.get(data["like"])
        if base is None:
            raise RigError("scenario", f"{where}: like = {data['like']!r} names no engine above it")
    role = data.get("role", base.role if base else "")
    mode = data.get("mode", base.mode if base else role)
    tree = data.get("tree", base.tree if base else "stock")
    if role not in ("prefill", "decode") or mode not in MODES or tree not in TREES:
        raise RigError("scenario", f"{where}: role {role!r}, mode {mode!r} or tree {tree!r} is unknown")
    flags = _words(data.get("flags", []), f"{where}.flags")
    gates = _variables(data.get("gates", {}), f"{where}.gates")
    if gates and tree != "patched":
        raise RigError("scenario", f"{where}: gates without a patched tree do nothing")
    return Part(
        name=name,
        role=role,
        mode=mode,
        tree=tree,
        flags=((base.flags if base else ()) + flags),
        env={**(base.env if base else {}), **_variables(data.get("env", {}), f"{where}.env")},
        gates={**(base.gates if base and tree == "patched" else {}), **gates},
        tp=int(data.get("tp", base.tp if base else 1)),
        dtype=str(data.get("dtype", base.dtype if base else "float32")),
        tokens=int(data.get("tokens", base.tokens if base else 4096)),
        model=str(data.get("model", base.model if base else model)),
        gated=bool(data.get("gated", base.gated if base else False)),
    )


def parse(name: str, text: str) -> Boot:
    """Read the text of a boot file.

    Raises:
        RigError: kind ``scenario``; it is no TOML, or says something that is unknown.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RigError("scenario", f"boot {name}: {error}") from error
    unknown = set(data) - {"about", "model", "memory", "engine", "router", "refuser"}
    if unknown:
        raise RigError("scenario", f"boot {name}: unknown keys {sorted(unknown)}")
    model = str(data.get("model", ""))
    parts: dict[str, Part] = {}
    for engine, entry in data.get("engine", {}).items():
        if not _NAME.fullmatch(engine):
            raise RigError("scenario", f"boot {name}: {engine!r} is no name")
        parts[engine] = _engine(engine, entry, parts, model, f"boot {name}, engine {engine}")
        models.get(parts[engine].model)
    refusers = []
    for refuser, entry in data.get("refuser", {}).items():
        of = entry.get("of")
        if not _NAME.fullmatch(refuser) or refuser in parts or of not in parts or parts[of].mode != "prefill":
            raise RigError("scenario", f"boot {name}: refuser {refuser!r} of {of!r}: a new name, of a prefill engine")
        refusers.append(RefuserPart(refuser, of, int(entry.get("status", 500)), float(entry.get("seconds", 1.0))))
    prefills = {part.name for part in parts.values() if part.mode == "prefill"} | {one.name for one in refusers}
    known = {"prefill": prefills, "decode": {part.name for part in parts.values() if part.mode == "decode"}}
    routers = []
    for router, entry in data.get("router", {}).items():
        if not _NAME.fullmatch(router) or router in {*parts, *prefills}:
            raise RigError("scenario", f"boot {name}: {router!r} is no name for a router")
        if entry.get("build", "") not in ("", "stock", "patched"):
            raise RigError("scenario", f"boot {name}: router {router}: build is stock or patched")
        behind = {}
        for role in ("prefill", "decode"):
            behind[role] = _words(entry.get(role, []), f"boot {name}, router {router}")
            for engine in behind[role]:
                if engine not in known[role]:
                    raise RigError("scenario", f"boot {name}: router {router}: {engine!r} is no {role} engine")
        routers.append(
            RouterPart(
                router,
                behind["prefill"],
                behind["decode"],
                _words(entry.get("flags", []), f"boot {name}, router {router}.flags"),
                _variables(entry.get("env", {}), f"boot {name}, router {router}.env"),
                entry.get("build", ""),
            )
        )
    if not parts:
        raise RigError("scenario", f"boot {name} has no engine")
    memory = data.get("memory", 0)
    if type(memory) is not int or memory < 0:
        raise RigError("scenario", f"boot {name}: memory = {memory!r}, where a number of MiB is needed")
    about = str(data.get("about", ""))
    return Boot(name, about, model, tuple(parts.values()), tuple(routers), tuple(refusers), memory)


def load(name: str, folder: Path = FOLDER) -> Boot:
    """Read the boot ``name``.

    Raises:
        RigError: kind ``scenario``.
    """
    path = folder / f"{name}.toml"
    if not _NAME.fullmatch(name) or not path.is_file():
        known = ", ".join(sorted(found.stem for found in folder.glob("*.toml")))
        raise RigError("scenario", f"no boot {name!r}; known: {known}")
    return parse(name, path.read_text(encoding="utf-8"))
