"""A toy bundle and its toy base: every kind of change that a series may hold, in a few hundred bytes.

The base is a small wheel that calls itself sglang 0.5.19. It lies in a cache of its own, and the lock is made by
the real ``pin``, so that everything above the network runs as it does on the real releases::

    made = toy.make(tmp_path)
    manifest.load(made.bundle)      # the bundle: config/, patches/, sources/, a lock
    made.tree                       # an installed copy of the base, dist-info and RECORD included
    made.environment                # what a child process needs to find the toy's cache

The series, by what each patch does to the tree:

    alpha-first    changes two places of engine.py; installs the shared sources and prefill/alpha.py
    beta-second    changes engine.py again and layers/pool.py, creates layers/wired.py, makes launch.sh
                   executable, installs kernels/beta.cu in a new folder
    gamma-third    removes old.py, creates layers/deep/er/notes.txt in two new folders
"""

from __future__ import annotations

import base64
import difflib
import hashlib
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from patchbundle import fetch, record
from patchbundle import pin as pin_module
from patchbundle.diff import split_lines
from patchbundle.identity import EXECUTABLE, File

BASE_ID = "sglang-0.5.19"
VERSION = "0.5.19"
WHEEL = "sglang-0.5.19-cp311-cp311-manylinux_2_34_x86_64.whl"
INFO = "sglang-0.5.19.dist-info"
RECORD = f"{INFO}/RECORD"
HOME = "sglang/srt/research"
LEVELS = ("alpha-first", "beta-second", "gamma-third")


def numbered(name: str, count: int) -> bytes:
    """A file of ``count`` different lines."""
    return b"".join(f"{name} = {number}\n".encode() for number in range(1, count + 1))


ENGINE = numbered("engine", 40)
ENGINE_ALPHA = ENGINE.replace(b"engine = 5\n", b"engine = 5\nalpha.start()\n").replace(
    b"engine = 30\n", b"alpha.stop()\n"
)
ENGINE_BETA = ENGINE_ALPHA.replace(b"alpha.start()\n", b"alpha.start()\nbeta.start()\n")
POOL = numbered("pool", 12)
POOL_BETA = POOL.replace(b"pool = 12\n", b"pool = 12\npool = beta.pool\n")
WIRED = b"from sglang.srt.research import alpha\n"
LAUNCH = b"#!/bin/sh\nexec python -m sglang\n"
OLD = numbered("old", 3)
NOTES = b"notes without a last newline"

# The files of the base, as the wheel holds them (RECORD is made).
BASE: Mapping[str, File] = {
    "sglang/__init__.py": File(b""),
    "sglang/_version.py": File(b"__version__ = version = '0.5.19'\n"),
    "sglang/srt/__init__.py": File(b""),
    "sglang/srt/engine.py": File(ENGINE),
    "sglang/srt/launch.sh": File(LAUNCH),
    "sglang/srt/layers/pool.py": File(POOL),
    "sglang/srt/old.py": File(OLD),
    "sglang/srt/tool.sh": File(b"#!/bin/sh\nexit 0\n", EXECUTABLE),
    f"{INFO}/METADATA": File(b"Metadata-Version: 2.4\nName: sglang\nVersion: 0.5.19\n\nA toy.\n"),
    f"{INFO}/WHEEL": File(
        b"Wheel-Version: 1.0\nGenerator: toy\nRoot-Is-Purelib: true\nTag: cp311-cp311-linux_x86_64\n"
    ),
}

SOURCES: Mapping[str, bytes] = {
    "shared/__init__.py": b'"""Ours."""\n',
    "shared/gates.py": b"def enabled(name):\n    return False\n",
    "prefill/alpha.py": b"def start(): ...\ndef stop(): ...\n",
    "kernels/beta.cu": b"__global__ void beta() {}\n",
}


@dataclass(frozen=True)
class Toy:
    """Where the parts of a toy lie. All of it may be edited freely."""

    bundle: Path
    tree: Path
    cache: Path

    @property
    def environment(self) -> dict[str, str]:
        """The variables of this process, with the toy's cache."""
        return {**os.environ, "PATCHBUNDLE_CACHE": str(self.cache)}

    def pin(self) -> bool:
        """Make the lock anew after an edit of the bundle, as ``tools/apply.py pin`` does."""
        with cache_at(self.cache):
            return pin_module.pin(self.bundle, offline=True)[1]


