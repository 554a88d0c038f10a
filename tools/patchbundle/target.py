"""Find the one tree to work on. Nothing of the target is imported."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from patchbundle import transaction
from patchbundle.errors import BundleError, Reason
from patchbundle.tree import Tree

if TYPE_CHECKING:
    from patchbundle.bases import Base
    from patchbundle.manifest import Bundle

# Run by the interpreter that is asked: where would `import NAME` look? The working folder is the root, so
# that a checkout that happens to be the current folder does not shadow the installed distribution.
_ASK = """
import importlib.metadata, importlib.util, json, sys
name, distributions = sys.argv[1], sys.argv[2:]
def seen(distribution):
    try:
        found = importlib.metadata.distribution(distribution)
        return [found.version, str(found.locate_file(""))]
    except importlib.metadata.PackageNotFoundError:
        return None
spec = importlib.util.find_spec(name)
print(json.dumps({
    "locations": [str(item) for item in spec.submodule_search_locations or []] if spec else [],
    "path": [str(item) for item in sys.path],
    "prefix": sys.pycache_prefix,
    "seen": {item: seen(item) for item in distributions},
}))
"""
_PATIENCE = 30.0  # seconds that an interpreter may take to answer
_ANSWER = 1 << 20  # bytes that an answer may have, start-up files' own words included
_METADATA = 1 << 20  # bytes of a file in which a version may be found


class Target(NamedTuple):
    """A tree and what is known about it before any file is hashed."""

    root: Path
    bases: tuple[Base, ...]  # the bases it may stand on, by version
    version: str | None
    torch: str | None
    record: str | None  # path of the installed RECORD inside the tree, or of what stands in its place
    mirrors: tuple[Path, ...]  # folders that hold bytecode of the tree's modules, with PYTHONPYCACHEPREFIX
    python: str | None = None  # the interpreter that was asked where it would import the tree from

    def describe(self) -> list[str]:
        return [
            f"target:  {self.root}",
            f"version: {self.version or 'not seen; the hashes decide'}",
            f"torch:   {self.torch or 'not seen'}",
            *(f"warning: {warning}" for warning in self.warnings),
        ]

    @property
    def warnings(self) -> list[str]:
        """What is to be known of the target before anything is done to it."""
        if self.record is None and not self.bases[0].is_crate:
            return ["RECORD: not seen, so it is not kept up; if it comes back, the tree is drifted"]
        return []


def discover(
    bundle: Bundle,
    *,
    root: Path | None = None,
    python: str | None = None,
    role: str | None = None,
    require_torch: bool = False,
) -> Target:
    """Find the target below ``root``, or where ``python`` (default: this interpreter) would import it from.

    Raises:
        BundleError: NO_TARGET, TWO_TARGETS, WRONG_VERSION or WRONG_TORCH.
    """
    bases = [base for base in bundle.bases.values() if role in (None, base.role)]
    prefixes = [os.environ["PYTHONPYCACHEPREFIX"]] if os.environ.get("PYTHONPYCACHEPREFIX") else []
    seen: Mapping[str, tuple[str, Path]] = {}
    if root is not None:
        found = _below(root, bases)
    else:
        answer = _ask(python or sys.executable)
        found = [
            place
            for place in answer.places
            if any((place / base.marker).exists() for base in bases if not base.is_crate)
        ]
        seen = answer.seen
        prefixes += [answer.prefix] if answer.prefix else []
    where = str(root) if root is not None else f"what {python or sys.executable} imports"
    place = _only(found, where)
    candidates = [base for base in bases if (place / base.marker).exists()]
    metadata = _metadata(place, candidates[0])
    version = _version(place, candidates[0], metadata) or (seen["sglang"][0] if "sglang" in seen else None)
    # The one that the interpreter imports may lie in another folder; else one beside the tree.
    torch_version, torch_folder = seen.get("torch", (None, place))
    beside = _torches(torch_folder)
    torch = torch_version or (beside[0] if beside else None)
    fitting = tuple(base for base in candidates if version in (None, base.version))
    if not fitting:
        raise BundleError(
            Reason.WRONG_VERSION,
            str(place),
            expected=" or ".join(f"{base.distribution} {base.version} ({base.role})" for base in candidates),
            found=f"{candidates[0].distribution} {version}",
            next_step="point --root or --python at the fixed image's own engine",
        )
    if len(beside) > 1:
        _refuse_torches(torch_folder, fitting, beside)
    _check_torch(place, fitting, torch, require_torch)
    record = f"{metadata.name}/RECORD" if metadata is not None and _has_record(metadata) else None
    asked = python and (str(Path(python).absolute()) if "/" in python else python)
    return Target(place, fitting, version, torch, record, _mirrors(place, found, prefixes), asked)


def interrupted_root(root: Path) -> Path:
    """The one place at or just below ``root`` with an interrupted run; ``root`` itself if there is none.

    Raises:
        BundleError: TWO_TARGETS.
    """
    found = []
    for place in {place.resolve() for place in _places(root)}:
        with Tree(place) as tree:
            if transaction.interrupted(tree):
                found.append(place)
    return _only(found or [root], str(root))


def _mirrors(place: Path, found: Iterable[Path], prefixes: Iterable[str]) -> tuple[Path, ...]:
    """A prefix repeats the source's folder below itself, as the interpreter names it: it may have come by a link."""
    names = {place, *(path.absolute() for path in found)}
    return tuple(
        sorted({Path(prefix).absolute() / name.relative_to(name.anchor) for prefix in prefixes for name in names})
    )


