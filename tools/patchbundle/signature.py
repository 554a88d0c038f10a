"""Detached signatures of the lock, which pins all the rest. Made and verified by the installed ``minisign``.

Whatever is not a verified signature is a refusal, a missing program too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from patchbundle import bases
from patchbundle import lock as lock_module
from patchbundle.errors import BundleError, Reason
from patchbundle.manifest import SIGNATURE, Bundle

_PROGRAM = "minisign"
_PATIENCE = 30.0  # seconds
_KEY = re.compile(r"RW[A-Za-z0-9+/]{54}")


def program() -> str:
    """Where minisign is.

    Raises:
        BundleError: NO_PROGRAM.
    """
    place = shutil.which(_PROGRAM)
    if place is None:
        raise BundleError(
            Reason.NO_PROGRAM,
            _PROGRAM,
            found="none on PATH",
            next_step="install it: Debian's package is called minisign",
        )
    return place


def require(bundle: Bundle, key: str, file: Path | None = None) -> str:
    """Verify the bundle's signature: by default the one beside its lock. ``key`` is a public key or a file of one.

    Returns the comment that was signed with it. What is verified are the bytes of the lock that was read, not those
    that lie in a file a moment later.

    Raises:
        BundleError: SIGNATURE or NO_PROGRAM.
    """
    found = program()
    place = file if file is not None else bundle.root / SIGNATURE
    what = f"a signature of bundle {bundle.lock.digest}"
    with ExitStack() as stack:
        if _KEY.fullmatch(key):
            by, fds = ["-P", key], []
        else:
            fds = [stack.enter_context(_held(bases.read_file(Path(key), Reason.SIGNATURE, "a public key of minisign")))]
            by = ["-p", _name(fds[0])]
        for data in (bases.read_file(place, Reason.SIGNATURE, what), lock_module.dump(bundle.lock)):
            fds.append(stack.enter_context(_held(data)))
        said, fault = _run([found, "-V", "-Q", *by, "-x", _name(fds[-2]), "-m", _name(fds[-1])], fds)
    if fault:
        raise _refuse(str(place), f"{what} by this key", fault)
    return said


@contextmanager
def _held(data: bytes) -> Iterator[int]:
    """A descriptor of bytes that lie in no file: what was read is what the program reads."""
    fd = os.memfd_create("held")
    try:
        with open(fd, "wb", closefd=False) as stream:
            stream.write(data)
        yield fd
    finally:
        os.close(fd)


def _name(fd: int) -> str:
    return f"/proc/self/fd/{fd}"


def sign(files: Sequence[Path], key: Path, comment: str) -> None:
    """Sign files; each signature is FILE.minisig. The program itself asks for the key's password, once.

    Raises:
        BundleError: SIGNATURE or NO_PROGRAM.
    """
    again = "name the secret key's file, and give its password"
    if not key.is_file():
        raise _refuse(str(key), "a secret key of minisign", "no file", again)
    found = program()
    words = [found, "-S", "-s", str(key.absolute()), "-t", comment, "-m", *(str(path.absolute()) for path in files)]
    _, fault = _run(words, asks=True)
    if fault:
        raise _refuse(str(key), "a key that opens with the password given", fault, again)


def _run(words: Sequence[str], fds: Sequence[int] = (), *, asks: bool = False) -> tuple[str, str]:
    """What the program said, and why it failed; empty if it did not."""
    stdin, stderr, patience = (None, None, None) if asks else (subprocess.DEVNULL, subprocess.PIPE, _PATIENCE)
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            words, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, timeout=patience, pass_fds=fds, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    out, errors = ((raw or b"").decode("utf-8", "replace").strip() for raw in (done.stdout, done.stderr))
    last = [*out.splitlines(), *errors.splitlines()][-1:]
    return out, (last or [f"exit code {done.returncode}"])[0] if done.returncode else ""


def _refuse(where: str, expected: str, found: str, next_step: str = "") -> BundleError:
    return BundleError(Reason.SIGNATURE, where, expected=expected, found=found, next_step=next_step)
