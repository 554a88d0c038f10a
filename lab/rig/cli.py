"""The command line of the rig. Exit codes: 0 holds or done, 1 does not hold or refused, 2 usage, 3 nothing to do."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from lab.rig import (
    bits,
    deployment,
    engine,
    environment,
    faults,
    faults_retract,  # noqa: F401  registers its faults
    lists,
    ports,
    runner,
    table,
    trees,
)
from lab.rig import boot as boots
from lab.rig import scenario as scenarios
from lab.rig.client import Request, Route, prompts, send_all
from lab.rig.errors import RigError
from lab.rig.keeper import STATE
from lab.rig.lists import Entry
from lab.rig.tree import Tree

SCHEMA = 1
HOLDS, REFUSED, NOTHING = 0, 1, 3
_FOLDER = click.Path(path_type=Path, file_okay=False)


class Output:
    """What a verb says: words as they come, or one JSON object at the end; progress always on standard error."""

    def __init__(self, verb: str, as_json: bool) -> None:
        self.verb = verb
        self.as_json = as_json
        self.result: dict[str, Any] = {}
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        """Tell a result."""
        if not self.as_json:
            click.echo(text)

    def progress(self, text: str) -> None:
        """Tell that something goes on, with the seconds since the start."""
        click.echo(f"[{time.monotonic() - self.began:5.0f} s] {text}", err=True)

    def end(self, code: int, error: RigError | None = None) -> None:
        """Print the JSON object, or the error, and leave."""
        if self.as_json:
            told: dict[str, Any] = {"schema": SCHEMA, "verb": self.verb, "exit": code, "result": self.result}
            told["error"] = None if error is None else error.as_json()
            click.echo(json.dumps(told, indent=1, sort_keys=True))
        elif error is not None:
            for line in error.tail:
                click.echo("  " + line, err=True)
            click.echo(f"{error.kind}: {error}", err=True)
        sys.exit(code)


def verb(name: str) -> Callable[[Callable[..., int]], Callable[..., None]]:
    """Turn a function (output, ...) -> exit code into a command's callback with ``--json``."""

    def decorate(function: Callable[..., int]) -> Callable[..., None]:
        @click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
        @functools.wraps(function)
        def callback(as_json: bool, **options: Any) -> None:
            output = Output(name, as_json)
            try:
                code = function(output, **options)
            except RigError as error:
                output.end(REFUSED, error)
            except OSError as error:
                # A cache folder that cannot be made, a file that cannot be read, a disk that is full.
                output.end(REFUSED, RigError("system", str(error)))
            else:
                output.end(code)

        return callback

    return decorate


def tree_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options that name trees and the router."""
    for option in (
        click.option("--allow-drift", is_flag=True, help="Run a tree that the bundle does not recognise."),
        click.option("--router", default="wheel", help="'wheel', a folder with sglang_router/, or the compiled .so."),
        click.option("--decode-root", type=_FOLDER, help="The decode tree: the folder above sglang/."),
        click.option("--prefill-root", type=_FOLDER, help="The prefill tree: the folder above sglang/."),
    ):
        function = option(function)
    return function


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Run the real router and the real engines, with real KV transfer, on a machine without a GPU."""


@main.command()
@click.option("--release", "releases", multiple=True, type=click.Choice(sorted(environment.ENVIRONMENTS)))
@click.option("--check", "only_check", is_flag=True, help="Make nothing; compare what is there with the pins.")
@verb("env")
def env(output: Output, releases: tuple[str, ...], only_check: bool) -> int:
    """Make the two engine environments in the cache folder."""
    for release in releases or sorted(environment.ENVIRONMENTS):
        place = environment.ENVIRONMENTS[release]
        if only_check and not place.folder.is_dir():
            raise RigError("environment", f"{place.folder} is not there; run: tools/rig.py env")
        python = place.python if only_check else environment.ensure(release, output.progress)
        environment.check(place, python)
        output.result[release] = {"python": str(python), "digest": place.digest, "torch": place.pins["torch"]}
        output.say(f"{release}: {python}, torch {place.pins['torch']}, {len(place.pins)} packages as pinned")
    return HOLDS


