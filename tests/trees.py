"""Helpers of the tests that touch a file system: snapshots, the command line, children that die or lose rights."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from click.testing import CliRunner

from patchbundle import cli, manifest, transaction, work
from patchbundle import target as target_module
from patchbundle.disk import Disk
from patchbundle.manifest import Bundle
from patchbundle.state import State
from patchbundle.target import Target
from patchbundle.transaction import Outcome
from patchbundle.tree import Tree
from tests.toy import Toy, cache_at

_T = TypeVar("_T")
REPOSITORY = Path(__file__).parents[1]
NOBODY = 65534

Snapshot = dict[str, tuple[Any, ...]]


def snapshot(root: Path, *, times: bool = True) -> Snapshot:
    """Everything below ``root``: kind, mode, owner, bytes, link target, attributes and (with ``times``) mtime."""
    result: Snapshot = {}
    for path in [root, *root.rglob("*")]:
        status = path.lstat()
        kind = stat.S_IFMT(status.st_mode)
        content = ""
        if stat.S_ISREG(status.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        elif stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        attributes = tuple((name, os.getxattr(path, name, follow_symlinks=False)) for name in _attributes(path))
        when = status.st_mtime_ns if times else 0
        name = path.relative_to(root).as_posix()
        result[name] = (kind, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid, content, attributes, when)
    return result


def _attributes(path: Path) -> list[str]:
    try:
        return sorted(os.listxattr(path, follow_symlinks=False))
    except OSError:
        return []


def fresh(folder: Path) -> Path:
    """The folder, emptied."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


@dataclass(frozen=True)
class Result:
    """What a command did: exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    @property
    def table(self) -> dict[str, Any]:
        """The JSON that it printed."""
        table = json.loads(self.out)
        assert isinstance(table, dict)
        return table

    @property
    def reason(self) -> str | None:
        error = self.table["error"]
        return None if error is None else str(error["reason"])


def run(toy: Toy, *arguments: str | Path, check: bool = False) -> Result:
    """One command of apply.py (or check_sources.py) on the toy's bundle, in this process."""
    command = cli.check_cli if check else cli.apply_cli
    words = [str(argument) for argument in arguments]
    if words[0] != "--version":
        words[0 if check else 1 : 0 if check else 1] = ["--bundle", str(toy.bundle)]
    with cache_at(toy.cache):
        result = CliRunner().invoke(command, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Result(result.exit_code, result.stdout, result.stderr)


def apply(toy: Toy, *arguments: str | Path) -> Result:
    return run(toy, "apply", "--root", toy.tree, *arguments)


def revert(toy: Toy, *arguments: str | Path) -> Result:
    return run(toy, "revert", "--root", toy.tree, *arguments)


def status(toy: Toy, *arguments: str | Path) -> Result:
    return run(toy, "status", "--root", toy.tree, *arguments)


def check(toy: Toy, *arguments: str | Path) -> Result:
    return run(toy, "--root", toy.tree, *arguments, check=True)


def child(
    toy: Toy,
    *arguments: str | Path,
    script: str = "apply.py",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Result:
    """One command as a process of its own, as an operator starts it."""
    command = [sys.executable, str(REPOSITORY / "tools" / script), *map(str, arguments)]
    done = subprocess.run(
        command, env={**toy.environment, **(env or {})}, capture_output=True, check=False, timeout=120, cwd=cwd
    )
    return Result(done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8"))


def load(toy: Toy) -> tuple[Bundle, Target]:
    bundle = manifest.load(toy.bundle)
    return bundle, target_module.discover(bundle, root=toy.tree)


def change(toy: Toy, direction: str, to: str | None = None, disk_type: type[Disk] = Disk) -> Outcome:
    """Apply or revert through the library, with a disk of one's own."""
    bundle, target = load(toy)
    with transaction.locked(target.root, disk_type) as disk:
        state, plan = work.make_plan(bundle, target, direction, to, tree=disk)
        return work.execute(bundle, target, state, plan, disk=disk)


def level(toy: Toy) -> int | None:
    return look(toy).level


def look(toy: Toy) -> State:
    bundle, target = load(toy)
    with Tree(target.root) as tree:
        return work.look(bundle, target, tree)


def forked(function: Callable[[], _T], *, unprivileged: bool = False) -> _T:
    """Run ``function`` in a child process and return its JSON-able result; as nobody if root asks for that.

    Raises:
        Killed: the child ended by a signal.
    """
    # A child without rights may not be able to read the interpreter's own modules any more.
    for encoding in ("ascii", "latin-1", "utf-8"):
        codecs.lookup(encoding)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read)
            if unprivileged and os.geteuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            with os.fdopen(write, "w") as stream:
                json.dump(function(), stream)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    _, ended = os.waitpid(pid, 0)
    if os.WIFSIGNALED(ended):
        raise Killed(os.WTERMSIG(ended))
    assert os.WEXITSTATUS(ended) == 0, "the child failed: see its traceback"
    result: _T = json.loads(text)
    return result


class Killed(Exception):
    """A child ended by this signal."""


def unprivileged(function: Callable[[], Result]) -> Result:
    """Run a command in a child that has no special rights."""

    def inner() -> list[Any]:
        done = function()
        return [done.code, done.out, done.err]

    return Result(*forked(inner, unprivileged=True))


@contextmanager
def open_place() -> Iterator[Path]:
    """A folder that everybody may reach (pytest's own are closed to other users), in memory where that is to be had."""
    memory = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(prefix="patchbundle-test-", dir=memory if os.access(memory, os.W_OK) else None))
    place.chmod(0o755)
    try:
        yield place
    finally:
        for path in [place, *(path for path in place.rglob("*") if path.is_dir() and not path.is_symlink())]:
            path.chmod(0o755)
        shutil.rmtree(place)


def give_away(root: Path) -> None:
    """Let nobody own everything below ``root``, if we are the one who can."""
    if os.geteuid() == 0:
        for path in [root, *root.rglob("*")]:
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


Hook = Callable[[Disk, str, str], None]


def hooked(before: Hook | None = None, after: Hook | None = None) -> type[Disk]:
    """A kind of disk that calls ``before`` and ``after`` around every call on the file system."""

    class Hooked(Disk):
        def call(self, name: str, path: str, action: Callable[[], _T]) -> _T:
            if before is not None:
                before(self, name, path)
            result = super().call(name, path, action)
            if after is not None:
                after(self, name, path)
            return result

    return Hooked