@dataclass(frozen=True)
class Entry:
    """One entry of the toy series: what goes into series.toml, and the diff."""

    id: str
    diff: bytes
    sources: Sequence[str] = ()
    requires: Sequence[str] = ()
    role: str = "prefill"

    @property
    def file(self) -> str:
        return f"{self.role}/{self.id}.patch"


def series() -> tuple[Entry, ...]:
    """The three patches."""
    engine, pool = "sglang/srt/engine.py", "sglang/srt/layers/pool.py"
    return (
        Entry(
            "alpha-first",
            diff(engine, File(ENGINE), File(ENGINE_ALPHA)),
            ("shared/__init__.py", "shared/gates.py", "prefill/alpha.py"),
        ),
        Entry(
            "beta-second",
            diff(engine, File(ENGINE_ALPHA), File(ENGINE_BETA))
            + diff("sglang/srt/launch.sh", File(LAUNCH), File(LAUNCH, EXECUTABLE))
            + diff(pool, File(POOL), File(POOL_BETA))
            + diff("sglang/srt/layers/wired.py", None, File(WIRED)),
            ("kernels/beta.cu",),
            ("alpha-first",),
        ),
        Entry(
            "gamma-third",
            diff("sglang/srt/layers/deep/er/notes.txt", None, File(NOTES)) + diff("sglang/srt/old.py", File(OLD), None),
        ),
    )


def after(level: int) -> dict[str, File]:
    """The distribution's files and ours at a level, without RECORD and receipt. Written down here by hand."""
    files = dict(BASE)
    if level >= 1:
        files["sglang/srt/engine.py"] = File(ENGINE_ALPHA)
        for name in ("shared/__init__.py", "shared/gates.py", "prefill/alpha.py"):
            files[f"{HOME}/{name.partition('/')[2]}"] = File(SOURCES[name])
    if level >= 2:
        files["sglang/srt/engine.py"] = File(ENGINE_BETA)
        files["sglang/srt/launch.sh"] = File(LAUNCH, EXECUTABLE)
        files["sglang/srt/layers/pool.py"] = File(POOL_BETA)
        files["sglang/srt/layers/wired.py"] = File(WIRED)
        files[f"{HOME}/kernels/beta.cu"] = File(SOURCES["kernels/beta.cu"])
    if level >= 3:
        files["sglang/srt/layers/deep/er/notes.txt"] = File(NOTES)
        del files["sglang/srt/old.py"]
    return files


def make(
    folder: Path,
    *,
    entries: Iterable[Entry] | None = None,
    sources: Mapping[str, bytes] | None = None,
    base: Mapping[str, File] = BASE,
    pinned: bool = True,
    with_record: bool = True,
) -> Toy:
    """Lay a toy out under ``folder``: ``bundle/``, ``tree/``, ``cache/``.

    Without ``with_record`` the tree has no dist-info, like an unpacked one; without ``pinned`` the bundle has no
    lock. Its own ``entries`` need their own ``sources``.
    """
    made = Toy(folder / "bundle", folder / "tree", folder / "cache")
    wheel = _put_wheel(made.cache, base)
    write_bundle(made.bundle, wheel, series() if entries is None else entries, SOURCES if sources is None else sources)
    if pinned:
        made.pin()
    install(wheel, made.tree, with_record=with_record)
    return made


def write_bundle(root: Path, wheel: Path, entries: Iterable[Entry], sources: Mapping[str, bytes]) -> None:
    """The bundle as people write it: no lock yet."""
    _write(root / "config" / "bases.toml", bases_toml(wheel).encode())
    table = "schema = 1\n"
    for entry in entries:
        table += f'\n[[patch]]\nid = "{entry.id}"\nrole = "{entry.role}"\nfile = "{entry.file}"\n'
        table += f"sources = {_toml_list(entry.sources)}\nrequires = {_toml_list(entry.requires)}\n"
        _write(root / "patches" / entry.file, header() + entry.diff)
    _write(root / "patches" / "series.toml", table.encode())
    for name, data in sources.items():
        _write(root / "sources" / name, data)


def bases_toml(wheel: Path) -> str:
    """config/bases.toml for the toy's wheel."""
    with zipfile.ZipFile(wheel) as archive:
        listing = archive.read(RECORD)
    return f"""schema = 1

[bases."{BASE_ID}"]
role = "prefill"
distribution = "sglang"
version = "{VERSION}"
torch = "2.13.0"
marker = "sglang/srt"

[bases."{BASE_ID}".install]
shared = "{HOME}"
prefill = "{HOME}"
kernels = "{HOME}/kernels"

[bases."{BASE_ID}".archives."{wheel.name}"]
sha256 = "{hashlib.sha256(wheel.read_bytes()).hexdigest()}"
record = "{hashlib.sha256(listing).hexdigest()}"
entries = "{record.entries_digest(record.entries(listing))}"
"""