def _only(found: Iterable[Path], where: str) -> Path:
    places = sorted({place.resolve() for place in found})
    if not places:
        raise BundleError(
            Reason.NO_TARGET,
            where,
            expected="a folder that holds sglang/, or the router's crate",
            found="neither",
            next_step="give --root DIR or --python EXE",
        )
    if len(places) > 1:
        raise BundleError(
            Reason.TWO_TARGETS,
            where,
            expected="one",
            found=", ".join(str(place) for place in places),
            next_step="name one of them with --root",
        )
    return places[0]


def _below(root: Path, bases: Iterable[Base]) -> list[Path]:
    """The places at or just below ``root`` where trees stand: itself, a checkout's python/, a virtual environment's
    site-packages, an unpacked source archive."""
    if not root.is_dir():
        raise BundleError(
            Reason.NO_TARGET, str(root), expected="a folder", found="none", next_step="give --root DIR or --python EXE"
        )
    return [place for place in _places(root) if any((place / base.marker).exists() for base in bases)]


def _places(root: Path) -> list[Path]:
    # Debian's interpreters call it dist-packages.
    packages = [f"lib/python3*/{name}" for name in ("site-packages", "dist-packages")]
    below = ("python", *packages, "sglang_router-*")
    found = [root, *(path for item in below for path in sorted(root.glob(item)))]
    # An image's root. Its links mean itself: one that leads out of it leads into this machine.
    image = (f"usr/{local}{item}" for local in ("", "local/") for item in packages)
    found += [path for item in image for path in sorted(root.glob(item)) if root.resolve() in path.resolve().parents]
    return [place for place in found if place.is_dir()]


class _Answer(NamedTuple):
    """What an interpreter says: where it looks, which distributions it sees and where, and its bytecode prefix."""

    places: tuple[Path, ...]
    seen: Mapping[str, tuple[str, Path]]
    prefix: str | None

    @classmethod
    def read(cls, raw: bytes) -> _Answer:
        """Take the last line of ``raw``: an interpreter's start-up files may print too.

        Raises:
            ValueError: it is not the answer that was asked for.
        """
        table = json.loads((raw.decode("utf-8").strip().splitlines() or [""])[-1])
        if not isinstance(table, dict) or set(table) != {"locations", "path", "prefix", "seen"}:
            raise ValueError("another answer than the one that was asked for")
        locations, path, prefix, seen = (table[key] for key in ("locations", "path", "prefix", "seen"))
        pairs = {name: pair for name, pair in seen.items() if pair is not None} if isinstance(seen, dict) else None
        lists = [locations, path, *(pairs.values() if pairs is not None else [None])]
        texts = [text for item in lists if isinstance(item, list) for text in item]
        if (
            not all(isinstance(item, list) for item in lists)
            or not all(isinstance(text, str) and "\0" not in text for text in [*texts, prefix or ""])
            or any(len(pair) != 2 for pair in lists[2:])
        ):
            raise ValueError("another answer than the one that was asked for")
        places = [Path(location).parent for location in locations] + [Path(entry) for entry in path if entry]
        return cls(tuple(places), {name: (pair[0], Path(pair[1])) for name, pair in (pairs or {}).items()}, prefix)


def _ask(python: str) -> _Answer:
    # The child's working folder is another one.
    command = [str(Path(python).absolute()) if "/" in python else python, "-c", _ASK, "sglang", "sglang", "torch"]
    try:
        return _Answer.read(said(command))
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(
            Reason.NO_TARGET,
            python,
            expected="a Python interpreter",
            found=(error.strerror if isinstance(error, OSError) else None) or str(error),
            next_step="give --root DIR or --python EXE",
        ) from None


