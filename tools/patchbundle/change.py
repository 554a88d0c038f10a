"""``apply`` and ``revert``, from their options to their last word; and the plain form of them in the one file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from patchbundle import manifest, output, preflight, processes, transaction, work
from patchbundle import target as target_module
from patchbundle.bases import ROLES
from patchbundle.disk import Disk
from patchbundle.errors import BundleError, Exit, Reason
from patchbundle.report import Report
from patchbundle.tree import Tree

if TYPE_CHECKING:
    from patchbundle.manifest import Bundle
    from patchbundle.plan import Plan
    from patchbundle.target import Target

VERBS = ("apply", "revert")


class Order(NamedTuple):
    """What is asked for. ``direction`` is the verb; ``signed``: the key that must have signed, and where it says so."""

    direction: str
    root: Path | None
    python: str | None = None
    role: str | None = None
    require_torch: bool = False
    to: str | None = None
    release: str | None = None
    dry_run: bool = False
    refuse_if_running: bool = False
    overlay: Path | None = None
    signed: tuple[str, Path | None] | None = None


def at_once(words: Sequence[str], bundle: Path) -> None:
    """Carry out ``VERB --root DIR``, also with ``--role``, ``--to`` and ``--json``, and end the process.

    Whatever else the words say is left to the whole command line, which means the same by these: half of what the one
    file compiles at a start is that command line.
    """
    order, as_json = _read(words)
    if order is None:
        return
    output.install()
    report = Report(order.direction, as_json, verbose=False)
    try:
        report.run(lambda: carry_out(report, bundle.resolve(), order))
    except KeyboardInterrupt:
        output.line(error=True)
        output.line("Aborted!", error=True)
        sys.exit(1)


def _read(words: Sequence[str]) -> tuple[Order | None, bool]:
    """What these words mean, and whether JSON is asked for; None if they are of another form."""
    rest = [word for word in words[1:] if word != "--json"]
    as_json = len(words) - 1 - len(rest)
    given = dict(zip(rest[::2], rest[1::2], strict=False))
    plain = (
        bool(words)
        and words[0] in VERBS
        and as_json <= 1
        and len(rest) == 2 * len(given)
        and given.keys() <= {"--root", "--role", "--to"}
        and given.get("--root")
        and given.get("--role") in (None, *ROLES)
        and not any(value.startswith("-") for value in given.values())
    )
    if not plain:
        return None, False
    return Order(words[0], Path(given["--root"]), role=given.get("--role"), to=given.get("--to")), bool(as_json)


def carry_out(report: Report, bundle_path: Path, order: Order) -> Exit:
    """Change a tree as it is ordered, or say what would be done.

    Raises:
        BundleError: for the first thing that does not hold.
    """
    bundle = manifest.load(bundle_path)
    require_signature(report, bundle, order.signed)
    target = discover(
        report, bundle, root=order.root, python=order.python, role=order.role, require_torch=order.require_torch
    )
    if order.overlay is not None:
        return _overlay(report, bundle, target, order, order.overlay.absolute())
    # The lock first: a plan made without it may be out of date when it is carried out.
    with Tree(target.root) if order.dry_run else transaction.locked(target.root) as tree:
        state, plan = work.make_plan(bundle, target, order.direction, order.to, release=order.release, tree=tree)
        say_plan(report, plan)
        if not plan.operations:
            report.say(f"nothing to do: the tree is at level {plan.goal.level} ({plan.goal.name})")
            return Exit.NOTHING_TO_DO
        _tell_running(report, target.root, order.refuse_if_running)
        if not isinstance(tree, Disk):
            _warn(report, preflight.check(tree, plan, target.mirrors))
            report.say("dry run: nothing was written")
            return Exit.DONE
        outcome = work.execute(bundle, target, state, plan, report.progress, disk=tree)
    report.result["dropped_bytecode"] = list(outcome.dropped)
    for path in outcome.dropped:
        report.detail(f"  dropped {path}")
    _warn(report, outcome.warnings)
    report.say(f"done: level {plan.goal.level} ({plan.goal.name}); restart what runs from this tree")
    return Exit.DONE


def require_signature(report: Report, bundle: Bundle, signed: tuple[str, Path | None] | None) -> None:
    """Refuse a bundle that is not signed as it is asked for.

    Raises:
        BundleError: SIGNATURE or NO_PROGRAM.
    """
    if signed is not None:
        from patchbundle import signature

        report.result["signature"] = signature.require(bundle, *signed)
        report.say(f"signed:  {report.result['signature']}")


def discover(
    report: Report, bundle: Bundle, *, root: Path | None, python: str | None, role: str | None, require_torch: bool
) -> Target:
    """Find the target, and tell of it.

    Raises:
        BundleError: as ``target.discover``.
    """
    target = target_module.discover(bundle, root=root, python=python, role=role, require_torch=require_torch)
    for line in target.describe():
        report.say(line)
    report.result["target"] = {"root": str(target.root), "version": target.version, "torch": target.torch}
    report.result["warnings"] = target.warnings
    return target


def say_plan(report: Report, plan: Plan) -> None:
    report.result["plan"] = {
        "base": plan.base.id,
        "from": plan.start.name,
        "to": plan.goal.name,
        "operations": [
            {"verb": op.verb, "path": op.path, "old": str(op.old), "new": str(op.new)} for op in plan.operations
        ],
        "new_folders": list(plan.new_folders),
        "gone_folders": list(plan.gone_folders),
    }
    report.say(f"base:    {plan.base.id} ({plan.base.role})")
    report.say(f"from:    level {plan.start.level} ({plan.start.name})")
    report.say(f"to:      level {plan.goal.level} ({plan.goal.name})")
    for op in plan.operations:
        report.say(f"  {op.verb:<7} {op.path}")
        report.detail(f"          {op.old.brief()} -> {op.new.brief()}")


def _tell_running(report: Report, root: Path, refuse: bool) -> None:
    """Warn of what runs from the tree that is about to change, or refuse.

    Raises:
        BundleError: RUNNING.
    """
    try:
        census = processes.of_tree(root, time.time())
    except OSError:
        if refuse:
            raise
        return
    found = [f"{process.name}, pid {process.pid}" for process in census.processes]
    if refuse and found:
        raise BundleError(Reason.RUNNING, str(root), expected="no process that runs from it", found="; ".join(found))
    warnings = [f"{process}, runs from this tree: it keeps the old code until it is restarted" for process in found]
    if refuse and census.closed:
        warnings.append(f"{census.closed} interpreters of other users cannot be looked into")
    _warn(report, warnings)


def _warn(report: Report, warnings: Iterable[str]) -> None:
    for warning in warnings:
        report.result["warnings"].append(warning)
        report.say(f"warning: {warning}")


def _overlay(report: Report, bundle: Bundle, target: Target, order: Order, place: Path) -> Exit:
    from patchbundle import overlay

    plan = overlay.make(
        bundle, target, place, order.to, release=order.release, dry_run=order.dry_run, progress=report.progress
    )
    say_plan(report, plan)
    if order.dry_run:
        report.say("dry run: nothing was written")
        return Exit.DONE
    report.say(f"done: level {plan.goal.level} ({plan.goal.name}) in {place}; {target.root} is as it was")
    for line in overlay.uses(place, target.root, plan.base):
        report.say(f"  {line}")
    other = overlay.shadow(place, plan.base)
    if other is not None:
        _warn(report, [f"{other} comes before it for what is started in this folder with -m or -c"])
    return Exit.DONE
