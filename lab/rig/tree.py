"""An engine tree as it stands: where its ``sglang`` package is, which release it is, whether it is one we know."""

from __future__ import annotations

import base64
import csv
import hashlib
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lab.rig.errors import RigError

RELEASES = {"prefill": "0.5.19", "decode": "0.5.17"}
REPOSITORY = Path(__file__).resolve().parents[2]
_LEVEL = re.compile(r"^holds:.*at level \d+ \((.+)\)$", re.MULTILINE)
_VERSION = re.compile(r"""^\s*(?:__version__\s*=\s*)?version\s*(?::\s*str\s*)?=\s*['"]([^'"]+)['"]""", re.MULTILINE)


@dataclass(frozen=True)
class Tree:
    """The folder ``root`` that holds ``sglang/``, and the release its own version file names."""

    role: str
    root: Path
    version: str

    @property
    def researched(self) -> bool:
        """Whether a module of ours is in the tree."""
        return (self.root / "sglang" / "srt" / "research").is_dir()


def find(role: str, root: Path) -> Tree:
    """Look at the tree ``root``.

    Raises:
        RigError: kind ``tree``; no engine there, or another release than the one ``role`` is pinned to.
    """
    root = root.resolve()
    package = root / "sglang"
    if not (package / "srt" / "server_args.py").is_file():
        raise RigError("tree", f"{root} holds no sglang package; name the folder above sglang/")
    version = ""
    for name in ("_version.py", "version.py"):
        path = package / name
        if path.is_file():
            match = _VERSION.search(path.read_text(encoding="utf-8", errors="replace"))
            if match:
                version = match.group(1)
                break
    if version != RELEASES[role]:
        raise RigError("tree", f"{root} is sglang {version or 'of unknown release'}; {role} needs {RELEASES[role]}")
    return Tree(role, root, version)


def record_differences(tree: Tree) -> list[str]:
    """Paths of the tree that are not as the wheel's own RECORD says; compiled bytecode is left out."""
    records = list(tree.root.glob(f"sglang-{tree.version}.dist-info/RECORD"))
    if not records:
        return ["no RECORD"]
    listed: set[str] = set()
    wrong: list[str] = []
    text = records[0].read_text(encoding="utf-8", errors="replace")
    for row in csv.reader(text.splitlines()):
        path, digest, *_ = (*row, "", "")
        listed.add(path)
        if not digest or not path.startswith("sglang/"):
            continue
        name, _, value = digest.partition("=")
        if name != "sha256":
            wrong.append(path + " has no SHA-256 in RECORD")
            continue
        try:
            data = (tree.root / path).read_bytes()
        except OSError:
            wrong.append(path + " is missing")
            continue
        found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if found != value:
            wrong.append(path + " is changed")
    for file in (tree.root / "sglang").rglob("*.py"):
        name = file.relative_to(tree.root).as_posix()
        if name not in listed:
            wrong.append(name + " is extra")
    return wrong


def recognise(tree: Tree, allow_drift: bool, checker: Path = REPOSITORY / "tools" / "check_sources.py") -> str:
    """Say at which level the tree stands, by the bundle's own checker: ``base``, or the id of its last patch.

    A tree whose every file is as the wheel's own RECORD says is ``base`` without asking.

    Args:
        allow_drift: go on with a tree that is not recognised.

    Raises:
        RigError: kind ``drift``; the tree is not one the bundle knows and ``allow_drift`` is not set.
    """
    wrong = record_differences(tree)
    if not wrong and not tree.researched:
        return "base"
    told = "; ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
    if checker.is_file():
        argv = [sys.executable, str(checker), "--role", tree.role, "--root", str(tree.root), "--full"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
        level = _LEVEL.search(done.stdout)
        if done.returncode == 0 and level is not None:
            return level.group(1)
        told = (done.stderr or done.stdout).strip() or told
    if allow_drift:
        return "drifted, allowed"
    raise RigError("drift", f"{tree.root} is not a known state of {tree.role}: {told}. Use --allow-drift to run it")
