"""Proof of bytecode: what an interpreter would run for a module is compiled from the source that stands there.

The interpreter itself is asked, without its site and its packages: which file it would import, which compiled file it
would take, and whether that one's code equals the code that it makes of the source now.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from patchbundle import target as target_module
from patchbundle.errors import BundleError, Reason

# Run by the interpreter in question, whichever from 3.10 on it is. What unmarshals is no process of ours: a compiled
# file that is damaged on purpose may end it, and that is a refusal.
_SCRIPT = """
import importlib.machinery, importlib.util, json, marshal, os, resource, sys

# More than the code of any module; a length that is no length must not take the machine's memory.
resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31))

def stale(data, status, source):
    "Whether the interpreter would compile anew, whatever the code is."
    if len(data) < 16 or data[:4] != importlib.util.MAGIC_NUMBER:
        return True
    flags = int.from_bytes(data[4:8], "little")
    if flags == 0:
        stamp = int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF
        return (int.from_bytes(data[8:12], "little"), int.from_bytes(data[12:16], "little")) != stamp
    return flags == 3 and data[8:16] != importlib.util.source_hash(source)

answer = {"proven": 0, "stale": 0, "none": 0, "wrong": []}
for path in sys.argv[1:]:
    folder, _, name = path[:-3].rpartition("/")
    if name == "__init__":
        folder, _, name = folder.rpartition("/")
    spec = importlib.machinery.PathFinder.find_spec(name, [folder])
    if spec is None or spec.origin != path:
        answer["wrong"].append([path, "not imported: in its place " + str(spec and spec.origin)])
        continue
    with open(path, "rb") as stream:
        source, status = stream.read(), os.fstat(stream.fileno())
    for level, optimization in enumerate(("", "1", "2")):
        place = importlib.util.cache_from_source(path, optimization=optimization)
        try:
            with open(place, "rb") as stream:
                data = stream.read()
        except FileNotFoundError:
            answer["none"] += 1
            continue
        except OSError as error:
            answer["wrong"].append([place, str(error.strerror)])
            continue
        if stale(data, status, source):
            answer["stale"] += 1
            continue
        try:
            same = marshal.loads(data[16:]) == compile(source, path, "exec", dont_inherit=True, optimize=level)
        except (EOFError, ValueError, TypeError, MemoryError) as error:
            answer["wrong"].append([place, str(error) or type(error).__name__])
            continue
        if same:
            answer["proven"] += 1
        else:
            answer["wrong"].append([place, "code of another source"])
print(json.dumps(answer))
"""


@dataclass(frozen=True)
class Proof:
    """Compiled files of the modules, without and with ``-O`` and ``-OO``: ``proven`` are of the source that stands
    there; ``stale`` would be made anew; ``none``: as many are not there."""

    interpreter: str
    proven: int
    stale: int
    none: int


def prove(root: Path, modules: Sequence[str], interpreter: str) -> Proof:
    """Prove it for modules below ``root``, for one interpreter.

    Raises:
        BundleError: BYTECODE, naming the first compiled file that is of another source, or module that another file
            is imported for; or the interpreter, if it does not answer.
    """
    prefix = os.environ.get("PYTHONPYCACHEPREFIX")
    more = ["-X", f"pycache_prefix={prefix}"] if prefix else []
    paths = [str(root / module) for module in modules if module.endswith(".py")]
    try:
        answer = json.loads(target_module.said([interpreter, "-I", "-S", *more, "-c", _SCRIPT, *paths]))
        wrong = [(str(path), str(why)) for path, why in answer.pop("wrong")]
        made = Proof(interpreter, **answer)
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        found = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise BundleError(
            Reason.BYTECODE,
            interpreter,
            expected="an interpreter that tells what it would run",
            found=found,
            next_step="name the interpreter that the engine is started with",
        ) from None
    for path, why in wrong:
        raise BundleError(
            Reason.BYTECODE,
            path,
            expected="nothing that is run in place of the pinned source",
            found=why,
            next_step="remove it, then run the command again",
        )
    return made
