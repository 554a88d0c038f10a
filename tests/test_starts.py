"""The examples of docs/operators.md, as their supervisors run them: systemd, a container's entry point, Kubernetes.

A real systemd is booted as process 1 of namespaces of its own. The other two are what a runtime does with an image's
words: a process 1 without rights, on a file system that is read only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from patchbundle import journal
from tests import nodes, trees
from tests import toy as toys
from tests.toy import Toy
from tests.trees import REPOSITORY

PAGE = (REPOSITORY / "docs/operators.md").read_text(encoding="utf-8")
# The engine of these tests: it says what it is, and ends in a way of its own when it is told to.
ENGINE = """
import json, os, signal, sys, time
def stop(*_):
    print("bye", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, stop)
told = {"pid": os.getpid(), "parent": os.getppid(), "words": sys.argv[1:], "uid": os.getuid()}
print(json.dumps(told), flush=True)
if os.environ.get("TOLD"):
    with open(os.environ["TOLD"], "w") as stream:
        json.dump(told, stream)
else:
    time.sleep(60)
"""


def need_namespaces(*programs: str) -> None:
    missing = [name for name in ("unshare", "mount", *programs) if shutil.which(name) is None]
    if missing:
        pytest.skip(f"this machine has no {', '.join(missing)}")
    if subprocess.run(["unshare", "--fork", "--pid", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make namespaces (run as root to see this)")


def block(language: str, number: int = 0) -> str:
    """The text of the page's block of code in a language, the first one if no number is given."""
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return found[number]


class Node:
    """A machine as the examples have it: the one file and an environment with a patched toy."""

    def __init__(self, place: Path) -> None:
        made = toys.make(place / "toy")
        python = nodes.for_everybody()
        self.environment = place / "engine"
        subprocess.run([str(python), "-m", "venv", "--without-pip", str(self.environment)], check=True)
        self.toy = Toy(made.bundle, next(self.environment.glob("lib/python3*/site-packages")), made.cache)
        toys.install(next((made.cache / "archives").glob("*/*.whl")), self.toy.tree)
        (self.toy.tree / "sglang/launch_server.py").write_text(ENGINE)
        assert trees.apply(self.toy).code == 0
        self.file = nodes.one_file(self.toy, place / "bundle.pyz")

    def words(self, text: str) -> str:
        """An example with the places, and the role, of this machine."""
        for old, new in {
            "/usr/local/lib/patchbundle.pyz": self.file,
            "/usr/local/engine": self.environment,
            "exec decode": "exec prefill",
            '"exec", "decode"': '"exec", "prefill"',
            "/usr/bin/python3": nodes.for_everybody(),
        }.items():
            text = text.replace(old, str(new))
        return text

    def interrupt(self) -> None:
        """As a run leaves the tree that is killed between two files."""

        def die(disk: Any, name: str, path: str) -> None:
            if name == "rename" and path.endswith("engine.py"):
                trees.kill_self()

        with pytest.raises(trees.Killed):
            trees.forked(lambda: bool(trees.change(self.toy, "revert", disk_type=trees.hooked(before=die))))
        assert (self.toy.tree / journal.NAME).exists()


@pytest.fixture
def node() -> Iterator[Node]:
    with trees.open_place() as place:
        yield Node(place)


# systemd.

BOOT = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /run
umount -l /sys/fs/cgroup 2>/dev/null || true
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /run/systemd/system
cp "$1" /run/systemd/system/engine.service
export container=test
exec /lib/systemd/systemd --system --unit=engine.service --show-status=0 --log-target=null
"""


def boot(node: Node, place: Path) -> tuple[str, dict[str, Any] | None]:
    """Let a systemd run the example's unit to its end; returns its result, and what the engine told, if it started."""
    need_namespaces("systemctl")
    if not Path("/lib/systemd/systemd").exists() or "cgroup2" not in Path("/proc/filesystems").read_text():
        pytest.skip("this machine has no systemd, or a kernel without cgroup2")
    place.mkdir()
    told, result, unit = place / "told", place / "result", place / "engine.service"
    unit.write_text(
        "[Unit]\nDefaultDependencies=no\n"
        + node.words(block("ini"))
        + f"Restart=no\nEnvironment=TOLD={told}\n"
        + f"ExecStopPost=/bin/sh -c 'echo $SERVICE_RESULT $EXIT_CODE $EXIT_STATUS >{result}'\n"
        + "ExecStopPost=systemctl --no-block exit\n"
    )
    command = ["unshare", "--fork", "--pid", "--mount", "--uts", "--ipc", "--cgroup", "--kill-child"]
    subprocess.run([*command, "sh", "-c", BOOT, "sh", str(unit)], capture_output=True, check=False, timeout=110)
    assert result.exists(), "the unit did not come to its end"
    return result.read_text().strip(), json.loads(told.read_text()) if told.exists() else None


