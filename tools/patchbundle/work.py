"""The verbs as functions: what each does to a target, without a word printed."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Set
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from patchbundle import bytecode, imports, transaction
from patchbundle import plan as plan_module
from patchbundle import state as state_module
from patchbundle.bases import Base
from patchbundle.bytecode import Cache
from patchbundle.disk import Disk
from patchbundle.errors import BundleError, Reason, command
from patchbundle.identity import EXECUTABLE, Attributes
from patchbundle.manifest import Bundle
from patchbundle.plan import Plan, Stand
from patchbundle.state import State
from patchbundle.target import Target
from patchbundle.transaction import Outcome
from patchbundle.tree import Tree

# What a guarded start does not need is imported where it is: each module is a part of every start.
if TYPE_CHECKING:
    from patchbundle.attest import Attestation
    from patchbundle.processes import Census
    from patchbundle.survey import Begun, Memory

Progress = Callable[[str], None]


def _silent(_: str) -> None:
    return None


def look(bundle: Bundle, target: Target, tree: Tree) -> State:
    """Where the target stands, on the base that fits it best.

    Raises:
        BundleError: RECOVERY_NEEDED, if an interrupted run left the tree in between.
    """
    state = _look(bundle, target, tree)
    # A whole transaction of somebody else may have run between the first file and the last.
    return state if state.level is not None else _look(bundle, target, tree)


def _look(bundle: Bundle, target: Target, tree: Tree) -> State:
    transaction.refuse_interrupted(tree)
    best = _best(bundle, target, tree)
    for filed in bundle.filed if best is None or best.level is None else ():
        # Of equally near ones the bundle at work, then the newest.
        other = _best(filed, target, tree)
        if other is not None and (best is None or _nearness(other) > _nearness(best)):
            best = other
    transaction.refuse_interrupted(tree)
    assert best is not None
    return best


def _best(bundle: Bundle, target: Target, tree: Tree) -> State | None:
    """The look at the base that fits best, of those of the target that this bundle has."""
    known = [bundle.bases[base.id] for base in target.bases if base.id in bundle.bases]
    states = [state_module.look(tree, bundle, base, target.record) for base in known]
    key = lambda state: (state.level is not None, sum(file.holds for file in state.files))  # noqa: E731
    return max(states, key=key, default=None)


def _nearness(state: State) -> tuple[bool, int, bool]:
    wrong = sum(not file.holds for file in state.files) + len(state.unexpected)
    # The receipt only tells which of two drifts to show: neither is a level.
    return state.level is not None, -wrong, state.receipt == "current"


class Status(NamedTuple):
    """Everything that ``status`` tells beside the state."""

    state: State
    gates: dict[str, str]
    stale: tuple[Cache, ...]
    census: Census


def status(bundle: Bundle, target: Target) -> Status:
    from patchbundle import processes

    with Tree(target.root) as tree:
        state = look(bundle, target, tree)
        caches = bytecode.find(tree, _modules(state), target.mirrors)
    stale = [cache for cache in caches if _hides(state, cache)]
    if any(_replaces(state, cache) for cache in caches):
        # What would run is as no level has it.
        state = state._replace(level=None)
    changed = [found.status.st_ctime for found in state.found.values() if found.status is not None]
    census = processes.of_tree(target.root, max(changed, default=0.0), known_gates(bundle, state.bundle))
    return Status(state, gates(bundle, state.bundle), tuple(stale), census)


def _modules(state: State) -> list[str]:
    return [path for path in state.pins.paths if state.found[path].identity.is_file]


def _replaces(state: State, cache: Cache) -> bool:
    """Whether an interpreter would run this in place of the pinned module that stands there, and never notice."""
    source = state.data(cache.module)
    return cache.kind == "link" if source is None else cache.replaces(source)


def _refuse_bytecode(state: State, caches: Iterable[Cache], changed: Set[str] = frozenset()) -> None:
    """Refuse bytecode that hides what stands in the tree, but for plain files of modules that a run changes: it
    drops them.

    Raises:
        BundleError: BYTECODE.
    """
    for cache in caches:
        if _replaces(state, cache) and (cache.kind == "link" or cache.module not in changed):
            raise BundleError(
                Reason.BYTECODE,
                str(cache.folder / cache.path),
                expected=f"no bytecode that an interpreter runs unseen in place of {cache.module}",
                found="a link" if cache.kind == "link" else "bytecode of another source, which is never checked",
                next_step="remove it, then run the command again",
            )


def _hides(state: State, cache: Cache) -> bool:
    """Bytecode that an interpreter may run in place of a source that changed after it was compiled."""
    if cache.kind == "link":
        return True
    source = state.found[cache.module].status
    if source is None or not cache.hides(int(source.st_mtime), source.st_size):
        return False
    if cache.kind != "timestamp":
        return True
    try:
        made = (cache.folder / cache.path).stat().st_mtime
    except OSError:
        return False
    return made < source.st_ctime and source.st_ctime - source.st_mtime > 1


def known_gates(*bundles: Bundle) -> set[str]:
    """The gates that the patches of these bundles have."""
    return {patch.header.gate_name for item in bundles for patch in item.patches if patch.header.gate_name}


def gates(bundle: Bundle, *more: Bundle) -> dict[str, str]:
    """The gates of these bundles that are set in this environment."""
    known = known_gates(bundle, *more)
    return {name: value for name, value in sorted(os.environ.items()) if name in known}


def make_plan(
    bundle: Bundle,
    target: Target,
    direction: str,
    to: str | None,
    *,
    release: str | None = None,
    tree: Tree | None = None,
) -> tuple[State, Plan]:
    """Plan ``apply`` (up) or ``revert`` (down); by default all the way. ``tree`` is the target's, if it is open.

    ``apply`` leads to this bundle, or to a filed ``release`` of it, also from a tree that another release patched.
    ``revert`` takes off what there is, with the bundle that knows it.

    Raises:
        BundleError: if the tree is at no known level, or ``to`` lies the other way.
    """
    wished = bundle if release is None else bundle.released(release)
    with nullcontext(tree) if tree is not None else Tree(target.root) as opened:
        state = look(bundle, target, opened)
        start = Stand(state.bundle, state.base, state.require_level(str(target.root)))
        goal = _goal(wished if direction == "apply" else start.bundle, start, direction, to)
        if goal.bundle is start.bundle and (goal.level - start.level) * (1 if direction == "apply" else -1) < 0:
            other = "revert" if direction == "apply" else "apply"
            raise BundleError(
                Reason.NOT_EXPECTED,
                str(target.root),
                expected=f"a tree {'at or below' if direction == 'apply' else 'at or above'} {goal.name}",
                found=f"level {start.level} ({start.name})",
                next_step=f"run: {command(other, '--to', goal.pins.name_of(goal.level), '--root', target.root)}",
            )
        # What only the other bundle pins: it has to be as the base has it.
        limits = {path: max(identity.size for identity in chain) for path, chain in goal.pins.paths.items()}
        more = {path: opened.find(path, limit).file for path, limit in limits.items() if path not in state.pins.paths}
        made = plan_module.plan(
            start,
            goal,
            {**state.tree, **more},
            record_path=state.record_path,
            record_data=state.data(state.record_path),
            receipt_data=state.data(state.base.receipt),
            attributes=_own_attributes(opened, state),
        )
        changed = {op.path for op in made.operations}
        modules = sorted({*_modules(state), *(changed & state.pins.paths.keys())})
        _refuse_bytecode(state, bytecode.find(opened, modules, target.mirrors), changed)
    return state, made


def _own_attributes(tree: Tree, state: State) -> dict[str, Attributes]:
    """Permission bits and owner of each file that a patch may remove, if it would not get them back by itself."""
    result = {}
    for path, chain in state.pins.paths.items():
        status = state.found[path].status
        if status is not None and chain[0].is_file and any(not identity.is_file for identity in chain):
            with tree.parent(path) as (folder, _):
                above = os.fstat(folder)
            own = Attributes(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
            usual = 0o755 if state.found[path].identity.mode == EXECUTABLE else 0o644
            if own != Attributes(usual, above.st_uid, above.st_gid):
                result[path] = own
    return result


def _goal(bundle: Bundle, start: Stand, direction: str, to: str | None) -> Stand:
    base = bundle.bases.get(start.base.id)
    if base is None:
        raise BundleError(
            Reason.NOT_EXPECTED,
            f"release {bundle.release or 'at work'}",
            expected=f"a bundle with the base {start.base.id}",
            found=", ".join(bundle.bases),
        )
    pins = bundle.pins(base)
    level = pins.level_of(to) if to is not None else len(pins.levels) if direction == "apply" else 0
    return Stand(bundle, base, level)


def execute(
    bundle: Bundle,
    target: Target,
    state: State,
    plan: Plan,
    progress: Progress = _silent,
    *,
    disk: Disk | None = None,
) -> Outcome:
    """Carry out a plan. Whoever holds the tree's lock already, as it must to plan for sure, gives ``disk``."""
    with nullcontext(disk) if disk is not None else transaction.locked(target.root) as held:
        return transaction.run(held, plan, plan.goal.bundle.lock.digest, mirrors=target.mirrors, progress=progress)