def _as_they_stand(
    output: Output, which: boots.Boot, prefill: Path | None, decode: Path | None, allow_drift: bool
) -> dict[tuple[str, str], Tree]:
    """The named trees for every engine of a boot, whatever level they stand at."""
    wanted = which.trees({part.name for part in which.parts})
    named: dict[tuple[str, str], Path | None] = {}
    for role, path in (("prefill", prefill), ("decode", decode)):
        named[role, "stock"] = named[role, "patched"] = path
    return trees.gather(named, wanted, allow_drift, output.progress, any_level=True)


def _runs() -> list[Path]:
    return sorted(folder for folder in deployment.runs_folder().glob("*") if (folder / STATE).is_file())


def _phase(folder: Path) -> str:
    """The phase of a run, ``unreadable`` where its state is damaged: one bad folder must not hide the others."""
    try:
        return str(deployment.read_state(folder)["phase"])
    except RigError:
        return "unreadable"


def _running(left_alone: bool = False) -> list[Path]:
    """Runs that go on; with ``left_alone`` those that `up` left running, without those of a command at work."""
    running = [folder for folder in _runs() if _phase(folder) in ("starting", "ready")]
    return [folder for folder in running if not (left_alone and deployment.read_state(folder).get("tied"))]


def _run_folder(name: str | None, left_alone: bool = False) -> Path:
    """The folder of the run called ``name``, or of the only one that runs.

    Raises:
        RigError: kind ``state``; there is no such run, or none runs, or several do.
    """
    running = _running(left_alone)
    if name is None and len(running) == 1:
        return running[0]
    if name is None and running:
        raise RigError("state", f"several run, name one: {', '.join(folder.name for folder in running)}")
    last = ", ".join(folder.name for folder in _runs()[-5:]) or "none"
    if name is None:
        raise RigError("state", f"nothing runs; the last runs, by name: {last}")
    for folder in _runs():
        if folder.name == name:
            return folder
    raise RigError("state", f"no run {name!r}; the last runs: {last}")


@main.command()
@click.option("--boot", "boot_name", default="pair", help="Which engines (lab/rig/boots).")
@click.option("--port", type=click.IntRange(1, 65535), help="Port of the router; a free one if not given.")
@click.option("--limit", type=click.FloatRange(1.0), default=600.0, help="Seconds within which all must be ready.")
@tree_options
@verb("up")
def up(
    output: Output,
    boot_name: str,
    port: int | None,
    limit: float,
    prefill_root: Path | None,
    decode_root: Path | None,
    router: str,
    allow_drift: bool,
) -> int:
    """Start a deployment from the trees as they stand, and leave it running."""
    which = boots.load(boot_name)
    if port is not None:
        if not which.routers:
            raise RigError("port", f"boot {which.name} has no router that could take port {port}")
        ports.need_free(port)
    engine.need_router(router)
    runner.need(which)
    found = _as_they_stand(output, which, prefill_root, decode_root, allow_drift)
    router_port = {which.routers[0].name: port} if port is not None else {}
    running = runner.start(which, found, router, tied=False, say=output.progress, ports_for=router_port, limit=limit)
    folder = running.deployment.folder
    output.result = {"run": folder.name, "logs": str(folder / "logs"), **running.deployment.state()}
    output.say(f"run {folder.name}, logs in {folder / 'logs'}")
    for name, member in output.result["members"].items():
        output.say(f"  {name}: {member['role']} on 127.0.0.1:{member['port']}, pid {member['pid']}")
    return HOLDS


@main.command()
@click.argument("run", required=False)
@verb("status")
def status(output: Output, run: str | None) -> int:
    """Tell what runs."""
    folders = [_run_folder(run)] if run else _runs()
    shown = 0
    for folder in folders:
        if run is None and _phase(folder) == "unreadable":
            output.progress(f"{folder} holds no readable state; it may be deleted")
            continue
        state = deployment.read_state(folder)
        if run is None and state["phase"] not in ("starting", "ready", "lost"):
            continue
        shown += 1
        output.result[folder.name] = state
        output.say(f"{folder.name}: {state['phase']} {state['reason']}".rstrip())
        for name, member in state["members"].items():
            output.say(f"  {name}: {member['role']} on 127.0.0.1:{member['port']}, pid {member['pid']}")
    if not shown:
        output.say("nothing runs")
        return NOTHING
    return HOLDS


