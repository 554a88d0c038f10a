"""The fleet: the Ansible collection on six roots, one of them through a real sshd on the loopback address."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import toy as toys
from tests import trees
from tests.extras.conftest import program
from tests.toy import Toy

pytestmark = pytest.mark.extras

COLLECTIONS = trees.REPOSITORY / "deploy/ansible"
HOSTS = ("canary", "one", "two", "three", "four", "far")
PLAYBOOKS = "patchbundle.fleet"
# A host's tools, with the toy's bundle in place of their own.
HEAD = """
import os, signal, sys
sys.path.insert(0, {tools!r})
sys.argv[2:2] = ["--bundle", {bundle!r}]
from patchbundle import cli, disk
"""
PLAIN = ""
# Killed in the middle of an apply, after some files have their new names and others do not.
KILLED = """
plain, count = disk.Disk.rename, 0
def rename(self, old, new):
    global count
    count += new.startswith("sglang/")
    if count == 4 and sys.argv[1] == "apply" and "--dry-run" not in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    plain(self, old, new)
disk.Disk.rename = rename
"""
# Of a user who may write nowhere.
READ_ONLY = """
plain = os.access
os.access = lambda path, mode, **more: not mode & os.W_OK and plain(path, mode, **more)
"""


@dataclass
class Run:
    """What a playbook said: its exit code, what became of each host, and the recap's counts."""

    code: int
    out: str
    ends: dict[str, str] = field(default_factory=dict)
    recap: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass
class Fleet:
    """Hosts, each with a tree of its own; ``variables`` go into the inventory."""

    folder: Path
    toy: Toy
    variables: dict[str, dict[str, Any]]

    def root(self, host: str) -> Path:
        return self.folder / "trees" / host

    def play(self, name: str, *words: str, **more: Any) -> Run:
        inventory = self.folder / "hosts.json"
        inventory.write_text(json.dumps({"all": {"hosts": self.variables, "vars": {"patchbundle_health_delay": 0}}}))
        environment = {
            **self.toy.environment,
            "ANSIBLE_COLLECTIONS_PATH": str(COLLECTIONS),
            "ANSIBLE_HOME": str(self.folder / "home"),
            "ANSIBLE_LOCAL_TEMP": str(self.folder / "home/tmp"),
            "ANSIBLE_NOCOLOR": "1",
            # Fewer files and calls for each task: half of the time was theirs.
            "ANSIBLE_PIPELINING": "1",
            "LC_ALL": "C.UTF-8",
            "HOME": str(self.folder / "home"),
        }
        command = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(inventory), f"{PLAYBOOKS}.{name}"]
        command += ["-f", "6", "-e", json.dumps(more), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=self.folder, timeout=900)
        run = Run(done.returncode, done.stdout + done.stderr)
        for host, end in re.findall(r'"msg": "end: (\w+): ([^"]+)"', run.out):
            run.ends[host] = end
        for host, counts in re.findall(r"^(\w+)\s+: (ok=.*)$", run.out, re.MULTILINE):
            run.recap[host] = {key: int(number) for key, number in re.findall(r"(\w+)=(\d+)", counts)}
        return run

    def levels(self) -> dict[str, str]:
        """What the hashes of each tree say: the top patch, or another word."""
        found = {}
        for host in self.variables:
            table = trees.run(self.toy, "status", "--root", self.root(host), "--json").table
            status = table["result"].get("status")
            found[host] = table["error"]["reason"] if status is None else status["name"]
        return found

    def tool(self, host: str, text: str) -> None:
        """Give a host a tool of its own."""
        place = self.folder / f"{host}.py"
        text = (
            HEAD.format(tools=str(trees.REPOSITORY / "tools"), bundle=str(self.toy.bundle))
            + text
            + "cli.main_apply()\n"
        )
        place.write_text(text)
        self.variables[host]["patchbundle_tool"] = str(place)


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A real sshd on the loopback address, for this user and a key made for the test; how to reach it."""
    folder = tmp_path_factory.mktemp("sshd")
    for name in ("host", "user"):
        subprocess.run([program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    settings = {
        "Port": port, "ListenAddress": "127.0.0.1", "HostKey": folder / "host", "PidFile": folder / "pid",
        "AuthorizedKeysFile": folder / "user.pub", "StrictModes": "no", "UsePAM": "no", "PasswordAuthentication": "no",
        "PermitRootLogin": "prohibit-password", "Subsystem": "sftp internal-sftp",
    }  # fmt: skip
    (folder / "config").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    process = subprocess.Popen([program("sshd"), "-D", "-e", "-f", folder / "config"], stderr=subprocess.DEVNULL)
    options = f"-o UserKnownHostsFile={folder / 'known'} -o StrictHostKeyChecking=no -o ControlMaster=no"
    try:
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield {
            "ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": port,
            "ansible_ssh_private_key_file": str(folder / "user"), "ansible_ssh_common_args": options,
        }  # fmt: skip
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def fleet(tmp_path: Path, sshd: dict[str, Any]) -> Fleet:
    toy = toys.make(tmp_path / "toy")
    made = Fleet(tmp_path, toy, {})
    for host in HOSTS:
        shutil.copytree(toy.tree, made.root(host))
        made.variables[host] = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "patchbundle_root": str(made.root(host)),
            **(sshd if host == "far" else {}),
        }
        made.tool(host, PLAIN)
    return made


def test_a_fleet_goes_up_and_down_in_batches_and_a_second_time_changes_nothing(fleet: Fleet) -> None:
    tried = fleet.play("apply", "--check", patchbundle_check_first=False, patchbundle_serial="100%")
    assert tried.code == 0
    assert {host: counts["changed"] for host, counts in tried.recap.items()} == dict.fromkeys(HOSTS, 1)
    assert set(fleet.levels().values()) == {"base"}
    up = fleet.play("apply", patchbundle_serial=[1, "50%"])
    assert up.code == 0, up.out
    assert set(fleet.levels().values()) == {"gamma-third"}
    assert {host: counts["changed"] for host, counts in up.recap.items()} == dict.fromkeys(HOSTS, 1)
    digest = trees.check(fleet.toy, "--json").table["result"]["bundle"]["digest"][:12]
    assert up.ends == dict.fromkeys(HOSTS, f"changed; patched at gamma-third, bundle {digest}")
    # The canary alone, then half of the hosts, then the rest.
    order = re.findall(r"^changed: \[(\w+)\]", up.out, re.MULTILINE)
    assert order[0] == "canary" and len(re.findall(r"^PLAY \[Change", up.out, re.MULTILINE)) == 3
    again = fleet.play("apply", patchbundle_serial="100%")
    assert again.code == 0
    assert not any(counts["changed"] for counts in again.recap.values())
    down = fleet.play("revert", patchbundle_level="alpha-first", patchbundle_serial="100%")
    assert (down.code, set(fleet.levels().values())) == (0, {"alpha-first"})
    looked = fleet.play("check")
    assert looked.code == 0
    assert looked.ends["far"] == f"looked at; patched at alpha-first, bundle {digest}"


def test_one_drifted_one_read_only_and_nothing_is_changed_where_the_check_comes_first(fleet: Fleet) -> None:
    (fleet.root("two") / "sglang/srt/engine.py").write_bytes(b"drifted\n")
    fleet.tool("four", READ_ONLY)
    run = fleet.play("apply")
    assert run.code != 0
    assert set(fleet.levels().values()) == {"base", "drifted"}
    assert run.ends["two"].startswith("not fit: drift; drifted at no level")
    assert run.ends["four"].startswith("not fit: not-writable; base at base")
    assert {end.split(";")[0] for host, end in run.ends.items() if host not in ("two", "four")} == {"not touched"}


def test_one_drifted_one_read_only_one_killed_half_way_and_no_tree_is_mixed(fleet: Fleet) -> None:
    """The canary is changed; the next batch has all three in it, and goes back."""
    (fleet.root("two") / "sglang/srt/engine.py").write_bytes(b"drifted\n")
    fleet.tool("three", READ_ONLY)
    fleet.tool("far", KILLED)
    order = {host: fleet.variables[host] for host in ("canary", "one", "two", "three", "far", "four")}
    fleet.variables = order
    before = {host: trees.snapshot(fleet.root(host), times=False) for host in HOSTS}
    run = fleet.play("apply", "-vv", patchbundle_check_first=False, patchbundle_serial=[1, 4])
    assert run.code != 0
    ends = {host: end.split(", bundle")[0] for host, end in run.ends.items()}
    assert ends == {
        "canary": "changed; patched at gamma-third",
        "one": "rolled back; base at base",
        "two": "refused: drift; left as it was; drifted at no level",
        "three": "refused: not-writable; left as it was; base at base",
        "far": "refused: no-answer; rolled back; base at base",
        "four": "not touched; base at base",
    }, run.out
    for host in HOSTS[1:]:
        assert trees.snapshot(fleet.root(host), times=False) == before[host]
    assert fleet.levels()["canary"] == "gamma-third"


def test_a_canary_that_is_not_well_goes_back_and_nobody_else_is_changed(fleet: Fleet) -> None:
    marks = fleet.folder / "marks"
    after = ["sh", "-c", f"echo {{{{ inventory_hostname }}}} >> {marks}"]
    run = fleet.play("apply", patchbundle_health=["false"], patchbundle_health_retries=1, patchbundle_after=after)
    assert run.code != 0
    assert set(fleet.levels().values()) == {"base"}
    assert run.ends["canary"].startswith("not well; rolled back; base at base")
    assert {end.split(";")[0] for host, end in run.ends.items() if host != "canary"} == {"not touched"}
    # Once after the change, once after the way back.
    assert marks.read_text().split() == ["canary", "canary"]


def test_a_host_that_cannot_be_reached_stops_the_rest_and_is_named(fleet: Fleet) -> None:
    fleet.variables["one"] |= {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    run = fleet.play("apply", patchbundle_check_first=False, patchbundle_serial=[1, 2])
    assert run.code != 0
    assert fleet.levels() == {host: "gamma-third" if host == "canary" else "base" for host in HOSTS}
    assert run.ends["one"].startswith("unreachable")
    assert run.ends["two"].startswith("rolled back; base at base")


def test_a_bundle_that_is_not_signed_is_refused_before_any_host_is_changed(
    fleet: Fleet, keys: tuple[Path, Path]
) -> None:
    run = fleet.play("apply", patchbundle_require_signature=str(keys[0]))
    assert run.code != 0
    assert set(fleet.levels().values()) == {"base"}
    assert {end.split(";")[0] for end in run.ends.values()} == {"not fit: signature"}