def header(**changed: str) -> bytes:
    """A complete patch header; keyword ``Drop_When="x"`` replaces the text of ``Drop-When``."""
    values = {
        "Description": "a toy",
        "Why": "the stock toy cannot",
        "Class": "environment-only",
        "Upstream": "none found, 2026-11-29",
        "Gate": "none; a toy",
        "Risk": "none",
        "Drop-When": "never",
    }
    values |= {key.replace("_", "-"): text for key, text in changed.items()}
    return "".join(f"{key}: {text}\n" for key, text in values.items()).encode() + b"\n"


def install(wheel: Path, tree: Path, *, with_record: bool = True) -> None:
    """What an installer makes of the wheel: its files, a few of its own, and their lines in RECORD."""
    fetch.unpack(wheel, tree)
    if not with_record:
        for path in sorted((tree / INFO).iterdir()):
            path.unlink()
        (tree / INFO).rmdir()
        return
    _write(tree / INFO / "INSTALLER", b"pip\n")
    _write(tree / INFO / "REQUESTED", b"")
    lines = (tree / RECORD).read_bytes().split(b"\n")
    lines[:0] = [b"../../../bin/sglang,sha256=" + _digest(b"script").encode() + b",6"]
    lines[-1:-1] = [
        f"{INFO}/INSTALLER,sha256={_digest(b'pip' + bytes([10]))},4".encode(),
        f"{INFO}/REQUESTED,sha256={_digest(b'')},0".encode(),
        b"sglang/__pycache__/__init__.cpython-311.pyc,,",
    ]
    (tree / RECORD).write_bytes(b"\n".join(lines))


def diff(path: str, old: File | None, new: File | None) -> bytes:
    """One entry of a diff, as git writes it, but for the index line."""
    out = [f"diff --git a/{path} b/{path}"]
    if old is None:
        assert new is not None
        out.append(f"new file mode {new.mode}")
    elif new is None:
        out.append(f"deleted file mode {old.mode}")
    elif old.mode != new.mode:
        out += [f"old mode {old.mode}", f"new mode {new.mode}"]
    hunks = list(_hunks(old.data if old else b"", new.data if new else b""))
    if hunks:
        out += [
            "--- /dev/null" if old is None else f"--- a/{path}",
            "+++ /dev/null" if new is None else f"+++ b/{path}",
        ]
    return "".join(line + "\n" for line in out).encode() + b"".join(hunks)


def _hunks(old: bytes, new: bytes, context: int = 3) -> Iterator[bytes]:
    before, after_ = ([line.decode("latin-1") for line in split_lines(data)] for data in (old, new))
    for line in list(difflib.unified_diff(before, after_, n=context))[2:]:
        raw = line.encode("latin-1")
        yield raw if raw.endswith(b"\n") else raw + b"\n\\ No newline at end of file\n"


@contextmanager
def cache_at(folder: Path) -> Iterator[None]:
    """Let this process use another cache of archives for a while."""
    before = os.environ.get("PATCHBUNDLE_CACHE")
    os.environ["PATCHBUNDLE_CACHE"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PATCHBUNDLE_CACHE"]
        else:
            os.environ["PATCHBUNDLE_CACHE"] = before


def _put_wheel(cache: Path, base: Mapping[str, File]) -> Path:
    """Write the wheel, the same bytes every time, into the cache under its hash."""
    lines = [f"{path},sha256={_digest(file.data)},{len(file.data)}\n" for path, file in sorted(base.items())]
    files = {**base, RECORD: File("".join([*lines, f"{RECORD},,\n"]).encode())}
    made = cache / WHEEL
    made.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(made, "w") as archive:
        for path, file in sorted(files.items()):
            info = zipfile.ZipInfo(path, (2026, 11, 29, 0, 0, 0))
            info.external_attr = (0o100755 if file.mode == EXECUTABLE else 0o100644) << 16
            archive.writestr(info, file.data)
    place = cache / "archives" / hashlib.sha256(made.read_bytes()).hexdigest() / WHEEL
    place.parent.mkdir(parents=True, exist_ok=True)
    return made.replace(place)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def _toml_list(names: Iterable[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
