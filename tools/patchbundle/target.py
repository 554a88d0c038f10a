"""Find the one tree to work on. Nothing of the target is imported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from patchbundle import transaction
from patchbundle.bases import Base
from patchbundle.errors import BundleError, Reason
from patchbundle.manifest import Bundle
from patchbundle.tree import Tree

# Run by the interpreter that is asked: where would `import NAME` look? The working folder is the root, so
# that a checkout that happens to be the current folder does not shadow the installed distribution.
_ASK = """
import importlib.metadata, importlib.util, json, sys
name, distributions = sys.argv[1], sys.argv[2:]
def version(distribution):
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
spec = importlib.util.find_spec(name)
print(json.dumps({
    "locations": list(spec.submodule_search_locations or []) if spec else [],
    "path": sys.path,
    "prefix": sys.pycache_prefix,
    "versions": {item: version(item) for item in distributions},
}))
"""


@dataclass(frozen=True)
class Target:
    """A tree and what is known about it before any file is hashed."""

    root: Path
    bases: tuple[Base, ...]  # the bases it may stand on, by version
    version: str | None
    torch: str | None
    record: str | None  # path of the installed RECORD inside the tree
    mirrors: tuple[Path, ...]  # folders that hold bytecode of the tree's modules, with PYTHONPYCACHEPREFIX

    def describe(self) -> list[str]:
        return [
            f"target:  {self.root}",
            f"version: {self.version or 'not seen; the hashes decide'}",
            f"torch:   {self.torch or 'not seen'}",
        ]


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
    torch = version = None
    if root is not None:
        found = _below(root, bases)
    else:
        found, versions, prefix = _ask(python or sys.executable, [base for base in bases if not base.is_crate])
        version, torch = versions.get("sglang"), versions.get("torch")
        prefixes += [prefix] if prefix else []
    where = str(root) if root is not None else f"what {python or sys.executable} imports"
    place = _only(found, where)
    candidates = [base for base in bases if (place / base.marker).exists()]
    metadata = _metadata(place, candidates[0])
    version = _version(place, candidates[0], metadata) or version
    torch = torch or _torch(place)
    fitting = tuple(base for base in candidates if version in (None, base.version))
    if not fitting:
        raise BundleError(
            Reason.WRONG_VERSION,
            str(place),
            expected=" or ".join(f"{base.distribution} {base.version} ({base.role})" for base in candidates),
            found=f"{candidates[0].distribution} {version}",
            next_step="point --root or --python at the fixed image's own engine",
        )
    _check_torch(place, fitting, torch, require_torch)
    record = f"{metadata.name}/RECORD" if metadata is not None and (metadata / "RECORD").exists() else None
    return Target(place, fitting, version, torch, record, _mirrors(place, found, prefixes))


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
    below = ("python", "lib/python3*/site-packages", "lib/python3*/dist-packages", "sglang_router-*")
    return [place for place in (root, *(path for item in below for path in sorted(root.glob(item)))) if place.is_dir()]


def _ask(python: str, bases: Iterable[Base]) -> tuple[list[Path], dict[str, str | None], str | None]:
    markers = {base.marker for base in bases}
    # The child's working folder is another one.
    command = [str(Path(python).absolute()) if "/" in python else python, "-c", _ASK, "sglang", "sglang", "torch"]
    try:
        # PYTHONPATH stays: an overlay folder there is exactly the second copy that must be seen.
        answer = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60, check=True)
        # An interpreter's start-up files may print too.
        table = json.loads((answer.stdout.strip().splitlines() or [""])[-1])
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        detail = str(getattr(error, "stderr", None) or "").strip() or str(error)
        raise BundleError(
            Reason.NO_TARGET,
            python,
            expected="a Python interpreter",
            found=detail.splitlines()[-1],
            next_step="give --root DIR or --python EXE",
        ) from None
    places = [Path(location).parent for location in table["locations"]]
    places += [Path(entry) for entry in table["path"] if entry]
    found = [place for place in places if any((place / marker).exists() for marker in markers)]
    return found, table["versions"], table["prefix"]


def _metadata(place: Path, base: Base) -> Path | None:
    """The distribution's own metadata folder beside the package, if there is one."""
    if base.is_crate:
        return None
    name = re.sub(r"[-_.]+", "_", base.distribution)
    found = sorted(path for path in place.glob(f"{name}-*.dist-info") if (path / "METADATA").is_file())
    if len(found) > 1:
        raise BundleError(
            Reason.TWO_TARGETS,
            str(place),
            expected=f"one version of {base.distribution}",
            found=", ".join(path.name for path in found),
            next_step="remove the leftovers of the other installation",
        )
    return found[0] if found else None


def _version(place: Path, base: Base, metadata: Path | None) -> str | None:
    if metadata is not None:
        return _first(metadata / "METADATA", r"Version: (\S+)")
    if base.is_crate:
        return _first(place / "PKG-INFO", r"Version: (\S+)") or _first(place / "Cargo.toml", r'version = "([^"]+)"')
    return _first(place / "sglang" / "_version.py", r"__version__ = version = '([^']+)'")


def _torch(place: Path) -> str | None:
    found = [path.name.removeprefix("torch-").removesuffix(".dist-info") for path in place.glob("torch-*.dist-info")]
    return found[0] if len(found) == 1 else None


def _first(path: Path, pattern: str) -> str | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
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
