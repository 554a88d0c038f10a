"""The planner: every way between two levels, and the interim trees that it does not accept."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from patchbundle import manifest, record
from patchbundle import plan as plan_module
from patchbundle.bases import Base
from patchbundle.errors import BundleError
from patchbundle.identity import ABSENT, EXECUTABLE, PLAIN, Attributes, File, Identity
from patchbundle.lock import Lock, Pins
from patchbundle.manifest import Bundle
from patchbundle.plan import Plan, Stand
from tests import toy

RECEIPT = f"{toy.HOME}/receipt.json"
ENGINE, OLD = "sglang/srt/engine.py", "sglang/srt/old.py"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return manifest.load(toy.make(tmp_path_factory.mktemp("plan")).bundle)


@pytest.fixture(scope="module")
def base(bundle: Bundle) -> Base:
    return bundle.bases[toy.BASE_ID]


def tree(bundle: Bundle, base: Base, level: int) -> dict[str, File | None]:
    files = toy.after(level)
    return {path: files.get(path) for path in bundle.pins(base).paths}


LISTING = b"".join(record.line(path, file.identity) + b"\n" for path, file in sorted(toy.BASE.items()))


def way(
    bundle: Bundle,
    base: Base,
    start: int,
    end: int,
    files: dict[str, File | None] | None = None,
    *,
    record_path: str | None = None,
    record_data: bytes | None = None,
    receipt_data: bytes | None = None,
) -> Plan:
    return plan_module.plan(
        Stand(bundle, base, start),
        Stand(bundle, base, end),
        tree(bundle, base, start) if files is None else files,
        record_path=record_path,
        record_data=record_data,
        receipt_data=receipt_data,
    )


def planned(bundle: Bundle, base: Base, start: int, end: int) -> Plan:
    return way(bundle, base, start, end, receipt_data=plan_module.receipt_bytes(bundle, base, start))


WAYS = [(start, end) for start in range(4) for end in range(4)]


@pytest.mark.parametrize(("start", "end"), WAYS)
def test_every_way_between_two_levels_gives_the_files_written_down_by_hand(
    bundle: Bundle, base: Base, start: int, end: int
) -> None:
    made = toy.after(start)
    receipt = plan_module.receipt_bytes(bundle, base, start)
    if receipt is not None:
        made[RECEIPT] = File(receipt)
    for operation in planned(bundle, base, start, end).operations:
        before = made.pop(operation.path, None)
        assert operation.old == (before.identity if before else ABSENT)
        if operation.data is not None:
            made[operation.path] = File(operation.data, operation.new.mode)
            assert made[operation.path].identity == operation.new
    after = plan_module.receipt_bytes(bundle, base, end)
    assert made.pop(RECEIPT, None) == (None if after is None else File(after))
    assert made == toy.after(end)


@pytest.mark.parametrize(("start", "end"), WAYS)
def test_modules_come_before_their_call_sites_and_go_after_them(
    bundle: Bundle, base: Base, start: int, end: int
) -> None:
    operations = planned(bundle, base, start, end).operations
    verbs = [operation.verb for operation in operations]
    assert verbs == sorted(verbs, key=["create", "change", "remove"].index)
    assert (verbs == []) == (start == end)
    words = {(False, True): "create", (True, True): "change", (True, False): "remove"}
    assert verbs == [words[operation.old.is_file, operation.new.is_file] for operation in operations]


def test_folders_of_ours_come_and_go_with_the_level_that_needs_them(bundle: Bundle, base: Base) -> None:
    up = planned(bundle, base, 0, 3)
    assert up.new_folders == (
        "sglang/srt/layers/deep",
        "sglang/srt/layers/deep/er",
        toy.HOME,
        f"{toy.HOME}/kernels",
    )
    assert planned(bundle, base, 3, 0).gone_folders == up.new_folders[::-1]
    assert planned(bundle, base, 1, 2).new_folders == (f"{toy.HOME}/kernels",)
    assert planned(bundle, base, 1, 2).gone_folders == ()


def test_the_receipt_names_bundle_base_and_patches(bundle: Bundle, base: Base) -> None:
    table = json.loads(plan_module.receipt_bytes(bundle, base, 2) or b"")
    assert table == {
        "schema": 1,
        "bundle": bundle.lock.digest,
        "base": base.id,
        "role": "prefill",
        "level": 2,
        "patches": ["alpha-first", "beta-second"],
    }
    assert plan_module.receipt_bytes(bundle, base, 0) is None


@pytest.mark.parametrize("foreign", [b"{}", b"\xff"], ids=["of another bundle", "of nobody"])
def test_a_receipt_is_replaced_whatever_it_says(bundle: Bundle, base: Base, foreign: bytes) -> None:
    made = way(bundle, base, 1, 2, receipt_data=foreign)
    (operation,) = [operation for operation in made.operations if operation.path == RECEIPT]
    assert operation.old == Identity.of(foreign)


# RECORD goes with the plan.


def edited(bundle: Bundle, base: Base, raw: bytes, start: int, end: int) -> bytes:
    made = way(
        bundle,
        base,
        start,
        end,
        record_path=toy.RECORD,
        record_data=raw,
        receipt_data=plan_module.receipt_bytes(bundle, base, start),
    )
    return next((operation.data for operation in made.operations if operation.path == toy.RECORD), raw) or b""


@pytest.mark.parametrize("way", [(0, 3, 0), (0, 1, 2, 3, 2, 1, 0), (0, 2, 3, 1, 0), (0, 3, 1, 3, 0)], ids=str)
def test_record_comes_back_byte_for_byte_by_any_way(bundle: Bundle, base: Base, way: tuple[int, ...]) -> None:
    raw, seen = LISTING, {0: LISTING}
    for start, end in itertools.pairwise(way):
        raw = edited(bundle, base, raw, start, end)
        # A level has one RECORD, however it was reached.
        assert seen.setdefault(end, raw) == raw
    assert raw == LISTING


def test_record_states_every_file_of_the_top(bundle: Bundle, base: Base) -> None:
    raw = edited(bundle, base, LISTING, 0, 3)
    stated = record.entries(raw)
    for path, file in toy.after(3).items():
        assert stated[path] == (file.identity.sha256, len(file.data))
    assert OLD not in stated
    assert raw.count(record.place_holder(OLD) + b"\n") == 1
    assert RECEIPT in stated


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (record.line(ENGINE, Identity.of(toy.ENGINE)), record.line(ENGINE, Identity.of(b"other"))),
        (record.line(OLD, Identity.of(toy.OLD)) + b"\n", b""),
        (b"sglang/srt/old.py,", b"sglang/srt/old.py,,"),
    ],
    ids=["of another digest", "that is missing", "that is odd"],
)
def test_a_record_line_is_drift(bundle: Bundle, base: Base, old: bytes, new: bytes) -> None:
    with pytest.raises(BundleError) as refusal:
        edited(bundle, base, LISTING.replace(old, new), 0, 3)
    assert refusal.value.code == "record"


def test_a_record_without_the_place_holder_is_drift(bundle: Bundle, base: Base) -> None:
    raw = edited(bundle, base, LISTING, 0, 3).replace(record.place_holder(OLD) + b"\n", b"")
    with pytest.raises(BundleError, match="RECORD"):
        edited(bundle, base, raw, 3, 0)


# What is not as pinned.

DRIFT = {
    "another byte": (0, ENGINE, File(toy.ENGINE[:-2] + b"1\n")),
    "another mode": (0, ENGINE, File(toy.ENGINE, EXECUTABLE)),
    "a missing file": (0, OLD, None),
    "a file too many": (0, f"{toy.HOME}/alpha.py", File(b"")),
    "the file of another level": (0, ENGINE, File(toy.ENGINE_ALPHA)),
    "an edited source": (3, f"{toy.HOME}/alpha.py", File(b"def start(): ...\n")),
    "an edited call site": (3, ENGINE, File(toy.ENGINE_BETA + b"\n")),
    "a file that came back": (3, OLD, File(toy.OLD)),
}


@pytest.mark.parametrize(("level", "path", "file"), DRIFT.values(), ids=DRIFT)
def test_a_tree_is_not_planned_on_with(bundle: Bundle, base: Base, level: int, path: str, file: File | None) -> None:
    assert path in tree(bundle, base, level)
    with pytest.raises(BundleError) as refusal:
        way(bundle, base, level, 3 - level, {**tree(bundle, base, level), path: file})
    assert refusal.value.code == "drift"
    assert path in refusal.value.where


def pinned_as(bundle: Bundle, base: Base, path: str, level: int, identity: Identity) -> Bundle:
    """The same bundle with a lock that says this of a path at a level."""
    pins = bundle.pins(base)
    chain = list(pins.paths[path])
    chain[level] = identity
    wrong = Pins(pins.role, pins.levels, {**pins.paths, path: tuple(chain)}, pins.folders)
    return replace(bundle, lock=Lock({}, {base.id: wrong}))


@pytest.mark.parametrize(("start", "end"), [(0, 3), (3, 0)])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_an_interim_tree_that_is_not_as_pinned_stops_the_plan(
    bundle: Bundle, base: Base, level: int, start: int, end: int
) -> None:
    other = pinned_as(bundle, base, ENGINE, level, Identity.of(b"something else"))
    with pytest.raises(BundleError) as refusal:
        way(other, base, start, end, tree(bundle, base, start))
    assert refusal.value.code == "drift"
    assert f"at level {level}" in refusal.value.where


@pytest.mark.parametrize(("start", "end", "level"), [(0, 3, 1), (0, 3, 2), (3, 1, 1), (3, 0, 0)])
def test_a_lock_that_does_not_tell_a_change_stops_the_plan(
    bundle: Bundle, base: Base, start: int, end: int, level: int
) -> None:
    """The step of a patch is checked by what the patch touches, not only by what the lock says that it changes."""
    path = ENGINE if level < 2 else "sglang/srt/layers/pool.py"
    beside = level - 1 if start < end else level + 1
    other = pinned_as(bundle, base, path, level, bundle.pins(base).paths[path][beside])
    with pytest.raises(BundleError) as refusal:
        way(other, base, start, end, tree(bundle, base, start))
    assert refusal.value.code == "drift"
    assert f"{path} at level {level} " in refusal.value.where


def test_a_way_between_two_levels_does_not_lead_below_both(bundle: Bundle, base: Base) -> None:
    other = pinned_as(bundle, base, ENGINE, 0, Identity.of(b"something else"))
    assert way(other, base, 2, 1).operations
    assert way(other, base, 1, 2).operations


def test_between_two_bundles_the_base_is_as_both_pin_it(bundle: Bundle, base: Base) -> None:
    """Also where the way ends there, and no patch would look at it."""
    other = pinned_as(bundle, base, OLD, 0, Identity.of(b"something else"))
    with pytest.raises(BundleError) as refusal:
        plan_module.plan(Stand(bundle, base, 1), Stand(other, base, 0), tree(bundle, base, 1))
    assert refusal.value.code == "drift"
    assert f"{OLD} at level 0" in refusal.value.where


def test_between_two_bundles_the_receipt_goes_where_the_new_one_keeps_it(bundle: Bundle, base: Base) -> None:
    elsewhere = base._replace(install={**base.install, "router": "sglang/o"})
    other = replace(bundle)
    before, after = (plan_module.receipt_bytes(bundle, item, 1) for item in (base, elsewhere))
    assert before is not None
    assert after is not None
    start, goal = Stand(bundle, base, 1), Stand(other, elsewhere, 1)
    made = plan_module.plan(start, goal, tree(bundle, base, 1), receipt_data=before)
    assert made.operations == (
        plan_module.Operation("sglang/o/receipt.json", ABSENT, Identity.of(after), after),
        plan_module.Operation(RECEIPT, Identity.of(before), ABSENT, None),
    )


def test_a_tree_without_a_record_is_planned_without_it(bundle: Bundle, base: Base) -> None:
    made = way(bundle, base, 0, 1, record_path=toy.RECORD, record_data=None)
    assert toy.RECORD not in {operation.path for operation in made.operations}
    assert made.operations == way(bundle, base, 0, 1).operations


def test_a_source_that_is_not_the_one_in_the_tree_is_not_taken_off(bundle: Bundle, base: Base) -> None:
    other = replace(bundle, artifacts={**bundle.artifacts, "sources/prefill/alpha.py": b"another\n"})
    with pytest.raises(BundleError) as refusal:
        way(other, base, 1, 0)
    assert refusal.value.code == "context-differs"
    assert f"{toy.HOME}/alpha.py" in refusal.value.where


def test_a_base_that_the_lock_does_not_know_is_not_planned_on(bundle: Bundle, base: Base) -> None:
    with pytest.raises(BundleError, match="pins for other-1"):
        way(bundle, base._replace(id="other-1"), 0, 1, {})


def test_what_a_plain_diff_removed_comes_back_with_the_mode_that_it_had_before_that(tmp_path: Path) -> None:
    """Such a diff has no word for the mode; the lock has, and it is another one a level below."""
    launch = "sglang/srt/launch.sh"
    plain = toy.diff(launch, File(toy.LAUNCH), None)
    plain = plain[plain.index(b"--- ") :]
    entries = [toy.Entry("x", toy.diff(launch, File(toy.LAUNCH), File(toy.LAUNCH, EXECUTABLE))), toy.Entry("y", plain)]
    made = manifest.load(toy.make(tmp_path, entries=entries, sources={}).bundle)
    base = made.bases[toy.BASE_ID]
    for level, mode in ((1, EXECUTABLE), (0, PLAIN)):
        (operation, *_) = way(made, base, 2, level, {launch: None}).operations
        assert (operation.path, operation.new) == (launch, Identity.of(toy.LAUNCH, mode))


def test_only_of_files_that_are_removed_right_there_anything_is_kept(bundle: Bundle, base: Base) -> None:
    """OLD goes with the last patch; a receipt of a level below keeps nothing of it, whatever it says."""
    pins = bundle.pins(base)
    own = Attributes(0o640, 1, 2)
    says = plan_module.receipt_bytes(bundle, base, 3, {OLD: own, ENGINE: own, "sglang/none": own})
    assert plan_module.kept(pins, 3, says) == {OLD: own}
    assert plan_module.kept(pins, 2, says) == {}
    made = f"{toy.HOME}/alpha.py"
    assert plan_module.kept(pins, 0, plan_module.receipt_bytes(bundle, base, 3, {made: own})) == {}
    # A file of the release that is back at a later level is kept by the one between.
    chains = {OLD: (pins.paths[OLD][0], ABSENT, pins.paths[OLD][0])}
    back = Pins("prefill", ("x", "y"), chains, {})
    assert [plan_module.kept(back, level, says) for level in range(3)] == [{}, {OLD: own}, {}]
    made_later = Pins("prefill", ("x", "y"), {OLD: (ABSENT, pins.paths[OLD][0], ABSENT)}, {})
    assert [plan_module.kept(made_later, level, says) for level in range(3)] == [{}, {}, {}]


# What a series may not do, found when it is pinned.

ONE = File(b"one\n")
SERIES: dict[str, tuple[list[toy.Entry], dict[str, bytes], str]] = {
    "create what it made": (
        [toy.Entry("x", toy.diff("sglang/n", None, ONE)), toy.Entry("y", toy.diff("sglang/n", None, ONE))],
        {},
        "file-exists",
    ),
    "install over a file of the base": (
        [toy.Entry("x", toy.diff(ENGINE, File(toy.ENGINE), File(toy.ENGINE_ALPHA)), ["prefill/a"])],
        {"prefill/a": b""},
        "",
    ),
    "install over what a diff made": (
        [toy.Entry("x", toy.diff(f"{toy.HOME}/a", None, ONE), ["prefill/a"])],
        {"prefill/a": b"one\n"},
        "file-exists",
    ),
    "write below a file that it made": (
        [toy.Entry("x", toy.diff("sglang/n", None, ONE)), toy.Entry("y", toy.diff("sglang/n/m", None, ONE))],
        {},
        "parent",
    ),
    "write below a file that it installed": (
        [toy.Entry("x", toy.diff(f"{toy.HOME}/a/b", None, ONE), ["prefill/a"])],
        {"prefill/a": b""},
        "parent",
    ),
    "write below a file that it removed": (
        [toy.Entry("x", toy.diff(OLD, File(toy.OLD), None)), toy.Entry("y", toy.diff(f"{OLD}/m", None, ONE))],
        {},
        "parent",
    ),
    "write below the receipt": ([toy.Entry("x", toy.diff(f"{RECEIPT}/m", None, ONE))], {}, "parent"),
    "make its own folder a file": ([toy.Entry("x", toy.diff(toy.HOME, None, ONE))], {}, "parent"),
    "differ from itself in case": (
        [toy.Entry("x", toy.diff("sglang/N", None, ONE)), toy.Entry("y", toy.diff("sglang/n", None, ONE))],
        {},
        "collision",
    ),
    "differ from its sources in case": (
        [toy.Entry("x", toy.diff("sglang/srt/Research/b", None, ONE), ["prefill/a"])],
        {"prefill/a": b""},
        "collision",
    ),
    "change a missing file": ([toy.Entry("x", toy.diff("sglang/n", ONE, File(b"two\n")))], {}, "file-missing"),
    "stand in the wrong order": (list(toy.series()[1::-1]), dict(toy.SOURCES), "manifest"),
}  # fmt: skip


@pytest.mark.parametrize(("entries", "sources", "code"), SERIES.values(), ids=SERIES)
def test_a_series_may_not(tmp_path: Path, entries: list[toy.Entry], sources: dict[str, bytes], code: str) -> None:
    if not code:  # what it installs is checked against the bytes that stand there
        base = {**toy.BASE, f"{toy.HOME}/a": ONE}
        code, made = "file-exists", toy.make(tmp_path, entries=entries, sources=sources, base=base, pinned=False)
    else:
        made = toy.make(tmp_path, entries=entries, sources=sources, pinned=False)
    with pytest.raises(BundleError) as refusal:
        made.pin()
    assert refusal.value.code == code
    assert not (made.bundle / "patches/pins.lock").exists()
