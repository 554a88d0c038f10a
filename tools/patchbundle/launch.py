"""How a role is started: launch arguments, environment and gates, from ``config/ROLE.toml`` and a profile over it.

A gate that is on states what it needs, so that a combination which its patch would refuse at the engine's start is
refused here, before anything is started.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from patchbundle.bases import check_keys, parse_toml, read_file, refuse
from patchbundle.errors import BundleError, Reason
from patchbundle.manifest import Bundle

Value = bool | int | float | str
_FLAG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_GATE = re.compile("SGLANG_RESEARCH_|SMG_PD_(?:LOAD_AT_DISPATCH|STRICT_ACK)$")
_EITHER = re.compile(rf"{_FLAG.pattern}|{_VARIABLE.pattern}")
_LEAST = re.compile(r">= ([0-9]+)")
# What a file of config/ must not say: whose machine it is, and what opens it. The caller's own arguments may.
_PRIVATE = re.compile(
    r"(?i)(?:^|[-_])(?:host|hostname|ip|addr|address|url|urls|port|ports|nodes|node[-_]rank|key|keys|keyfile|certfile"
    r"|secret|password|token|user|account|path|file|dir|device|devices|ifname|hca)(?:$|[-_])"
)
_PLACE = re.compile(
    r"[0-9]{1,3}(?:\.[0-9]{1,3}){3}|[0-9a-fA-F]{2}(?:[:-][0-9a-fA-F]{2}){5}|\w+://|[\w-]+(?:\.[\w-]+)*:[0-9]+\b"
)
WORDS = frozenset(
    {"0", "1", "EAGLE", "NEXTN", "ag_rs", "auto", "bf16", "bfloat16", "cache_aware", "decode", "dsa"}
    | {"flashinfer_sparse_mla", "flashmla_kv", "flashmla_sparse", "fp8_e4m3", "interleave", "mooncake", "none"}
    | {"mooncake_tcp", "power_of_two", "prefill", "random", "round_robin", "sgl-kernel", "zigzag"}
)
"""The only texts that a file of config/ may give: an address, a key or a name has no form by which all are known."""
ALIASES = {
    "attention-context-parallel-size": "attn-cp-size",
    "data-parallel-size": "dp-size",
    "decode-context-parallel-size": "dcp-size",
    "moe-data-parallel-size": "moe-dp-size",
    "pipeline-parallel-size": "pp-size",
    "tensor-parallel-size": "tp-size",
}
"""Other names that the engines have for an argument that a gate looks at. Under one the gate would not see it."""
_TP = ("tp-size", "dp-size", "enable-dp-attention", "attn-cp-size")
DERIVED: Mapping[str, tuple[str, ...]] = {
    "attention-tp": _TP,
    "attention-tp-mod-dcp": (*_TP, "dcp-size"),
    "grpc-workers": (),
}
"""What a gate may need and no one argument says, with those that it follows from: see ``Launch.given``."""
_PROFILE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Gate:
    """One gate: whether it is on, what it needs, what it wants kept, and other gates that must be on.

    ``needs``: arguments and variables that must be so; a text ``>= N`` asks for a number. ``keeps``: arguments that are
    unset, since the engine's default is this value, or have it.
    """

    on: bool
    needs: Mapping[str, Value] = field(default_factory=dict)
    keeps: Mapping[str, Value] = field(default_factory=dict)
    gates: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """What starts one role. ``arguments``: by flag, without the leading dashes; False and absent are the same."""

    role: str
    arguments: Mapping[str, Value]
    environment: Mapping[str, str]
    gates: Mapping[str, Gate]

    @property
    def exports(self) -> dict[str, str]:
        """The variables to set: the environment's and the gates that are on."""
        return {**self.environment, **{name: "1" for name, gate in self.gates.items() if gate.on}}

    @property
    def flags(self) -> list[str]:
        """The arguments as an engine's command line takes them."""
        return [
            f"--{name}" if value is True else f"--{name}={value}"
            for name, value in self.arguments.items()
            if value is not False
        ]

    def given(self, name: str) -> Value | None:
        """The value of an argument or a variable; None if it is unset.

        ``attention-tp`` follows from three others, ``attention-tp-mod-dcp`` is what is left of it after whole groups of
        ``dcp-size``, and ``grpc-workers`` is whether any argument names a worker that is reached by gRPC.
        """
        if name == "attention-tp":
            return self._attention_tp
        if name == "attention-tp-mod-dcp":
            ranks, heads = self.arguments.get("dcp-size", 1), self._attention_tp
            return heads % ranks if heads and type(ranks) is int and ranks > 0 else None
        if name == "grpc-workers":
            return True if any("grpc://" in str(value) for value in self.arguments.values()) else None
        table: Mapping[str, Value] = self.environment if _VARIABLE.fullmatch(name) else self.arguments
        value = table.get(name, False)
        return None if value is False else value

    @property
    def _attention_tp(self) -> int | None:
        data = self.arguments.get("dp-size", 1) if self.arguments.get("enable-dp-attention") is True else 1
        sizes = (self.arguments.get("tp-size", 1), data, self.arguments.get("attn-cp-size", 1))
        whole = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and size > 0]
        return whole[0] // whole[1] // whole[2] if len(whole) == 3 else None

    def lines(self) -> list[str]:
        """What a shell takes: an export a line, then the arguments."""
        exports = [f"export {name}={shlex.quote(value)}" for name, value in self.exports.items()]
        return [*exports, *(shlex.quote(flag) for flag in self.flags)]


