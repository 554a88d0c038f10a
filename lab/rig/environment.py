"""The two Python environments in which the engines run, made from pinned and hashed lists, kept in the cache folder."""

from __future__ import annotations

import ctypes.util
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab.rig import cache
from lab.rig.errors import RigError

PYTHON = (3, 11)
# Each takes 9.3 GB installed; pip needs room for the archive it is unpacking besides.
DISK = 13_000_000_000
# Shared libraries the transfer engine opens, with the Debian package of each.
LIBRARIES = {"ibverbs": "libibverbs1", "rdmacm": "librdmacm1", "numa": "libnuma1"}
_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Environment:
    """One engine release and the list of packages it runs with."""

    release: str

    @property
    def requirements(self) -> Path:
        """The pinned and hashed list in the repository."""
        return Path(__file__).with_name(f"requirements-{self.release}.txt")

    @property
    def pins(self) -> dict[str, str]:
        """Package name to version, as pinned."""
        return dict(_PINNED.findall(self.requirements.read_text(encoding="utf-8")))

    @property
    def digest(self) -> str:
        """SHA-256 of the list and of the Python it is for."""
        text = self.requirements.read_bytes() + repr(PYTHON).encode()
        return hashlib.sha256(text).hexdigest()

    @property
    def folder(self) -> Path:
        """Where it is, or will be."""
        return cache.place(f"environments/{self.release}", self.digest)

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"


ENVIRONMENTS = {release: Environment(release) for release in ("0.5.17", "0.5.19")}
# Interpreters whose packages this process has compared with their pins.
_SEEN: set[Path] = set()


def need_python(version: tuple[int, ...] = tuple(sys.version_info[:2])) -> None:
    """Refuse a Python that the pinned wheels were not picked for.

    Raises:
        RigError: kind ``python``.
    """
    if tuple(version) != PYTHON:
        found, wanted = (".".join(map(str, pair)) for pair in (version, PYTHON))
        raise RigError("python", f"the engine environments are pinned for Python {wanted}, this is {found}")


def need_libraries(find: Callable[[str], str | None] = ctypes.util.find_library) -> None:
    """Refuse a machine that lacks a shared library of the transfer engine.

    Raises:
        RigError: kind ``library``, naming the Debian packages.
    """
    missing = [package for name, package in LIBRARIES.items() if find(name) is None]
    # ldconfig or a compiler may be missing where the library is not: the loader has the last word.
    still = []
    for name, package in LIBRARIES.items():
        if package in missing:
            try:
                ctypes.CDLL(f"lib{name}.so.1")
            except OSError:
                still.append(package)
    if still:
        raise RigError("library", f"missing Debian packages: {' '.join(still)}; run: make system-deps")


def _run(argv: list[str], log: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with log.open("ab") as out:
        code = subprocess.run(argv, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env).returncode
    if code != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        raise RigError("environment", f"{' '.join(argv[:6])} ... ended with status {code}", tuple(lines))


def _move_scripts(work: Path, final: Path) -> None:
    """Write the final place into the scripts' first lines; the folder is renamed once it is complete."""
    for script in (work / "bin").iterdir():
        if script.is_symlink() or not script.is_file():
            continue
        data = script.read_bytes()
        if data.startswith(b"#!" + str(work).encode()):
            script.write_bytes(data.replace(str(work).encode(), str(final).encode(), 1))


def installed(python: Path) -> dict[str, str]:
    """Package name to version as the interpreter ``python`` sees them, names in lower case with dashes."""
    code = "import importlib.metadata as m\nfor d in m.distributions(): print(d.metadata['Name'] + '==' + d.version)"
    try:
        done = subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True, check=False)
    except OSError as error:
        raise RigError(
            "environment", f"{python} does not run: {error.strerror}; delete {python.parent.parent}"
        ) from error
    if done.returncode != 0:
        raise RigError("environment", f"{python} does not run: {done.stderr.strip()[-200:]}")
    return {name.lower().replace("_", "-"): version for name, version in _PINNED.findall(done.stdout)}


def check(environment: Environment, python: Path) -> None:
    """Compare what is installed with the pins; Torch first, since a replaced Torch is the usual accident.

    Raises:
        RigError: kind ``environment``, naming the first packages that differ.
    """
    found = installed(python)
    wrong = []
    for name, version in sorted(environment.pins.items(), key=lambda pin: (pin[0] != "torch", pin[0])):
        have = found.get(name.lower().replace("_", "-").replace(".", "-"), found.get(name.lower(), "nothing"))
        if have != version:
            wrong.append(f"{name} {have} instead of {version}")
    if wrong:
        raise RigError("environment", f"{python.parent.parent}: {'; '.join(wrong[:5])}. Delete it, it is made again")


def ensure(release: str, say: Callable[[str], None] = lambda text: None) -> Path:
    """Return the interpreter of the environment for ``release``, made first if it is not in the cache.

    Everything is installed by hash and without looking at dependencies, so nothing can be replaced by something newer.
    What somebody else replaced since is seen: the first call of a process compares every version with its pin.

    Raises:
        RigError: kinds ``python``, ``library``, ``disk``, ``environment``.
    """
    environment = ENVIRONMENTS[release]
    need_python()
    need_libraries()

    def build(work: Path) -> None:
        log = environment.folder.with_suffix(".log")
        log.unlink(missing_ok=True)
        say(f"making the environment of sglang {release}: about four minutes, log in {log}")
        _run([sys.executable, "-m", "venv", str(work)], log)
        pip = [str(work / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
        # Bytecode is made when it is first needed, in the cache folder; compiling all of it here costs a minute.
        _run([*pip, "--no-compile", "--no-cache-dir", "-r", str(environment.requirements)], log)
        _move_scripts(work, environment.folder)
        check(environment, work / "bin" / "python")

    cache.ensure(f"environments/{release}", environment.digest, build, DISK)
    if environment.python not in _SEEN:
        check(environment, environment.python)
        _SEEN.add(environment.python)
    return environment.python