@main.command()
@click.argument("run", required=False)
@verb("down")
def down(output: Output, run: str | None) -> int:
    """End a deployment that `up` started, and nothing else."""
    if run is None and not _running(left_alone=True):
        output.say("nothing runs that `up` started" if _running() else "nothing runs")
        return NOTHING
    folder = _run_folder(run, left_alone=True)
    if deployment.read_state(folder).get("tied") and folder in _running():
        raise RigError("state", f"{folder.name} belongs to a command that is at work, and ends with it")
    ended = deployment.end(folder)
    output.result = {"run": folder.name, "ended": ended}
    output.say(f"{folder.name}: {'ended' if ended else 'was not running'}")
    return HOLDS if ended else NOTHING


@main.command()
@click.argument("member")
@click.option("--run", help="Name of the run; the one that runs if not given.")
@click.option("-n", "--lines", default=40, help="How many of the last lines.")
@verb("logs")
def logs(output: Output, member: str, run: str | None, lines: int) -> int:
    """Print the last lines of a member's log."""
    path = _run_folder(run) / "logs" / f"{member}.log"
    if not path.is_file():
        known = ", ".join(sorted(found.stem for found in path.parent.glob("*.log")))
        raise RigError("state", f"no log of {member!r}; there is: {known}")
    tail = path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    output.result = {"log": str(path), "lines": tail}
    for line in tail:
        output.say(line)
    return HOLDS


@main.command()
@click.option("--boot", "boot_name", default="pair", help="Which engines (lab/rig/boots).")
@tree_options
@verb("smoke")
def smoke(
    output: Output,
    boot_name: str,
    prefill_root: Path | None,
    decode_root: Path | None,
    router: str,
    allow_drift: bool,
) -> int:
    """Start the trees as they stand, send a few requests through the router cold and hot, and end it."""
    which = boots.load(boot_name)
    if not which.routers:
        raise RigError("scenario", f"boot {which.name} has no router")
    engine.need_router(router)
    runner.need(which)
    found = _as_they_stand(output, which, prefill_root, decode_root, allow_drift)
    running = runner.start(which, found, router, say=output.progress)
    try:
        route = Route(running.router_ports[which.routers[0].name])
        requests = [Request(prompt, 16, str(index)) for index, prompt in enumerate(prompts(1, 2, 100, 30))]
        cold, hot = (send_all(route, requests, together=False) for _ in range(2))
        chat = runner.chat(route.port, "Say something.", 8)
    finally:
        running.deployment.down()
    same = sum(one.ids == other.ids and not one.error for one, other in zip(cold, hot, strict=True))
    output.result = {
        "cold": [answer.as_json() for answer in cold],
        "hot": [answer.as_json() for answer in hot],
        "chat": chat,
        "same_texts": same,
        "logs": str(running.deployment.folder / "logs"),
    }
    for answer in (*cold, *hot):
        output.say(answer.error or f"request {answer.tag}: {len(answer.ids)} tokens in {answer.seconds:.1f} s")
    output.say(f"{same} of {len(requests)} texts are the same cold and hot; chat answered {len(chat)} characters")
    return HOLDS if same == len(requests) and chat else REFUSED


def _entries(names: tuple[str, ...], which: str | None) -> list[Entry]:
    if which == "short":
        return lists.short()
    if which == "full":
        return lists.full()
    if not names:
        raise RigError("scenario", f"name scenarios, or use --list short; known: {', '.join(scenarios.names())}")
    return lists.group(list(names))


def _need_a_place(fault: faults.Fault, entries: Sequence[Entry]) -> None:
    """Refuse a fault that no engine of the run would take: a run without it would look like a fault that nobody sees.

    Raises:
        RigError: kind ``fault``.
    """
    roles = {
        part.role
        for entry in entries
        for part in entry.boot.parts
        if part.tree == "patched" and part.name in runner.wanted(entry.boot, entry.scenarios)
    }
    if fault.role not in roles:
        raise RigError("fault", f"{fault.name} needs a patched {fault.role} engine; it is for {fault.scenario}")


def _tell(output: Output, reports: Sequence[runner.Report]) -> None:
    """Tell what a boot brought as soon as it ended: a run that is cut off later leaves that."""
    for line in table.lines(reports)[1:]:
        output.progress(line)


