"""A start that fails closed: a tree is verified, and only then this process becomes the command that runs from it.

What is promised is the moment of the look. Somebody who changes the tree after it, while the command still imports,
is not seen: stop what starts by itself before ``apply`` and ``revert``.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from patchbundle import imports, work
from patchbundle.bases import ROLES
from patchbundle.errors import BundleError, Reason
from patchbundle.manifest import Bundle
from patchbundle.target import Target

SEPARATOR = ":"  # of PYTHONPATH
_NAMED = ("--root", "--python", "--overlay")
_PYTHON = re.compile(r"python(?:3(?:\.[0-9]+)?)?")
# An interpreter sets them to be ignored, and what is ignored stays so in the program that it becomes.
_IGNORED = (signal.SIGPIPE, signal.SIGXFSZ)


def interpreter_of(command: Sequence[str]) -> str | None:
    """The interpreter that a command starts with, if it does."""
    return command[0] if command and _PYTHON.fullmatch(Path(command[0]).name) else None


class Start(NamedTuple):
    """A plain start: a role, what is expected, one way to name the tree (``--root`` and so on), the command."""

    role: str
    expect: str
    named: str
    place: str
    command: tuple[str, ...]

    @classmethod
    def read(cls, words: Sequence[str]) -> Start | None:
        """What these words of ``exec`` mean, if they are of this form and no other."""
        if "--" not in words:
            return None
        own, command = words[: words.index("--")], tuple(words[words.index("--") + 1 :])
        options = dict(zip(own[1::2], own[2::2], strict=False))
        named = next((option for option in _NAMED if option in options), "")
        plain = len(own) == 5 and set(options) == {"--expect", named} and own[0] in ROLES and command
        return cls(own[0], options["--expect"], named, options[named], command) if plain else None


def at_once(words: Sequence[str], bundle: Path) -> None:
    """Become the command of a plain start that holds, in a third of the time that the whole command line takes.

    Nothing is said here and nothing refused: whatever is not plain, or does not hold, is left to the whole command
    line, which looks again. So there is one way only to refuse.
    """
    start = Start.read(words)
    if start is None or any(not _is_open(fd) for fd in range(3)):
        return
    from patchbundle import manifest
    from patchbundle import target as target_module

    with contextlib.suppress(BundleError, OSError):
        pins, place = manifest.load_pins(bundle), Path(start.place)
        root, python = (None, start.place) if start.named == "--python" else (place, None)
        target = target_module.discover(pins, root=root, python=python, role=start.role)
        overlay = start.named == "--overlay"
        environment = with_first(place.absolute(), os.environ) if overlay else dict(os.environ)
        if overlay:
            require_first(place, target, start.command)
        verify(pins, target, start.expect, environment)
        become(start.command, environment)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def verify(bundle: Bundle, target: Target, expect: str, environment: Mapping[str, str]) -> str:
    """Verify a tree as :func:`work.check_target` does, and that with this environment nothing is imported in its place.

    Returns its level.

    Raises:
        BundleError: as there; SHADOWED.
    """
    state, _ = work.check_target(bundle, target, expect, full=False)
    marker = state.base.marker.partition("/")[0]
    other = None if state.base.is_crate else shadow(target.root, marker, environment, Path.cwd())
    if other is not None:
        raise BundleError(Reason.SHADOWED, str(other), expected=f"{marker} from {target.root} alone")
    return state.level_name


def verify_router(bundle: Bundle, path: Path, expect: str) -> str:
    """Verify what a router's binary was built from; returns its level.

    Raises:
        BundleError: NO_BINARY, NOT_EXPECTED or UNKNOWN_LEVEL.
    """
    from patchbundle import binary

    base = binary.base_of(bundle)
    pins = bundle.pins(base)
    wanted = pins.name_of(len(pins.levels)) if expect == "applied" else pins.name_of(pins.level_of(expect))
    built = binary.read(path)
    found = binary.name_of(bundle, base, built)
    if found != wanted:
        raise BundleError(
            Reason.NOT_EXPECTED,
            str(path),
            expected=wanted,
            found=found or f"level {built.level} of another bundle",
            next_step="install the build of this bundle: see docs/router.md",
        )
    return wanted


def shadow(root: Path, package: str, environment: Mapping[str, str], here: Path) -> Path | None:
    """Another copy of ``package`` that an interpreter started in ``here`` would import before that below ``root``.

    The working folder comes first for ``-m`` and ``-c``, then PYTHONPATH, then everything else. For a script, and for
    ``-I`` and ``-P``, the working folder does not count; it is looked at all the same: a command may start others.
    """
    # Python 3.10 does not know that variable.
    is_safe = environment.get("PYTHONSAFEPATH") and "python3.10" not in root.parts
    places = [] if is_safe else [here]
    listed = environment.get("PYTHONPATH", "")
    places += [here / entry for entry in listed.split(SEPARATOR)] if listed else []
    for place in places:
        if place.resolve() == root.resolve():
            return None
        other = imports.found(place, package)
        if other is not None:
            return other.absolute()
    return None


def with_first(place: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with ``place`` first on PYTHONPATH."""
    listed = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": f"{place}:{listed}" if listed else str(place)}


def require_first(place: Path, target: Target, command: Sequence[str]) -> None:
    """Whether a command with ``place`` first on its PYTHONPATH imports from the tree that was found there.

    Raises:
        BundleError: SHADOWED.
    """
    fault = ""
    if SEPARATOR in str(place.absolute()):
        fault = "a colon in its path, where PYTHONPATH is split"
    elif target.root != place.resolve():
        fault = f"the tree at {target.root}, which is not where an interpreter looks then"
    elif ignores_environment(command):
        fault = "a command that takes no PYTHONPATH, with -I or -E"
    if fault:
        raise BundleError(
            Reason.SHADOWED, str(place), expected="a folder that the command imports from", found=fault,
            next_step="name the overlay as apply made it, at a path without a colon; start without -I and -E",
        )  # fmt: skip


def ignores_environment(command: Sequence[str]) -> bool:
    """Whether it is an interpreter that is told to take nothing from its environment."""
    words = iter(command[1:] if interpreter_of(command) else ())
    for word in words:
        if not word.startswith("-") or word.startswith("--") or word == "-":
            return False
        # Options may stand together; what comes after one of these belongs to it, or to the program.
        for at, letter in enumerate(word[1:], 2):
            if letter in "EI":
                return True
            if letter in "mc":
                return False
            if letter in "WX":
                if at == len(word):
                    next(words, None)
                break
    return False


def become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Be this command, with the same process id, descriptors and signals as if it had been started itself.

    Raises:
        BundleError: NO_COMMAND.
    """
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        raise BundleError(Reason.NO_COMMAND, command[0], expected="a program", found="none that may be started")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    before = [signal.signal(number, signal.SIG_DFL) for number in _IGNORED]
    try:
        os.execvpe(command[0], list(command), environment)
    except OSError as error:
        for number, handler in zip(_IGNORED, before, strict=True):
            signal.signal(number, handler)
        found = error.strerror or str(error)
        raise BundleError(Reason.NO_COMMAND, command[0], expected="a program", found=found) from None