def test_a_unit_starts_the_engine_from_a_whole_tree_and_from_no_other(node: Node, tmp_path: Path) -> None:
    result, told = boot(node, tmp_path / "whole")
    assert result == "success exited 0"
    assert told is not None
    # The unit's own process: nothing stands between systemd and the engine.
    assert (told["parent"], told["words"]) == (1, ["--port", "30000"])
    node.interrupt()
    assert boot(node, tmp_path / "interrupted") == ("exit-code exited 4", None)
    assert nodes.call(node.file, "recover", "--back", "--root", node.environment).code == 0
    assert boot(node, tmp_path / "recovered")[0] == "success exited 0"


# Containers.

CONTAINER = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -o remount,bind,ro /
mount -o remount,bind,ro /dev/shm
cd /
exec setpriv --reuid "$0" --regid "$0" --clear-groups --no-new-privs "$@"
"""


def contained(words: list[str], user: int) -> subprocess.Popen[str]:
    need_namespaces("setpriv")
    command = ["unshare", "--fork", "--pid", "--mount", "--kill-child", "sh", "-c", CONTAINER, str(user), *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def dockerfile(node: Node) -> tuple[list[str], int]:
    """What a runtime makes of an image's entry point and command."""
    lines = dict(line.split(" ", 1) for line in node.words(block("dockerfile")).splitlines())
    return [*json.loads(lines["ENTRYPOINT"]), *json.loads(lines["CMD"])], trees.NOBODY


def pod(node: Node) -> tuple[list[str], int]:
    """What a kubelet makes of a container's command, arguments and variables."""
    (container,) = yaml.safe_load(node.words(block("yaml")))["containers"]
    variables = {item["name"]: item["value"] for item in container["env"]}
    words = [*container["command"], *container["args"]]
    security = container["securityContext"]
    assert security["readOnlyRootFilesystem"] and security["runAsNonRoot"]
    return [re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], word) for word in words], security["runAsUser"]


@pytest.mark.parametrize("example", [dockerfile, pod])
def test_a_container_starts_the_engine_from_a_whole_tree_and_from_no_other(example: Any, node: Node) -> None:
    words, user = example(node)
    with contained(words, user) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert (told["pid"], told["uid"], told["words"]) == (1, user, ["--port", "30000"])
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        assert process.stdout.read() == "bye\n"
        assert process.wait() == 7
    node.interrupt()
    began = time.monotonic()
    with contained(words, user) as process:
        said, why = process.communicate()
    assert (process.returncode, said) == (4, "")
    assert "[recovery-needed]" in why
    assert time.monotonic() - began < 60, "it did not wait for the engine"


def test_an_init_container_makes_the_overlay_that_the_engine_is_started_from(node: Node, tmp_path: Path) -> None:
    (container,) = yaml.safe_load(node.words(block("yaml", 1)))["initContainers"]
    volume = tmp_path / "volume"
    volume.mkdir()
    assert trees.revert(node.toy).code == 0
    before = trees.snapshot(node.toy.tree)
    words = [word.replace("/patched", str(volume)) for word in container["command"]]
    assert subprocess.run(words, capture_output=True, check=False).returncode == 0
    start = [*words[:2], "exec", "prefill", "--expect", "applied", "--overlay", str(volume), "--"]
    command = [str(nodes.for_everybody()), "-m", "sglang.launch_server"]
    env = {**os.environ, "TOLD": str(tmp_path / "told")}
    assert subprocess.run([*start, *command], cwd="/", env=env, capture_output=True, check=False).returncode == 0
    assert json.loads((tmp_path / "told").read_text())["words"] == []
    assert trees.snapshot(node.toy.tree) == before