def check_target(
    bundle: Bundle, target: Target, expect: str | None, full: bool, early: Begun | None = None
) -> tuple[State, Attestation | None]:
    """Whether the target is as pinned, and at the level that is expected.

    ``expect``: ``applied``, the top of this bundle's series; ``base``; a patch's id; of a filed release ``VERSION:ID``;
    None for any.

    Raises:
        BundleError: DRIFT, RECORD, NOT_EXPECTED, NOT_ATTESTED or BYTECODE; UNKNOWN_LEVEL or UNKNOWN_RELEASE, if no
            tree could be there.
    """
    if full:
        from patchbundle import attest
    with Tree(target.root) as tree, attest.begun(tree, target.bases, early) if full else nullcontext() as under_way:
        state = look(bundle, target, tree)
        if full and state.receipt_fault is not None and state.nearest_holds:
            # It is refused below in any case. What else there is to tell comes first.
            _require_attested(target, attest.attest(tree, state.bundle, state, state.nearest, under_way), extra=True)
        level = state.require_level(str(target.root))
        if expect is not None:
            _require_expected(bundle, target, Stand(state.bundle, state.base, level), expect)
        if level and state.receipt == "missing":
            raise BundleError(
                Reason.DRIFT,
                f"{target.root}/{state.base.receipt}",
                expected="the receipt of a patched tree",
                found="nothing",
                next_step=f"run: {command('apply', '--root', target.root)}",
            )
        caches = bytecode.find(tree, _modules(state), target.mirrors)
        _refuse_bytecode(state, caches)
        _refuse_others(state, target)
        attestation = attest.attest(tree, state.bundle, state, level, under_way) if full else None
        if attestation is not None:
            _require_attested(target, attestation)
            _refuse_forged(state, target, caches)
    return state, attestation


