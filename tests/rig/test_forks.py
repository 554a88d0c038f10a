"""The processes of an engine are forked after one import, and each still ends with its parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lab.rig import forks
from lab.rig.tree import REPOSITORY

ENGINE = "sglang.srt.entrypoints.engine"
CHOOSE = "import multiprocessing as mp\ndef choose(method):\n    mp.set_start_method(method, force=True)\n"
SCRIPT = """
import ctypes, json, multiprocessing, os, sys
from lab.rig.standins import hook
import lab.rig.forks
hook.install()
import sglang.srt.entrypoints.engine as engine

def child(queue):
    signal = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(signal))
    queue.put((os.getppid(), engine.__dict__.get("mark", ""), signal.value))

engine.choose(sys.argv[1])
engine.mark = "after the import"
if multiprocessing.get_start_method() == "fork":
    queue = multiprocessing.SimpleQueue()
    one = multiprocessing.Process(target=child, args=(queue,))
    one.start()
    found = queue.get()
    one.join()
else:
    found = None
print(json.dumps([os.getpid(), multiprocessing.get_start_method(), found, sorted(sys.modules)]))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in (ENGINE, *forks.LATER):
        path = tmp_path / (name.replace(".", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(CHOOSE if name == ENGINE else "")
    return tmp_path


def run(tree: Path, method: str, leash: str = "1") -> tuple[int, str, list[object] | None, list[str]]:
    env = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{REPOSITORY}", "PATCHBUNDLE_RIG_LEASH": leash}
    argv = [sys.executable, "-c", SCRIPT, method]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=True)
    parent, chosen, found, modules = json.loads(done.stdout)
    return parent, chosen, found, modules


def test_a_process_that_is_to_be_spawned_is_forked_and_ends_with_its_new_parent(tree: Path) -> None:
    parent, chosen, found, _ = run(tree, "spawn")
    assert chosen == "fork" and found == [parent, "after the import", 9]


def test_a_process_without_a_leash_gets_none_by_a_fork(tree: Path) -> None:
    _, _, found, _ = run(tree, "spawn", leash="0")
    assert found is not None and found[2] == 0


def test_another_way_of_starting_processes_stays_as_it_was_chosen(tree: Path) -> None:
    assert run(tree, "forkserver")[1:3] == ("forkserver", None)


def test_what_every_rank_would_import_is_imported_before_the_fork(tree: Path) -> None:
    assert set(forks.LATER) <= set(run(tree, "spawn")[3])


@pytest.mark.parametrize(("flag", "folder"), [("--enable-metrics", True), ("--disable-metrics", False)])
def test_what_keeps_metrics_finds_their_folder_when_it_is_imported(tree: Path, flag: str, folder: bool) -> None:
    """Without it an engine's page of metrics is empty."""
    (tree / (forks.LATER[1].replace(".", "/") + ".py")).write_text(
        f"import os\nfound = os.environ.get({forks.FOLDER!r})\n"
    )
    script = SCRIPT.replace("choose(sys.argv[1])", "choose('spawn')").replace(
        "sorted(sys.modules)", f"sys.modules[{forks.LATER[1]!r}].found"
    )
    env = {name: value for name, value in os.environ.items() if name != forks.FOLDER}
    env |= {"PYTHONPATH": f"{tree}{os.pathsep}{REPOSITORY}", "TMPDIR": str(tree)}
    done = subprocess.run(
        [sys.executable, "-c", script, flag], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    found = json.loads(done.stdout)[3]
    assert (found is not None and Path(found).is_dir()) if folder else found is None


class Socket:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def poll(self, milliseconds: int) -> None:
        self.calls.append(f"poll {milliseconds}")


@pytest.mark.parametrize(("flags", "calls"), [(1, ["poll 100", "receive 1"]), (0, ["receive 0"])])
def test_a_controller_that_would_turn_in_a_loop_waits_for_a_message(flags: int, calls: list[str]) -> None:
    def receive(socket: Socket, flags: int = 0) -> str:
        socket.calls.append(f"receive {flags}")
        return "message"

    module, socket = ModuleType("controller"), Socket()
    vars(module)["sock_recv"] = receive
    forks._sleep(module)
    assert module.sock_recv(socket, flags=flags) == "message" and socket.calls == calls


@pytest.mark.parametrize(("idle", "rests"), [(False, [0.002]), (True, [])])
def test_a_scheduler_that_waits_for_a_transfer_rests_between_two_looks(
    idle: bool, rests: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scheduler:
        looked = 0

        def on_idle(self) -> None:
            self.looked += 1

        def is_fully_idle(self) -> bool:
            return idle

    module, slept = ModuleType("scheduler"), list[float]()
    vars(module)["Scheduler"] = Scheduler
    monkeypatch.setattr("time.sleep", slept.append)
    forks._rest(module)
    one = Scheduler()
    one.on_idle()
    assert one.looked == 1 and slept == rests
