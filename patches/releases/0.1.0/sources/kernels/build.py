"""Compile a kernel source of ours with the target's nvcc, once, and load it; anything unexpected is an error.

A source is named together with its SHA-256, and that digest stands in the Python module that calls the kernel. The
bytes that were hashed are the bytes that are compiled, and the digest is compiled into the library, which is asked
for it after loading. So a source cannot be changed without its module, and the module's own bytes are pinned with
the rest of the tree.

A built library lies in ``$PATCHBUNDLE_CACHE`` (else ``$XDG_CACHE_HOME`` or ``~/.cache``, then ``patchbundle``), in
``kernels/NAME-KEY``, where the key covers the source, the card's architecture, the compiler's version and the flags.
It is made beside that folder and renamed into place, under one lock, so that many ranks can start at once.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FLAGS = ("-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-cudart", "static")
ARCHITECTURES: Mapping[tuple[int, int], str] = {(9, 0): "90a", (12, 0): "120a"}
OLDEST = (12, 8)  # the first nvcc that knows both
LIMIT_S = 900.0  # a build takes seconds; on a starved machine minutes


class KernelBuildError(RuntimeError):
    """The kernel cannot be built or its library cannot be trusted. Never answered by another kernel."""


@dataclass(frozen=True)
class Compiler:
    """An nvcc: its path, and what ``nvcc --version`` prints."""

    path: Path
    banner: str


def architecture(capability: tuple[int, int]) -> str:
    """Name the target of nvcc for a card's compute capability.

    Raises:
        KernelBuildError: the kernels were not written for such a card.
    """
    if capability not in ARCHITECTURES:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        raise KernelBuildError(f"compute capability {capability[0]}.{capability[1]} is not supported (only {known})")
    return ARCHITECTURES[capability]


def compiler() -> Compiler:
    """Find nvcc: below ``$CUDA_HOME`` or ``$CUDA_PATH`` where one is set, else on the path, else in /usr/local/cuda.

    Raises:
        KernelBuildError: there is none, it does not run, or it is older than 12.8.
    """
    path = _nvcc()
    try:
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelBuildError(f"{path} --version failed: {error}") from error
    release = re.search(r"release (\d+)\.(\d+)", shown.stdout)
    if release is None:
        raise KernelBuildError(f"{path} does not say its release: {shown.stdout.strip()[:200]!r}")
    if (int(release[1]), int(release[2])) < OLDEST:
        raise KernelBuildError(f"{path} is CUDA {release[1]}.{release[2]}; {OLDEST[0]}.{OLDEST[1]} or newer is needed")
    return Compiler(path, shown.stdout.strip())


def _nvcc() -> Path:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(name):
            path = Path(home) / "bin" / "nvcc"
            if not path.is_file():
                raise KernelBuildError(f"{name}={home}, but {path} is not there")
            return path
    found = shutil.which("nvcc")
    path = Path(found) if found else Path("/usr/local/cuda/bin/nvcc")
    if not path.is_file():
        raise KernelBuildError("no nvcc: set CUDA_HOME to a CUDA toolkit, or put nvcc on the PATH")
    return path


def read_source(path: Path, digest: str) -> bytes:
    """Give the bytes of ``path``.

    Raises:
        KernelBuildError: it cannot be read, or its SHA-256 is not ``digest``.
    """
    try:
        source = path.read_bytes()
    except OSError as error:
        raise KernelBuildError(f"kernel source {path}: {error.strerror}") from error
    found = hashlib.sha256(source).hexdigest()
    if found != digest:
        raise KernelBuildError(f"kernel source {path} was changed: SHA-256 {found}, but {digest} is expected")
    return source


def cache() -> Path:
    """Give the folder of all built kernels."""
    if own := os.environ.get("PATCHBUNDLE_CACHE"):
        return Path(own) / "kernels"
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "patchbundle" / "kernels"


def library(path: Path, digest: str, capability: tuple[int, int]) -> ctypes.CDLL:
    """Build the kernel source ``path`` for a card, or find it built, and load it.

    Args:
        path: the ``.cu`` file. Its library exports ``<stem>_identity()``, which gives back ``digest``.
        digest: the SHA-256 of that file.
        capability: the card's compute capability.

    Raises:
        KernelBuildError: wrong source, card or compiler, a failed build, or a library that is not what was built.
    """
    source = read_source(path, digest)
    target = architecture(capability)
    nvcc = compiler()
    recipe = {"source": digest, "architecture": target, "compiler": nvcc.banner, "flags": list(FLAGS)}
    key = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    entry = cache() / f"{path.stem}-{key[:32]}"
    try:
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _private(entry.parent)
        with (entry.parent / f"{entry.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not entry.is_dir():
                _build(path.stem, source, recipe, nvcc, entry)
    except OSError as error:
        raise KernelBuildError(f"kernel cache {entry.parent}: {error}") from error
    return _load(path.stem, recipe, entry)


def _private(folder: Path) -> None:
    """Refuse a folder in which somebody else could put a library for us to load."""
    found = folder.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise KernelBuildError(
            f"kernel cache {folder} must belong to the user of this process and be writable by it alone"
        )


def _build(stem: str, source: bytes, recipe: Mapping[str, object], nvcc: Compiler, entry: Path) -> None:
    target = recipe["architecture"]
    with tempfile.TemporaryDirectory(prefix=f".{entry.name}-", dir=entry.parent) as folder:
        made = Path(folder) / "made"
        made.mkdir(mode=0o700)
        unit = Path(folder) / f"{stem}.cu"
        unit.write_bytes(source)
        result = made / f"{stem}.so"
        command = [
            str(nvcc.path),
            *FLAGS,
            f"-gencode=arch=compute_{target},code=sm_{target}",
            f'-D{stem.upper()}_IDENTITY="{recipe["source"]}"',
            "-o",
            str(result),
            str(unit),
        ]
        # A conda or wheel toolkit keeps its static runtime in lib, where its nvcc does not look.
        for library_folder in (nvcc.path.parent.parent / "lib64", nvcc.path.parent.parent / "lib"):
            if library_folder.is_dir():
                command.append(f"-L{library_folder}")
        try:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        except (OSError, subprocess.SubprocessError) as error:
            raise KernelBuildError(f"{nvcc.path} could not build {stem}: {error}") from error
        if ran.returncode:
            raise KernelBuildError(f"{nvcc.path} could not build {stem} for sm_{target}:\n{ran.stderr.strip()[-4000:]}")
        digest = hashlib.sha256(result.read_bytes()).hexdigest()
        (made / "build.json").write_text(json.dumps({**recipe, "library": digest}, indent=1, sort_keys=True) + "\n")
        made.rename(entry)


def _load(stem: str, recipe: Mapping[str, object], entry: Path) -> ctypes.CDLL:
    path = entry / f"{stem}.so"
    try:
        record = json.loads((entry / "build.json").read_text())
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError) as error:
        raise KernelBuildError(f"kernel cache entry {entry} is damaged ({error}): remove it") from error
    if record != {**recipe, "library": found}:
        raise KernelBuildError(f"kernel cache entry {entry} is not what was built: remove it")
    try:
        loaded = ctypes.CDLL(str(path))
        identity = getattr(loaded, f"{stem}_identity")
    except (OSError, AttributeError) as error:
        raise KernelBuildError(f"{path} cannot be loaded: {error}") from error
    identity.restype = ctypes.c_char_p
    if identity() != str(recipe["source"]).encode():
        raise KernelBuildError(f"{path} says that it is {identity()!r}, not {recipe['source']}: remove {entry}")
    return loaded