def said(command: list[str]) -> bytes:
    """What a command prints, within reason of time and size.

    Raises:
        OSError: it could not be started.
        ValueError: it failed, with the last line that it said; it took too long; or it said too much.
    """
    # Only --python needs them.
    import selectors
    import signal
    import subprocess

    heard: dict[str, bytearray] = {"out": bytearray(), "err": bytearray()}
    until = time.monotonic() + _PATIENCE
    # PYTHONPATH stays: an overlay folder there is exactly the second copy that must be seen.
    with (
        subprocess.Popen(
            command, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, env={"PYTHONUTF8": "1", **os.environ},
        ) as process,
        selectors.DefaultSelector() as selector,
    ):  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        selector.register(process.stdout, selectors.EVENT_READ, "out")
        selector.register(process.stderr, selectors.EVENT_READ, "err")
        try:
            # A child of its may hold the pipes open longer than it lives itself.
            while selector.get_map() and (process.poll() is None or selector.select(0)):
                for key, _ in selector.select(min(0.1, max(until - time.monotonic(), 0))):
                    part = os.read(key.fd, 1 << 16)
                    heard[key.data] += part
                    if not part:
                        selector.unregister(key.fileobj)
                if max(map(len, heard.values())) > _ANSWER:
                    raise ValueError(f"an answer of more than {_ANSWER} bytes")
                if time.monotonic() > until:
                    raise ValueError(f"no answer within {_PATIENCE:.0f} seconds")
            process.wait(max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            raise ValueError(f"no end within {_PATIENCE:.0f} seconds") from None
        finally:
            # Whatever it started is of its session.
            if process.poll() is None or selector.get_map():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        words = heard["err"].decode("utf-8", "replace").strip().splitlines()
        raise ValueError(words[-1] if words else f"exit code {process.returncode}")
    return bytes(heard["out"])


def _metadata(place: Path, base: Base) -> Path | None:
    """The distribution's own metadata folder beside the package, if there is one.

    What is left of it counts: one without METADATA, or something else in its place, must not hide a RECORD.
    """
    if base.is_crate:
        return None
    name = re.sub(r"[-_.]+", "_", base.distribution)
    found = sorted(
        path for path in place.glob(f"{name}-*.dist-info") if _has_record(path) or (path / "METADATA").is_file()
    )
    if len(found) > 1:
        raise BundleError(
            Reason.TWO_TARGETS,
            str(place),
            expected=f"one version of {base.distribution}",
            found=", ".join(path.name for path in found),
            next_step="remove the leftovers of the other installation",
        )
    return found[0] if found else None


def _has_record(metadata: Path) -> bool:
    """Whether there is a RECORD, or something in the place of it or of its folder; the look at it tells which."""
    return metadata.is_symlink() or not metadata.is_dir() or os.path.lexists(metadata / "RECORD")


def _version(place: Path, base: Base, metadata: Path | None) -> str | None:
    if metadata is not None:
        named = metadata.name.partition("-")[2].removesuffix(".dist-info")
        return _first(metadata / "METADATA", r"Version: (\S+)") or named
    if base.is_crate:
        return _first(place / "PKG-INFO", r"Version: (\S+)") or _first(place / "Cargo.toml", r'version = "([^"]+)"')
    return _first(place / "sglang" / "_version.py", r"__version__ = version = '([^']+)'")


def _torches(place: Path) -> list[str]:
    """The versions of torch that are installed in a folder, by their metadata's names: one, or what upgrades left."""
    return sorted(
        path.name.removeprefix("torch-").removesuffix(".dist-info") for path in place.glob("torch-*.dist-info")
    )


def _refuse_torches(place: Path, bases: Iterable[Base], found: Iterable[str]) -> None:
    expected = {base.torch for base in bases if base.torch}
    if expected:
        raise BundleError(
            Reason.WRONG_TORCH,
            str(place),
            expected=f"torch {' or '.join(sorted(expected))}, and no other beside it",
            found=" and ".join(f"torch {version}" for version in found),
            next_step="remove the leftovers of the other installation",
        )


def _first(path: Path, pattern: str) -> str | None:
    """What the first line that begins with the pattern says; None if there is none, or no plain file to be read."""
    try:
        # Without O_NONBLOCK the open of a fifo would wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                return None
            text = stream.read(_METADATA).decode("utf-8", "replace")
    except OSError:
        return None
    match = re.search(rf"^{pattern}", text, re.MULTILINE)
    return match[1] if match else None


def _check_torch(place: Path, bases: Iterable[Base], torch: str | None, required: bool) -> None:
    expected = {base.torch for base in bases if base.torch}
    if not expected:
        return
    if torch is None and not required:
        return
    # "2.13.0+cu130": the local part tells the build, not the release.
    if torch is None or torch.split("+")[0] not in expected:
        raise BundleError(
            Reason.WRONG_TORCH,
            str(place),
            expected=f"torch {' or '.join(sorted(expected))}",
            found=f"torch {torch}" if torch else "torch: not seen",
            next_step="use the image that the base was released for",
        )