def _refuse_others(state: State, target: Target) -> None:
    """Refuse what an interpreter imports in place of a pinned module: a package or an extension of its name beside it.

    Raises:
        BundleError: BYTECODE.
    """
    other = None if state.base.is_crate else imports.instead(target.root, _modules(state))
    if other is not None:
        raise BundleError(
            Reason.BYTECODE,
            f"{target.root}/{other[1]}",
            expected=f"nothing that is imported in place of {other[0]}",
            found="a package or an extension of its name",
            next_step="remove it, then run the command again",
        )


def _refuse_forged(state: State, target: Target, caches: Iterable[Cache]) -> None:
    """Refuse bytecode of a pinned module that has its source's digest or time stamp, and is other code.

    Raises:
        BundleError: BYTECODE.
    """
    for cache in bytecode.forged(caches, target.root, target.python or sys.executable):
        raise BundleError(
            Reason.BYTECODE,
            str(cache.folder / cache.path),
            expected=f"the code of {cache.module}, as {target.python or sys.executable} compiles it",
            found="other code, which that interpreter would run",
            next_step="remove it: the interpreter makes it anew. Then find out who wrote it",
        )


def _require_expected(bundle: Bundle, target: Target, stand: Stand, expect: str) -> None:
    release, _, patch = expect.rpartition(":")
    wished = bundle.released(release) if release else bundle
    if stand.base.id not in wished.bases:
        # Of a base that only another release has, every tree is another one than this.
        wanted = expect
    else:
        pins = wished.pins(stand.base)
        level = len(pins.levels) if patch == "applied" else pins.level_of(patch)
        wanted = Stand(wished, stand.base, level).name
    if stand.name != wanted:
        words = ["revert"] if patch == "base" else ["apply", *(["--release", release] if release else [])]
        words += [] if patch in ("base", "applied") else ["--to", patch]
        raise BundleError(
            Reason.NOT_EXPECTED,
            str(target.root),
            expected=f"{wanted} ({expect})" if wanted != expect else wanted,
            found=f"level {stand.level} ({stand.name})",
            next_step=f"run: {command(*words, '--root', target.root)}",
        )


def _require_attested(target: Target, attestation: Attestation, *, extra: bool = False) -> None:
    from patchbundle import attest

    first = [*(f"{path} (missing)" for path in attestation.missing), *attestation.changed]
    first += [f"{path} (extra)" for path in attestation.extra] if extra else []
    if first:
        expected = f"{attestation.checked} files of {attestation.archive}"
        raise attest.differs(target.root, first, expected, "reinstall the distribution")


