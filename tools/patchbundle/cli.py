"""The command line: arguments in, words or JSON out, exit codes as in :class:`Exit`."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from patchbundle import __version__, output, store
from patchbundle.errors import BundleError, Exit, Reason
from patchbundle.report import Report

# What only some verbs need is imported by those: half of a short verb's time was the imports of the others.
if TYPE_CHECKING:
    from patchbundle.manifest import Bundle
    from patchbundle.processes import Census, Process
    from patchbundle.state import State
    from patchbundle.survey import Begun
    from patchbundle.target import Target

_F = TypeVar("_F", bound=Callable[..., Any])
# What a node needs; the rest is for a workstation with a clone.
NODE_VERBS = ("plan", "apply", "revert", "status", "explain", "recover", "exec", "env")


def bundle_root() -> Path:
    """The bundle that this package belongs to: beside an installed package, or the checkout around it."""
    here = Path(__file__).resolve().parent
    installed = here / "_bundle"
    return installed if store.is_folder(installed) else here.parents[1]


def verb(name: str) -> Callable[[Callable[..., Exit]], Callable[..., None]]:
    """Turn a function (report, …) -> Exit into a command's callback with the options that every verb has."""

    def decorate(function: Callable[..., Exit]) -> Callable[..., None]:
        @click.option("--json", "as_json", is_flag=True, help="Print one JSON object (schema/output-1.json).")
        @click.option("-v", "--verbose", is_flag=True, help="Say what is being done.")
        @click.option(
            "--bundle",
            "bundle_path",
            type=click.Path(path_type=Path, file_okay=False),
            default=None,
            help="The bundle to work with.  [default: the one of this tool]",
        )
        @functools.wraps(function)
        def callback(as_json: bool, verbose: bool, bundle_path: Path | None, **options: Any) -> None:
            report = Report(name, as_json, verbose)
            bundle = (bundle_path or bundle_root()).resolve()
            report.run(lambda: function(report, bundle, **options))

        return callback

    return decorate