def gates_of(bundle: Bundle, role: str) -> dict[str, str]:
    """Patch id by gate, for the gates that the headers of a role's series name."""
    found: dict[str, str] = {}
    for patch in bundle.series(role):
        if patch.header.gate_name is not None:
            found[patch.header.gate_name] = patch.id
    return found


def _table(table: object, where: str, names: re.Pattern[str], what: str) -> dict[str, Value]:
    """A table of plain values by name."""
    if not isinstance(table, dict):
        raise refuse(where, "a table", repr(table))
    for name, value in table.items():
        if not names.fullmatch(name):
            raise refuse(f"{where}: {name}", what, repr(name))
        if not isinstance(value, bool | int | float | str):
            raise refuse(f"{where}: {name}", "a string, a number, true or false", repr(value))
        if _PRIVATE.search(name) and not isinstance(value, bool):
            raise refuse(f"{where}: {name}", "no address and no key in a bundle: give it on the command line", "one")
        if isinstance(value, str) and _PLACE.search(value):
            raise refuse(f"{where}: {name}", "no address in a bundle: give it on the command line", "one")
        if isinstance(value, str) and value not in WORDS and not _LEAST.fullmatch(value):
            known = "one of the engine's own words; anything else is given on the command line"
            raise refuse(f"{where}: {name}", known, "another text")
    return table


def _gate(entry: object, where: str) -> Gate:
    check_keys(entry, {"on"}, where, optional={"needs", "keeps", "gates"})
    assert isinstance(entry, dict)
    if not isinstance(entry["on"], bool):
        raise refuse(f"{where}: on", "true or false", repr(entry["on"]))
    needs, keeps = (
        _table(entry.get(key, {}), f"{where}: {key}", _EITHER, "launch arguments without dashes in front, or variables")
        for key in ("needs", "keeps")
    )
    gates = entry.get("gates", [])
    if not isinstance(gates, list) or not all(isinstance(name, str) for name in gates):
        raise refuse(f"{where}: gates", "a list of gates", repr(gates))
    return Gate(entry["on"], needs, keeps, tuple(gates))


def read(path: Path) -> dict[str, Any]:
    """The three tables of a file of ``config/``.

    Raises:
        BundleError: MANIFEST, if it is not as described in docs/reference.md.
    """
    where = str(path)
    table = parse_toml(read_file(path), where)
    check_keys(table, set(), where, optional={"arguments", "environment", "gates"})
    environment = _table(table.get("environment", {}), f"{where}: environment", _VARIABLE, "a variable's name")
    for name, value in environment.items():
        if not isinstance(value, str):
            raise refuse(f"{where}: environment: {name}", "a string", repr(value))
        if _GATE.match(name):
            raise refuse(f"{where}: environment: {name}", "a gate in gates, where what it needs is checked", "one here")
    gates = table.get("gates", {})
    if not isinstance(gates, dict):
        raise refuse(f"{where}: gates", "a table", repr(gates))
    return {
        "arguments": _table(table.get("arguments", {}), f"{where}: arguments", _FLAG, "a flag without its dashes"),
        "environment": environment,
        "gates": {name: _gate(entry, f"{where}: gates: {name}") for name, entry in gates.items()},
    }


def check_files(root: Path) -> None:
    """Read the files of every role and every profile that the bundle at ``root`` has.

    Raises:
        BundleError: MANIFEST, for the first that is not as described.
    """
    roles = [root / "config" / f"{role}.toml" for role in ("prefill", "decode", "router")]
    for path in (*roles, *sorted((root / "config").glob("profile-*.toml"))):
        if path.is_file():
            read(path)