class Row(NamedTuple):
    """One line of the roundtrip's table. Digests are of the whole tree; times in seconds."""

    role: str
    base: str
    archive: str
    patches: int
    touched: int
    sources: int
    before: str
    after: str
    reverted: str
    unpacking: float  # of the seconds: fetching apart, the archive laid out
    seconds: float

    @property
    def holds(self) -> bool:
        return self.before == self.reverted and (self.before != self.after) == (self.patches > 0)


def _verified(bundle: Bundle, target: Target, level: int, memory: Memory) -> str:
    """The digest of a tree that stands at ``level`` and is the release but for what the series changes.

    Raises:
        BundleError: NOT_EXPECTED or NOT_ATTESTED.
    """
    from patchbundle import attest, survey

    with Tree(target.root) as tree, survey.begun(tree, memory=memory) as under_way:
        state = look(bundle, target, tree)
        if state.require_level(str(target.root)) != level:
            raise BundleError(
                Reason.NOT_EXPECTED, str(target.root), expected=state.pins.name_of(level), found=state.level_name
            )
        attestation = attest.attest(tree, bundle, state, level, under_way)
        seen = under_way.finish()
    if not attestation.holds or attestation.extra:
        differ = [*attestation.missing, *attestation.changed, *attestation.extra]
        raise BundleError(
            Reason.NOT_ATTESTED, str(target.root), expected=attestation.archive, found=", ".join(differ[:5])
        )
    return attest.tree_digest(seen)


def _clear_away(root: Path) -> None:
    """Remove most of a tree of our own, in two processes where it pays. Whatever is left is for its owner to remove."""
    from patchbundle import second

    # What lies deeper comes first, so that nearly every folder is empty when its turn comes.
    folders = [(Path(folder), names) for folder, _, names in os.walk(root, topdown=False)]

    def remove(number: int) -> None:
        for folder, names in folders[number :: second.PIECES]:
            with suppress(OSError):
                for name in names:
                    (folder / name).unlink()
                folder.rmdir()

    with second.shared(min(len(folders), second.PIECES), remove) as done:
        done()


def roundtrip(
    bundle: Bundle, base: Base, *, each_level: bool = False, offline: bool = False, progress: Progress = _silent
) -> Row:
    """Fetch, unpack, attest, apply, verify, attest, revert, verify byte for byte.

    With ``each_level`` it stops, attests and compares at every level, as an operator may.

    Raises:
        BundleError: whatever fails, and NOT_ATTESTED if the way down is not through the same trees as the way up.
    """
    from tempfile import TemporaryDirectory

    from patchbundle import fetch
    from patchbundle.survey import Memory

    archive = fetch.default_archive(base)
    progress(f"{base.id}: fetching {archive.filename}")
    place = fetch.fetch(base, archive, offline=offline)
    began = time.monotonic()
    pins = bundle.pins(base)
    top = len(pins.levels)
    up = list(range(1, top + 1)) if each_level else [top] if top else []
    digests: dict[int, str] = {}
    with TemporaryDirectory(prefix="roundtrip-") as folder:
        root = Path(folder, "tree")
        root.mkdir()
        progress(f"{base.id}: unpacking")
        fetch.unpack(place, root)
        unpacking = time.monotonic() - began
        record = f"{base.distribution.replace('-', '_')}-{base.version}.dist-info/RECORD"
        target = Target(root, (base,), base.version, None, None if base.is_crate else record, ())
        # Nobody else knows of this tree. An operator's is looked at anew each time.
        memory = Memory(Path(folder, "clock"))
        before = reverted = digests[0] = _verified(bundle, target, 0, memory)
        for direction, levels in (("apply", up), ("revert", [*reversed(up[:-1]), *([0] if up else [])])):
            for level in levels:
                progress(f"{base.id}: {direction} to {pins.name_of(level)}")
                state, plan = make_plan(bundle, target, direction, pins.name_of(level))
                execute(bundle, target, state, plan)
                after = _verified(bundle, target, level, memory)
                reverted = after
                if digests.setdefault(level, after) != after:
                    raise BundleError(
                        Reason.NOT_ATTESTED,
                        str(root),
                        expected=f"the tree of {pins.name_of(level)} as on the way up, {digests[level]}",
                        found=after,
                    )
        _clear_away(root)
    sources = sum(len(patch.sources) for patch in bundle.series(base.role))
    return Row(
        base.role,
        base.id,
        archive.filename,
        top,
        len(pins.paths) - sources,
        sources,
        before,
        digests[top],
        reverted,
        unpacking,
        time.monotonic() - began,
    )