def target_options(function: _F) -> _F:
    options = (
        click.option(
            "--root",
            type=click.Path(path_type=Path),
            help="A folder that holds sglang/ or the router's crate, or a checkout or virtual environment around it.",
        ),
        click.option("--python", metavar="EXE", help="Ask this interpreter where its sglang is.  [default: this one]"),
        click.option("--role", type=click.Choice(["prefill", "decode", "router"]), help="Only bases of this role."),
        click.option("--require-torch", is_flag=True, help="Refuse if no torch is seen beside the target."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def signature_options(function: _F) -> _F:
    """The bundle has to be signed. :func:`_signed` takes what they say out of the options."""
    require = click.option(
        "--require-signature",
        metavar="PUBKEY",
        help="Refuse a bundle that this minisign key, or the one in this file, did not sign.",
    )
    place = click.option(
        "--signature",
        "signature_file",
        type=click.Path(path_type=Path),
        help="Where the signature is.  [default: patches/pins.lock.minisig]",
    )
    return require(place(function))


def _signed(options: dict[str, Any]) -> tuple[str, Path | None] | None:
    key, file = options.pop("require_signature"), options.pop("signature_file")
    if key is None and file is not None:
        raise click.UsageError("--signature goes with --require-signature PUBKEY")
    return None if key is None else (key, file)


def _scanned(bundle_path: Path) -> tuple[Bundle, int]:
    """The bundle, read strictly and scanned, and the number of files that were scanned."""
    from patchbundle import manifest, second

    def scan(_: int) -> int:
        from patchbundle import scan

        return scan.check(bundle_path)

    with second.shared(1, scan) as files:
        try:
            bundle = manifest.load(bundle_path)
        finally:
            # What must not be published is told first, whatever else is wrong.
            files()
    return bundle, files()[0]


def _discover(report: Report, bundle: Bundle, options: Mapping[str, Any]) -> Target:
    from patchbundle import change

    _refuse_two(options)
    return change.discover(report, bundle, **options)


def _refuse_two(options: Mapping[str, Any]) -> None:
    if options["root"] is not None and options["python"] is not None:
        raise click.UsageError("give --root or --python, not both")


def _hide(report: Report, bundle_path: Path, options: Mapping[str, Any]) -> None:
    """What this verb prints as JSON goes into tickets: nothing in it tells whose machine it is."""
    if report.as_json:
        from patchbundle import fetch, private

        places = [("$ROOT", options["root"]), ("$PYTHON", options["python"]), ("$BUNDLE", bundle_path)]
        places += [("$CACHE", fetch.cache_folder()), ("$HOME", Path.home())]
        report.hidden = private.names_of(places)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="patchbundle")
def apply_cli() -> None:
    """Put a pinned series of patches on a pinned release, and take it off again, byte for byte.

    \b
    Exit codes: 0 done, 1 refused, 2 usage, 3 nothing to do, 4 recovery needed,
    5 another process is writing, 6 the file system or the network failed (the tree is as it was).
    """


_to = click.option("--to", metavar="ID", help="Stop at this patch; 'base' is the release itself.  [default: all]")
_release = click.option(
    "--release", metavar="VERSION", help="Go to this filed release instead, up or down.  [default: the bundle at work]"
)
_dry = click.option("-n", "--dry-run", is_flag=True, help="Check everything, write nothing.")
_running = click.option("--refuse-if-running", is_flag=True, help="Refuse while a process runs from the tree.")


@apply_cli.command("apply")
@target_options
@_to
@_release
@_dry
@_running
@click.option(
    "--overlay",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Leave the tree as it is; make a patched copy of its package in this new or empty folder.",
)
@signature_options
@verb("apply")
def apply_command(report: Report, bundle_path: Path, **options: Any) -> Exit:
    """Apply the series, up to --to."""
    if options["overlay"] is not None and options["refuse_if_running"]:
        raise click.UsageError("--overlay changes no tree: nothing that runs is in its way")
    return _change(report, bundle_path, "apply", signed=_signed(options), **options)


@apply_cli.command("revert")
@target_options
@_to
@_dry
@_running
@verb("revert")
def revert_command(report: Report, bundle_path: Path, **options: Any) -> Exit:
    """Take the series off, down to --to."""
    return _change(report, bundle_path, "revert", **options)


def _change(report: Report, bundle_path: Path, direction: str, **options: Any) -> Exit:
    from patchbundle import change

    _refuse_two(options)
    return change.carry_out(report, bundle_path, change.Order(direction, **options))


@apply_cli.command("plan")
@target_options
@_to
@_release
@click.option("--revert", "down", is_flag=True, help="Plan the way down instead of up.")
@verb("plan")
def plan_command(
    report: Report, bundle_path: Path, to: str | None, release: str | None, down: bool, **options: Any
) -> Exit:
    """Show what apply (or revert) would do. Needs no lock and no write access."""
    from patchbundle import change, manifest, work

    if down and release is not None:
        raise click.UsageError("--release is a way up; --revert goes by the bundle that knows the tree")
    bundle = manifest.load(bundle_path)
    target = _discover(report, bundle, options)
    _, plan = work.make_plan(bundle, target, "revert" if down else "apply", to, release=release)
    change.say_plan(report, plan)
    if not plan.operations:
        report.say("nothing to do")
        return Exit.NOTHING_TO_DO
    return Exit.DONE


def _router_status(report: Report, bundle: Bundle, path: Path) -> Exit:
    from patchbundle import binary

    built = binary.read(path)
    base = binary.base_of(bundle)
    name, top = binary.name_of(bundle, base, built), len(bundle.pins(base).levels)
    report.result["router"] = {"path": str(path), "series": built.series, "level": built.level, "name": name}
    report.say(f"router:  {path}")
    report.say(f"series:  {built.series or 'none: a stock build'}")
    report.say(f"level:   {built.level} of {top} ({name})" if name else f"level:   {built.level}, of another bundle")
    return Exit.DONE if name else Exit.REFUSED


def _process(process: Process) -> dict[str, Any]:
    from datetime import datetime, timezone

    started = datetime.fromtimestamp(process.started, timezone.utc).isoformat(timespec="seconds")
    return {**process._asdict(), "started": started, "known_by": list(process.known_by)}


def _say_processes(report: Report, census: Census) -> None:
    for process in census.processes:
        row = _process(process)
        code = "OLD CODE, from before the change" if process.older else "started after the change"
        report.say(f"process: {process.name}, pid {process.pid}, since {row['started']}: {code}")
        gates = ["may not be looked at"] if process.gates is None else [f"{k}={v}" for k, v in process.gates.items()]
        report.say(f"         known by {', '.join(process.known_by)}; gates: {', '.join(gates) or 'none set'}")
    if census.closed:
        report.say(f"closed:  {census.closed} interpreters of other users cannot be looked into")


@apply_cli.command("status")
@target_options
@click.option("--diff", is_flag=True, help="Show how drifted files differ from the nearest known state.")
@click.option(
    "--router",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Tell what this wheel or binary of the router was built from, instead of where a tree stands.",
)
@click.option("--processes", is_flag=True, help="Tell every process that runs from the tree, with its gates.")
@verb("status")
def status_command(
    report: Report, bundle_path: Path, diff: bool, router: Path | None, processes: bool, **options: Any
) -> Exit:
    """Tell where a tree stands, file by file. Needs no lock and no write access.

    Exit code 0 at a known level, 1 if the tree has drifted, 4 if a run was interrupted.
    """
    from patchbundle import manifest, work

    bundle = manifest.load(bundle_path)
    if router is not None:
        if diff or processes or any(options.values()):
            raise click.UsageError("--router is about a file: it goes with no option of a target")
        return _router_status(report, bundle, router)
    _hide(report, bundle_path, options)
    target = _discover(report, bundle, options)
    if report.hidden is not None:
        report.hidden = {str(target.root): "$ROOT", **report.hidden}
    status = work.status(bundle, target)
    state = status.state
    report.result["status"] = {
        "base": state.base.id,
        "role": state.base.role,
        "bundle": bundle.lock.digest,
        "level": state.level,
        "name": state.level_name,
        "release": state.release or None,
        "nearest": state.pins.name_of(state.nearest),
        "levels": list(state.pins.levels),
        "receipt": state.receipt,
        "record": "not seen" if state.record_path is None else "as pinned" if state.record_fault is None else "drifted",
        "files": [{"path": file.path, "word": file.word, "holds": file.holds} for file in state.files],
        "unexpected": list(state.unexpected),
        "gates": status.gates,
        "stale_bytecode": [str(cache.folder / cache.path) for cache in status.stale],
        "older_processes": [{"pid": process.pid, "name": process.name} for process in status.census.older],
        "processes": [_process(process) for process in status.census.processes] if processes else None,
        "closed_processes": status.census.closed if processes else None,
    }
    report.say(f"base:    {state.base.id} ({state.base.role})")
    if state.level is not None:
        report.say(state.describe(state.level).replace("level ", "level:   ", 1))
    else:
        report.say(state.describe(state.nearest).replace("level ", "level:   drifted; nearest is ", 1))
    report.say(f"receipt: {state.receipt}")
    for file in state.files:
        report.say(f"  {file.word:<19} {file.path}")
    for path in state.unexpected:
        report.say(f"  {'unexpected':<19} {path}")
    if state.record_fault is not None:
        report.say(f"  {'drifted':<19} {state.record_fault.where}")
    for name, value in status.gates.items():
        report.say(f"gate:    {name}={value}")
    for cache in status.stale:
        report.say(f"stale bytecode: {cache.folder / cache.path} ({cache.kind})")
    if processes:
        _say_processes(report, status.census)
    for process in () if processes else status.census.older:
        report.say(f"running since before the change: {process.name}, pid {process.pid}")
    if diff:
        _say_differences(report, target, state)
    return Exit.DONE if state.level is not None else Exit.REFUSED


@apply_cli.command("exec")
@click.argument("role", type=click.Choice(["prefill", "decode", "router"]))
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- CMD...")
@click.option("--expect", required=True, metavar="LEVEL", help="'applied', 'base', a patch's id, or VERSION:ID.")
@click.option("--root", type=click.Path(path_type=Path), help="The tree that CMD runs from, as for the others.")
@click.option(
    "--python",
    metavar="EXE",
    help="Ask this interpreter where its sglang is.  [default: CMD's, if CMD starts with one; else this one]",
)
@click.option(
    "--router", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="The router's binary, for no tree."
)
@click.option(
    "--overlay", metavar="DIR", type=click.Path(path_type=Path), help="An overlay, which CMD gets first on PYTHONPATH."
)
@click.option("-n", "--dry-run", is_flag=True, help="Verify, start nothing.")
@verb("exec")
def exec_command(
    report: Report,
    bundle_path: Path,
    role: str,
    command: tuple[str, ...],
    expect: str,
    root: Path | None,
    python: str | None,
    router: Path | None,
    overlay: Path | None,
    dry_run: bool,
) -> Exit:
    """Verify the tree of a ROLE without writing anything, then become CMD. What does not hold is refused.

    What was refused was not started; else the exit code is CMD's.
    """
    from patchbundle import guard, manifest
    from patchbundle import target as target_module

    if sum(place is not None for place in (root, python, router, overlay)) > 1:
        raise click.UsageError("give one of --root, --python, --router and --overlay")
    if not (command or dry_run):
        raise click.UsageError("name the command after --")
    bundle = manifest.load_pins(bundle_path)
    environment = dict(os.environ) if overlay is None else guard.with_first(overlay.absolute(), os.environ)
    if router is not None:
        if role != "router":
            raise click.UsageError("--router goes with the role router")
        report.result["name"] = guard.verify_router(bundle, router, expect)
    else:
        place = overlay or root
        target = target_module.discover(
            bundle, root=place, python=None if place else python or guard.interpreter_of(command), role=role
        )
        if overlay is not None:
            guard.require_first(overlay, target, command)
        report.result["name"] = guard.verify(bundle, target, expect, environment)
    if not dry_run:
        guard.become(command, environment)
    report.say(f"holds:   {report.result['name']}")
    return Exit.DONE


def _say_differences(report: Report, target: Target, state: State) -> None:
    from patchbundle import explain
    from patchbundle.tree import Tree

    with Tree(target.root) as tree:
        found = list(explain.differences(tree, state))
    report.result["status"]["diff"] = [vars(item) for item in found]
    report.say(f"differences from {state.describe(state.nearest)}: {len(found) or 'none'}")
    colours = {"+": "green", "-": "red", "@": "cyan"}
    for item in found:
        report.say()
        shown = item.diff.startswith("diff --git")
        lines = item.diff.rstrip("\n").split("\n") if shown else [f"{item.path}: {item.diff}"]
        for line in lines:
            # What stands in a file must not speak to the terminal.
            text = "".join(sign if sign.isprintable() or sign == "\t" else ascii(sign)[1:-1] for sign in line)
            bold = line.startswith(("diff ", "+++ ", "--- "))
            styled = click.style(text, fg=None if bold else colours.get(line[:1]), bold=bold or None)
            report.say(styled if sys.stdout.isatty() else text)


@apply_cli.command("explain")
@click.argument("file", metavar="FILE")
@target_options
@verb("explain")
def explain_command(report: Report, bundle_path: Path, file: str, **options: Any) -> Exit:
    """Tell which patches touch FILE of a tree, why, by which gate, and how to take them off."""
    from patchbundle import explain, manifest, names, work
    from patchbundle.tree import Tree

    bundle = manifest.load(bundle_path)
    target = _discover(report, bundle, options)
    path = names.below(target.root, file, "FILE")
    with Tree(target.root) as tree:
        state = work.look(bundle, target, tree)
        there = tree.kind(path)
    word = next((item.word for item in state.files if item.path == path), None)
    found = explain.touches(state, target, path)
    report.result["explain"] = {
        "path": path,
        "kind": there,
        "word": word,
        "level": state.level,
        "patches": [
            {
                "id": touch.patch.id,
                "level": touch.level,
                "applied": touch.applied,
                "does": "installs" if touch.installs else "changes",
                "description": touch.patch.header.description,
                "why": touch.patch.header.why,
                "gate": touch.patch.header.gate,
                "class": touch.patch.header.patch_class,
                "drop_when": touch.patch.header.drop_when,
                "off": touch.off,
            }
            for touch in found
        ],
    }
    report.say(f"file:    {path} ({word or there})")
    for touch in found:
        header = touch.patch.header
        report.say()
        report.say(f"{touch.patch.id}: patch {touch.level}, {'applied' if touch.applied else 'not applied'}")
        report.say(f"  {'installs it' if touch.installs else 'changes it'}: {header.description}")
        report.say(f"  why:   {header.why}")
        report.say(f"  gate:  {header.gate}")
        if touch.applied:
            above = len(state.bundle.series(state.base.role)[touch.level : state.nearest])
            report.say(f"  off:   {touch.off}" + (f"  (and the {above} above it)" if above else ""))
    if path == state.base.receipt:
        report.say("the receipt: apply and revert write it; it says which bundle and patches made this tree")
    elif path == state.record_path:
        report.say("RECORD: apply and revert keep the lines of the files that they change true, and give them back")
    elif not found:
        report.say("no patch of this series touches it; whether it is the release's: check_sources.py --full")
    return Exit.DONE if found else Exit.NOTHING_TO_DO


@apply_cli.command("recover")
@click.option(
    "--root", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True, help="The tree's root."
)
@click.option("--back", is_flag=True, help="Go back to the old state instead of on to the new one.")
@_dry
@verb("recover")
def recover_command(report: Report, bundle_path: Path, root: Path, back: bool, dry_run: bool) -> Exit:
    """Finish (or with --back undo) a run that was interrupted. Needs no bundle: all is beside the files."""
    from patchbundle import target as target_module
    from patchbundle import transaction
    from patchbundle.tree import Tree

    root = target_module.interrupted_root(root)
    if dry_run:
        with Tree(root) as tree:
            found, log = transaction.left_behind(tree)
        report.result["interrupted"] = found
        report.result["phase"] = log.phase if log else None
        report.say(
            f"interrupted in phase {log.phase}" if log else "interrupted at its start" if found else "nothing to do"
        )
        return Exit.DONE if found else Exit.NOTHING_TO_DO
    state, log = transaction.recover(root, back=back)
    report.result["state"] = state
    if log is not None:
        level = log.to_level if state == "new" else log.from_level
        report.result["level"] = level
        report.say(f"recovered: the tree is {state}, at {level} of {log.base}")
    else:
        report.say("nothing to do" if state == "clean" else "recovered: nothing had been changed")
    return Exit.NOTHING_TO_DO if state == "clean" else Exit.DONE


@apply_cli.command("roundtrip")
@click.option("--role", type=click.Choice(["prefill", "decode", "router"]), help="Only this role.")
@click.option("--each-level", is_flag=True, help="Stop, attest and compare at every level, up and down.")
@click.option("--offline", is_flag=True, help="Take archives from the cache only.")
@verb("roundtrip")
def roundtrip_command(report: Report, bundle_path: Path, role: str | None, each_level: bool, offline: bool) -> Exit:
    """Every series on its real base, up and down again, attested and compared byte for byte."""
    from patchbundle import work

    bundle, _ = _scanned(bundle_path)
    rows = [
        work.roundtrip(bundle, base, each_level=each_level, offline=offline, progress=report.progress)
        for base in bundle.bases.values()
        # An operator's image is not to be had from the package index: `base add` proves its way up and down.
        if role in (None, base.role) and base.is_release
    ]
    head = ("role", "base", "patches", "files", "sources", "before", "after", "reverted", "seconds")
    table = [
        (
            r.role,
            r.base,
            r.patches,
            r.touched,
            r.sources,
            r.before[:12],
            r.after[:12],
            r.reverted[:12],
            f"{r.seconds:.1f}",
        )
        for r in rows
    ]
    widths = [max(len(str(line[column])) for line in [head, *table]) for column in range(len(head))]
    for line in [head, *table]:
        report.say("  ".join(f"{cell!s:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())
    report.result["rows"] = [row._asdict() | {"holds": row.holds} for row in rows]
    return Exit.DONE if all(row.holds for row in rows) else Exit.REFUSED


@apply_cli.command("pin")
@click.option("--check", is_flag=True, help="Write nothing; exit code 1 if the lock would change.")
@click.option("--members", is_flag=True, help="First rewrite the member lists of source archives under config/.")
@click.option("--offline", is_flag=True, help="Take archives from the cache only.")
@verb("pin")
def pin_command(report: Report, bundle_path: Path, check: bool, members: bool, offline: bool) -> Exit:
    """Recompute patches/pins.lock, after proving that every diff applies exactly and comes off again."""
    from patchbundle import pin

    if members and not check:
        for path in pin.write_members(bundle_path, offline=offline):
            report.say(f"written: {path}")
    lock, changed = pin.pin(bundle_path, offline=offline, write=not check)
    report.result["changed"] = changed
    report.result["digest"] = lock.digest
    report.say(f"{'changed' if changed else 'unchanged'}: patches/pins.lock, bundle {lock.digest}")
    if not changed:
        return Exit.NOTHING_TO_DO
    return Exit.REFUSED if check else Exit.DONE


@apply_cli.command("release")
@click.argument("version")
@verb("release")
def release_command(report: Report, bundle_path: Path, version: str) -> Exit:
    """File the bundle, as it was released, under patches/releases/VERSION/: later bundles know its trees by it."""
    from patchbundle import releases

    place = releases.file(bundle_path, version)
    report.result["filed"] = place.relative_to(bundle_path).as_posix()
    report.say(f"filed: {place.relative_to(bundle_path).as_posix()}")
    report.say("next: tools/apply.py pin")
    return Exit.DONE


@apply_cli.command("attest")
@target_options
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder to make.")
@click.option(
    "--sign",
    "key",
    metavar="KEY",
    type=click.Path(path_type=Path),
    help="Sign each file with this secret minisign key.",
)
@verb("attest")
def attest_command(report: Report, bundle_path: Path, out: Path, key: Path | None, **options: Any) -> Exit:
    """Write what the patched trees are made of: CycloneDX 1.6, in-toto statements, the lock.

    Of the top level of each base; with --root or --python of that tree, at the level at which it stands.
    """
    from patchbundle import manifest, work

    attest = _extra("attest")
    bundle = manifest.load(bundle_path)
    if options["root"] is None and options["python"] is None:
        if options["require_torch"]:
            raise click.UsageError("--require-torch needs --root or --python")
        bases = [base for base in bundle.bases.values() if options["role"] in (None, base.role)]
        if not bases:
            raise click.UsageError(f"this bundle has no base of role {options['role']}")
        stands = [(bundle, base, len(bundle.pins(base).levels)) for base in bases]
    else:
        state, _ = work.check_target(bundle, _discover(report, bundle, options), None, False)
        stands = [(state.bundle, state.base, state.require_level(str(options["root"])))]
    report.result["documents"] = attest.write(stands, out, key)
    for name in report.result["documents"]:
        report.say(f"written: {out / name}")
    return Exit.DONE


@apply_cli.command("image")
@click.option(
    "--from", "source", type=click.Path(path_type=Path), required=True, help="An OCI layout, or docker's tar."
)
@click.option("--to", "out", type=click.Path(path_type=Path), required=True, help="The OCI layout to make.")
@click.option("--role", type=click.Choice(["prefill", "decode", "router"]), required=True, help="The series to apply.")
@click.option("--level", metavar="ID", help="Stop at this patch; 'base' is the release itself.  [default: all]")
@click.option("--revert", "down", is_flag=True, help="Take the series off instead.")
@click.option("--image", "name", metavar="NAME", help="The image's name or digest, where there are several.")
@click.option("--platform", metavar="OS/ARCH", help="Of an index this one.  [default: linux, and this machine's]")
@click.option("--root", metavar="PATH", help="The tree's root in the image, where it holds several.")
@signature_options
@_dry
@verb("image")
def image_command(report: Report, bundle_path: Path, down: bool, **options: Any) -> Exit:
    """Apply a series to an image, as one more layer, without a daemon."""
    from patchbundle import change, manifest

    image, signed = _extra("image"), _signed(options)
    bundle = manifest.load(bundle_path)
    change.require_signature(report, bundle, signed)
    made = image.patch(bundle, image.Order(direction="revert" if down else "apply", **options), report.progress)
    for line in made.target.describe():
        report.say(line)
    report.result["target"] = {
        "root": str(made.target.root),
        "version": made.target.version,
        "torch": made.target.torch,
    }
    report.result["warnings"] = list(made.warnings)
    report.result["dropped_bytecode"] = list(made.dropped)
    change.say_plan(report, made.plan)
    if not made.plan.operations:
        report.say(f"nothing to do: the image is at level {made.plan.goal.level} ({made.plan.goal.name})")
        return Exit.NOTHING_TO_DO
    for path in made.dropped:
        report.detail(f"  whiteout {path}")
    if made.layer is None:
        report.say("dry run: nothing was written")
        return Exit.DONE
    report.result["image"] = {
        "name": made.name,
        "digest": made.digest,
        "base": made.base,
        "layer": made.layer.digest,
        "size": made.layer.size,
        "diff_id": made.layer.diff_id,
    }
    report.say(f"layer:   {made.layer.digest}, {made.layer.size} bytes")
    report.say(f"image:   {made.digest}, called {made.name}; its base is {made.base}")
    return Exit.DONE


def _extra(name: str) -> Any:
    """A module of what a workstation has beside the node's tools. It is looked for beside the package."""
    import importlib

    try:
        return importlib.import_module(f"workstation.{name}")
    except ModuleNotFoundError as error:
        raise click.UsageError(f"this needs tools/workstation/ of the repository: {error}") from error


@apply_cli.command("base")
@click.argument("action", metavar="add", type=click.Choice(["add"]))
@click.option("--from", "tree", type=click.Path(path_type=Path), required=True, help="The image's tree, at base.")
@click.option("--id", "base_id", metavar="X", required=True, help="The name of the new base.")
@click.option("--overlay", multiple=True, metavar="FILE", help="A file that differs from the release.")
@click.option("--offline", is_flag=True, help="Take archives from the cache only.")
@_dry
@verb("base")
def base_command(
    report: Report,
    bundle_path: Path,
    action: str,
    tree: Path,
    base_id: str,
    overlay: tuple[str, ...],
    offline: bool,
    dry_run: bool,
) -> Exit:
    """Take a fixed image, whose files differ from the release in declared places, in as a base of its own."""
    from patchbundle import operators

    made = operators.add(bundle_path, base_id, tree, overlay, offline=offline, write=not dry_run)
    report.result["base"] = made.id
    report.result["overlay"] = {path: str(item.found) for path, item in made.overlay.items()}
    report.say(f"{'would add' if dry_run else 'added'}: {made.id} ({made.role}), as {made.version} but for:")
    for path, item in made.overlay.items():
        report.say(f"  {path}  {item.found.brief()}")
    return Exit.DONE


@apply_cli.command("env")
@click.argument("role", type=click.Choice(["prefill", "decode", "router"]))
@click.option("--profile", metavar="NAME", help="config/profile-NAME.toml over the role's file.")
@click.option("--on", multiple=True, metavar="GATE", help="Switch a gate on.")
@click.option("--off", multiple=True, metavar="GATE", help="Switch a gate off.")
@click.option("--argument", "arguments", multiple=True, metavar="NAME=VALUE", help="Set a launch argument.")
@verb("env")
def env_command(
    report: Report,
    bundle_path: Path,
    role: str,
    profile: str | None,
    on: tuple[str, ...],
    off: tuple[str, ...],
    arguments: tuple[str, ...],
) -> Exit:
    """Print the export lines and launch arguments of a ROLE, or refuse a combination that would not start."""
    from patchbundle import launch, manifest

    made = launch.load(manifest.load(bundle_path), bundle_path, role, profile, on, off, arguments)
    report.result["environment"] = made.exports
    report.result["arguments"] = made.flags
    for line in made.lines():
        report.say(line)
    return Exit.DONE


@apply_cli.command("refresh")
@click.argument("patch_id", metavar="ID")
@click.option("--from", "tree", type=click.Path(path_type=Path), required=True, help="The edited tree, at ID.")
@_dry
@verb("refresh")
def refresh_command(report: Report, bundle_path: Path, patch_id: str, tree: Path, dry_run: bool) -> Exit:
    """Write the patch ID, and its sources, back from a tree that was edited at that patch. The header is kept."""
    from patchbundle import author, manifest
    from patchbundle import target as target_module

    bundle = manifest.load_unlocked(bundle_path)
    target = target_module.discover(bundle, root=tree)
    refreshed = author.refresh(bundle, patch_id, target.root)
    if not dry_run:
        author.write(bundle_path, refreshed)
    report.result["written"] = list(refreshed.written)
    report.result["unnamed"] = list(refreshed.unnamed)
    for path in refreshed.written:
        report.say(f"{'would write' if dry_run else 'written'}: {path}")
    for source in refreshed.unnamed:
        report.say(f"not in the series yet: {source}; add it to the sources of {patch_id}")
    if not refreshed.written:
        report.say("nothing to do: the patch gives this tree")
        return Exit.NOTHING_TO_DO
    report.say("next: tools/apply.py pin")
    return Exit.DONE


@apply_cli.command("rebase-report")
@click.option(
    "--role", type=click.Choice(["prefill", "decode", "router"]), required=True, help="The series to look up."
)
@click.option(
    "--release", "version", metavar="VERSION", help="A published release, fetched without a pin.  [default: the newest]"
)
@click.option(
    "--archive", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="An archive on this disk."
)
@verb("rebase-report")
def rebase_command(report: Report, bundle_path: Path, role: str, version: str | None, archive: Path | None) -> Exit:
    """Tell how each hunk of a series fares on another release. Changes nothing.

    Exit code 0 if everything fits as it stands, 1 if something does not.
    """
    from patchbundle import author, fetch, manifest

    if version is not None and archive is not None:
        raise click.UsageError("give --release or --archive, not both")
    bundle = manifest.load_unlocked(bundle_path)
    base = next(base for base in bundle.bases.values() if base.role == role)
    with fetch.unpinned(base, version) if archive is None else nullcontext(archive) as place:
        other = dict(fetch.members(place))
        report.say(f"release: {place.name}")
    fates = author.rebase_report(bundle, role, other)
    report.result["fates"] = [vars(fate) for fate in fates]
    for fate in fates:
        place_text = f"{fate.path}:{fate.line}" if fate.line else fate.path
        report.say(f"  {fate.word:<9} {fate.patch}  {place_text}{f'  ({fate.detail})' if fate.detail else ''}")
    return Exit.DONE if all(fate.word == "fits" for fate in fates) else Exit.REFUSED


@apply_cli.command("fetch-base")
@click.option("--role", type=click.Choice(["prefill", "decode", "router"]), help="Only this role.")
@click.option("--archive", metavar="FILE", help="Only the archive of this name.")
@click.option("--all", "every", is_flag=True, help="Every published archive, not just this machine's.")
@click.option("--offline", is_flag=True, help="Only look in the cache.")
@verb("fetch-base")
def fetch_command(
    report: Report, bundle_path: Path, role: str | None, archive: str | None, every: bool, offline: bool
) -> Exit:
    """Fetch the pinned archives into the cache, by hash. What is there already is checked again."""
    from patchbundle import fetch, manifest

    bases = [base for base in manifest.load_unlocked(bundle_path).bases.values() if role in (None, base.role)]
    wanted = []
    for base in bases:
        if archive is not None:
            wanted += [(base, item) for item in base.archives if item.filename == archive]
        else:
            wanted += [(base, item) for item in (base.archives if every else [fetch.default_archive(base)])]
    if not wanted:
        raise BundleError(Reason.ARCHIVE, str(archive), expected="an archive of config/bases.toml", found="none")
    report.result["archives"] = []
    for base, item in wanted:
        report.progress(f"fetching {item.filename}")
        place = fetch.fetch(base, item, offline=offline)
        report.result["archives"].append({"path": str(place), "sha256": item.sha256})
        report.say(f"{item.sha256}  {place}")
    return Exit.DONE


@apply_cli.command("clean-cache")
@verb("clean-cache")
def clean_command(report: Report, bundle_path: Path) -> Exit:
    """Remove cached archives that this bundle does not name."""
    from patchbundle import fetch, manifest

    bases = manifest.load_unlocked(bundle_path).bases.values()
    keep = {item.sha256 for base in bases for item in (*base.archives, *base.build)}
    removed = fetch.clean(keep)
    report.result["removed"] = [str(path) for path in removed]
    for path in removed:
        report.say(f"removed {path}")
    return Exit.DONE if removed else Exit.NOTHING_TO_DO


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="patchbundle")
@target_options
@click.option(
    "--expect",
    type=click.Choice(["base", "applied", "any"]),
    default="any",
    show_default=True,
    help="Where the target must stand.",
)
@click.option("--full", is_flag=True, help="Compare every file of the target with the pinned release.")
@signature_options
@click.option(
    "--bytecode", metavar="EXE", help="Prove that what this interpreter would run for a pinned module is of its source."
)
@click.option(
    "--evidence", is_flag=True, help="Check every figure and every link upstream. Needs the whole repository."
)
@verb("check")
def check_cli(report: Report, bundle_path: Path, **given: Any) -> Exit:
    """Verify the bundle itself and, with --root or --python, a target. Read-only.

    \b
    Exit codes: 0 holds, 1 does not hold, 2 usage, 4 a run was interrupted, 6 the file system failed.
    """
    if not given["full"] or given["root"] is None:
        return _check(report, bundle_path, None, **given)
    from patchbundle import survey

    # Hashed while the bundle is read, which then tells whether this was the place.
    with survey.guessed(given["root"], "sglang") as early:
        return _check(report, bundle_path, early, **given)


def _check(
    report: Report,
    bundle_path: Path,
    early: Begun | None,
    expect: str,
    full: bool,
    bytecode: str | None,
    evidence: bool,
    **options: Any,
) -> Exit:
    from patchbundle import change, manifest

    signed = _signed(options)
    targeted = options["root"] is not None or options["python"] is not None
    if targeted and not evidence:
        # Scan and strict reading are what an author needs. That these are the bytes that passed, the lock tells.
        bundle = manifest.load_compared(bundle_path)
        patches = sum(path.endswith(".patch") for path in bundle.lock.artifacts)
        files, done = len(bundle.artifacts), "as the lock says"
    else:
        from patchbundle import launch

        (bundle, files), done = _scanned(bundle_path), "scanned"
        launch.check_files(bundle_path)
        patches = len(bundle.patches)
    change.require_signature(report, bundle, signed)
    # Reading them is checking them.
    filed = [item.release for item in bundle.filed]
    report.result["bundle"] = {"digest": bundle.lock.digest, "files": files, "patches": patches, "releases": filed}
    report.say(f"bundle:  {bundle.lock.digest}, {patches} patches, {files} files {done}")
    if filed:
        report.say(f"filed:   {', '.join(filed)}")
    if evidence:
        _check_evidence(report, bundle_path)
    if not targeted:
        if full or bytecode or expect != "any" or options["role"] or options["require_torch"]:
            raise click.UsageError("--expect, --full, --bytecode, --role and --require-torch need --root or --python")
        return Exit.DONE
    from patchbundle import work

    target = _discover(report, bundle, options)
    state, attestation = work.check_target(bundle, target, None if expect == "any" else expect, full, early)
    report.result["level"] = state.level
    report.result["name"] = state.level_name
    report.result["release"] = state.release or None
    whose = f" of release {state.release}" if state.release else ""
    report.say(f"holds:   {state.base.id} at level {state.level} ({state.level_name}){whose}")
    if attestation is not None:
        report.result["attestation"] = {
            "archive": attestation.archive,
            "checked": attestation.checked,
            "extra": list(attestation.extra),
        }
        report.say(f"release: {attestation.checked} files as in {attestation.archive}, {len(attestation.extra)} extra")
        for path in attestation.extra:
            report.detail(f"  extra {path}")
    if bytecode is not None:
        from patchbundle import proof

        made = proof.prove(target.root, [file.path for file in state.files if file.found.is_file], bytecode)
        report.result["bytecode"] = vars(made)
        report.say(f"bytecode: {made.proven} compiled files are of the pinned sources, {made.stale} would be made anew")
    return Exit.DONE


def _check_evidence(report: Report, root: Path) -> None:
    """The figures are checked by what proves the bundle, which no node has: it is looked for beside the bundle."""
    import importlib

    try:
        sys.path.append(str(root))
        check = importlib.import_module("lab.evidence.check")
    except ModuleNotFoundError as error:
        raise click.UsageError(f"--evidence needs the whole repository and its test packages: {error}") from error
    found = check.problems(root)
    report.result["evidence"] = [{"where": problem.where, "what": problem.what} for problem in found]
    for problem in found:
        report.say(f"claim:   {problem}")
    if found:
        raise BundleError(Reason.EVIDENCE, found[0].where, found=found[0].what)
    report.say("claims:  all are what stands behind them")


def main_node(name: str) -> None:
    """Entry point of the one file: the verbs that a node needs, and ``check``."""
    for other in set(apply_cli.commands) - set(NODE_VERBS):
        del apply_cli.commands[other]
    apply_cli.add_command(check_cli, "check")
    _main(apply_cli, name)


def main_apply() -> None:
    """Entry point of tools/apply.py."""
    _main(apply_cli, "apply.py")


def main_check() -> None:
    """Entry point of tools/check_sources.py."""
    _main(check_cli, "check_sources.py")


def _main(command: click.Command, name: str) -> None:
    output.install()
    try:
        command.main(prog_name=name)
    finally:
        # The system takes everything back at once: the interpreter need not look through it for cycles first.
        gc.freeze()