def load(
    bundle: Bundle,
    root: Path,
    role: str,
    profile: str | None = None,
    on: Sequence[str] = (),
    off: Sequence[str] = (),
    arguments: Sequence[str] = (),
) -> Launch:
    """Put a role's file, a profile and the caller's own choices together, later ones first, and check the whole.

    Args:
        root: the bundle's folder.
        profile: ``NAME`` of ``config/profile-NAME.toml``.
        on, off: gates to switch.
        arguments: ``NAME=VALUE`` in TOML's words, or ``NAME`` for a flag alone.

    Raises:
        BundleError: MANIFEST for a file that is not as described; LAUNCH for a combination that would not start, with
            every condition that fails.
    """
    files = [root / "config" / f"{role}.toml"]
    if profile is not None:
        if not _PROFILE.fullmatch(profile):
            raise BundleError(Reason.LAUNCH, f"profile {profile}", expected="small letters, digits and dashes")
        files.append(root / "config" / f"profile-{profile}.toml")
        if not files[-1].is_file():
            there = sorted(path.stem.removeprefix("profile-") for path in (root / "config").glob("profile-*.toml"))
            raise BundleError(Reason.LAUNCH, f"profile {profile}", expected=", ".join(there), found="no such profile")
    merged: dict[str, dict[str, Any]] = {"arguments": {}, "environment": {}, "gates": {}}
    for path in files:
        for name, table in read(path).items():
            merged[name].update(table)
    for text in arguments:
        name, sign, value = text.partition("=")
        if not _FLAG.fullmatch(name):
            raise BundleError(Reason.LAUNCH, f"argument {text}", expected="NAME=VALUE, without dashes in front")
        merged["arguments"][name] = _value(value) if sign else True
    known = gates_of(bundle, role)
    for names, state in ((on, True), (off, False)):
        for name in names:
            merged["gates"][name] = replace(merged["gates"].get(name, Gate(state)), on=state)
    _own_names(merged["arguments"], merged["gates"].values())
    launch = Launch(role, merged["arguments"], merged["environment"], merged["gates"])
    wrong = list(faults(launch, known))
    if wrong:
        raise BundleError(Reason.LAUNCH, f"config/{role}.toml", found="; ".join(wrong))
    return launch


def looked_at(gates: Iterable[Gate]) -> set[str]:
    """The arguments that a condition of a gate reads."""
    named = {name for gate in gates for name in (*gate.needs, *gate.keeps) if _FLAG.fullmatch(name)}
    return {argument for name in named for argument in DERIVED.get(name, (name,))}


def _own_names(arguments: Mapping[str, Value], gates: Iterable[Gate]) -> None:
    """Refuse an argument that the engine takes for one of those that are looked at here: an alias, or its beginning.

    Raises:
        BundleError: LAUNCH.
    """
    read = looked_at(gates)
    full = {name: name for name in sorted(read)} | {name: own for name, own in ALIASES.items() if own in read}
    for name in arguments:
        own = next((own for long, own in full.items() if long.startswith(name)), None)
        if own is not None and name not in read:
            raise BundleError(
                Reason.LAUNCH, f"argument {name}", expected=own, found="another name, by which no gate would see it"
            )


def _value(text: str) -> Value:
    """A value as TOML would read it, else the words themselves."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def faults(launch: Launch, known: Mapping[str, str]) -> Iterator[str]:
    """Every condition of a gate that is on and does not hold."""
    for name, gate in launch.gates.items():
        if not gate.on:
            continue
        if name not in known:
            yield f"{name} is a gate of no patch of the {launch.role} series"
        for needed, value in gate.needs.items():
            if not _holds(launch.given(needed), value):
                found = launch.given(needed)
                yield f"{name} needs {needed} = {value}, not {'unset' if found is None else found}"
        for kept, value in gate.keeps.items():
            found = launch.given(kept)
            if found is not None and not _holds(found, value):
                yield f"{name} needs {kept} unset or {value}, not {found}"
        for other in gate.gates:
            if other not in launch.gates or not launch.gates[other].on:
                yield f"{name} needs {other}"


def _holds(found: Value | None, wanted: Value) -> bool:
    """Whether what is given is what is wanted; unset and false are the same, 1 and true are not."""
    least = _LEAST.fullmatch(wanted) if isinstance(wanted, str) else None
    if least:
        return isinstance(found, int | float) and not isinstance(found, bool) and found >= int(least[1])
    if found is None or wanted is False:
        return found is None and wanted is False
    # Of one type: an engine takes neither true nor 8.0 for a number of ranks.
    return found == wanted and type(found) is type(wanted)