@main.command()
@click.argument("names", nargs=-1)
@click.option("--list", "which", type=click.Choice(["short", "full"]), help="Run a whole list.")
@click.option("--stock-prefill-root", type=_FOLDER, help="Stock tree; a copy of the environment's if not given.")
@click.option("--stock-decode-root", type=_FOLDER, help="Stock tree; a copy of the environment's if not given.")
@click.option("--gates-off", is_flag=True, help="Compare stock with patched, every gate unset, bit for bit.")
@click.option("--twice", is_flag=True, help="Start every boot two times and compare the answers bit for bit.")
@click.option("--fault", default="", help="Plant a fault in every patched engine (see docs/rig.md): it must turn red.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the JSON result to this file.")
@tree_options
@verb("compare")
def compare(
    output: Output,
    names: tuple[str, ...],
    which: str | None,
    stock_prefill_root: Path | None,
    stock_decode_root: Path | None,
    prefill_root: Path | None,
    decode_root: Path | None,
    router: str,
    allow_drift: bool,
    gates_off: bool,
    twice: bool,
    fault: str,
    out: Path | None,
) -> int:
    """Run scenarios on stock and patched engines and print what holds in one table.

    A patched tree that is not named is made from this repository's own series.
    """
    if which and names:
        raise click.UsageError("name scenarios or a --list, not both")
    if out is not None and not (out.parent.is_dir() and os.access(out if out.exists() else out.parent, os.W_OK)):
        raise click.UsageError(f"--out {out} cannot be written")
    if sum(map(bool, (gates_off, twice, fault))) > 1:
        raise click.UsageError("--gates-off, --twice and --fault are three questions: ask one at a time")
    entries = _entries(names, which)
    if fault:
        _need_a_place(faults.get(fault), entries)
    if gates_off:
        entries = bits.without_gates(entries)
    elif twice:
        entries = bits.as_they_are(entries)
    named: Mapping[tuple[str, str], Path | None] = {
        ("prefill", "stock"): stock_prefill_root,
        ("decode", "stock"): stock_decode_root,
        ("prefill", "patched"): prefill_root,
        ("decode", "patched"): decode_root,
    }
    wanted = {tree for entry in entries for tree in entry.boot.trees(runner.wanted(entry.boot, entry.scenarios))}
    if gates_off:
        wanted = {(role, kind) for role, _ in wanted for kind in ("stock", "patched")}
    engine.need_router(router)
    for entry in entries:
        # All of them now: a boot that cannot be is not to end a run that has gone on for half an hour.
        runner.need(entry.boot, runner.needed(entry.boot, entry.scenarios))
    for entry in entries:
        for one in (entry.boot, bits.patched(entry.boot)) if gates_off else (entry.boot,):
            runner.need_builds(one, runner.needed(one, entry.scenarios), router, output.progress)
    found = trees.gather(named, wanted, allow_drift, output.progress)
    reports: list[runner.Report] = []
    for entry in entries:
        told = len(reports)
        output.progress(f"boot {entry.boot.name}: {', '.join(one.name for one in entry.scenarios)}")
        planted = {part.name: {faults.VARIABLE: fault} for part in entry.boot.parts if part.tree == "patched"}
        run = (entry.boot, entry.scenarios, found, router, output.progress)
        try:
            if gates_off or twice:
                other = bits.patched(entry.boot) if gates_off else bits.again(entry.boot)
                reports += bits.run_twice(run[0], other, *run[1:])
            else:
                reports.append(runner.run_boot(*run, planted if fault else None))
        except RigError as error:
            # What the others brought, and will bring, is not lost with it.
            reports.append(runner.not_run(entry.boot, entry.scenarios, error))
        _tell(output, reports[told:])
    if which:
        most = lists.MOST_MEMORY[which]
        for report in (one for one in reports if one.memory > most):
            hold = f"memory <= {most >> 20} MiB"
            report.lines.append(runner.Line(f"the {which} list", hold, report.memory >> 20, False))
    for line in (*table.requests(reports), "", *table.lines(reports)):
        output.say(line)
    green = all(report.green for report in reports)
    output.result = {
        "green": green,
        "trees": {f"{role} {kind}": str(tree.root) for (role, kind), tree in found.items()},
        "fault": fault,
        "boots": [report.as_json() for report in reports],
        "seconds": round(time.monotonic() - output.began, 1),
    }
    if out is not None:
        out.write_text(json.dumps(output.result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    held = sum(line.holds for report in reports for line in report.lines)
    failed = sum(not line.holds for report in reports for line in report.lines)
    output.say(f"{held} passed, {failed} failed")
    return HOLDS if green else REFUSED
