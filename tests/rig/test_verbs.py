"""`up`, `status`, `logs`, `down` and `smoke` on small servers in the engines' and the router's place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lab.rig import client, deployment, engine, environment, leash, models, ports, trees
from lab.rig.cli import main
from lab.rig.engine import LISTENS, READY, Engine
from lab.rig.member import Spec
from lab.rig.tree import RELEASES, REPOSITORY, Tree


def run_cli(*words: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(main, [*words, "--json"])
    return result.exit_code, json.loads(result.stdout[result.stdout.index("{") :])


def gone(pid: int) -> bool:
    until = time.monotonic() + 10
    while leash.start_time(pid) is not None and time.monotonic() < until:
        time.sleep(0.02)
    return leash.start_time(pid) is None


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Gives members other names than their own: how the small server in their place behaves."""
    behaves: dict[str, str] = {}

    def member(name: str, port: int, role: str, ready: tuple[str, ...], after: tuple[str, ...] = ()) -> Spec:
        script = Path(__file__).with_name("fake_engine.py")
        argv = (sys.executable, str(script), str(port), behaves.get(name, name))
        return Spec(name, argv, {**os.environ, "PYTHONPATH": str(REPOSITORY)}, ready, role, port, after)

    def engine_spec(one: Engine, folder: Path) -> Spec:
        return member(one.name, one.port, one.mode, (READY, LISTENS))

    def router_spec(name: str, python: Path, port: int, metrics: int, prefill: Any, decode: Any, *rest: Any) -> Spec:
        return member(name, port, "router", (), tuple(one.name for one in (*prefill, *decode)))

    found = {(role, "stock"): Tree(role, tmp_path, release) for role, release in RELEASES.items()}
    monkeypatch.setenv("PATCHBUNDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(trees, "gather", lambda *_, **__: found)
    monkeypatch.setattr(environment, "ensure", lambda release, say: Path(sys.executable))
    monkeypatch.setattr(models, "ensure", lambda name, make: tmp_path)
    monkeypatch.setattr(deployment, "available_memory", lambda *_: 1 << 40)
    monkeypatch.setattr(engine, "engine_spec", engine_spec)
    monkeypatch.setattr(engine, "router_spec", router_spec)
    keepers: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def kept(*args: Any, **more: Any) -> subprocess.Popen[bytes]:
        # A keeper outlives the command, but not this process, which has to wait for it.
        keepers.append(start(*args, **more))
        return keepers[-1]

    monkeypatch.setattr("lab.rig.deployment.subprocess.Popen", kept)
    yield behaves.update
    for folder in deployment.runs_folder().glob("*"):
        deployment.end(folder)
    for keeper in keepers:
        keeper.wait(30)


def test_what_up_starts_goes_on_by_itself_until_down_ends_it(named: Callable[..., None]) -> None:
    (port,) = ports.free(1)
    code, told = run_cli("up", f"--port={port}")
    assert (code, told["error"]) == (0, None)
    members, run = told["result"]["members"], told["result"]["run"]
    assert {name: one["role"] for name, one in members.items()} == {"P": "prefill", "D": "decode", "R": "router"}
    assert members["R"]["port"] == port and len(client.get(port, "/workers")["workers"]) == 2

    code, told = run_cli("status")
    assert code == 0 and list(told["result"]) == [run]
    assert (told["result"][run]["phase"], told["result"][run]["tied"]) == ("ready", False)
    text = CliRunner().invoke(main, ["status", run]).stdout.splitlines()
    assert text[0] == f"{run}: ready"
    assert f"  R: router on 127.0.0.1:{port}, pid {members['R']['pid']}" in text

    code, told = run_cli("logs", "P", "-n", "1")
    assert (code, told["result"]["lines"]) == (0, [LISTENS])
    assert CliRunner().invoke(main, ["logs", "D"]).stdout.splitlines() == [READY, LISTENS]
    code, told = run_cli("logs", "Q")
    assert (code, told["error"]["error"]) == (1, "state") and "D, P, R" in told["error"]["message"]

    code, told = run_cli("down")
    assert (code, told["result"]) == (0, {"run": run, "ended": True})
    assert all(gone(one["pid"]) for one in members.values())
    assert run_cli("status")[0] == run_cli("down")[0] == 3


def test_of_two_that_run_down_wants_a_name_and_leaves_the_other_alone(named: Callable[..., None]) -> None:
    # A run's name holds its boot, second and process; the process is the same for both here.
    first, second = (run_cli("up", f"--boot={name}")[1]["result"] for name in ("pair", "glm-dsa"))
    code, told = run_cli("down")
    assert (code, told["error"]["error"]) == (1, "state")
    assert first["run"] in told["error"]["message"] and second["run"] in told["error"]["message"]
    assert run_cli("down", first["run"])[0] == 0
    assert all(gone(one["pid"]) for one in first["members"].values())
    assert client.get(second["members"]["R"]["port"], "/workers")
    assert list(run_cli("status")[1]["result"]) == [second["run"]]


@pytest.mark.parametrize("verb", ["up", "smoke"])
def test_an_engine_that_ends_at_its_start_is_told_with_its_words_and_nothing_stays(
    named: Callable[..., None], verb: str
) -> None:
    named({"D": "dying"})
    code, told = run_cli(verb)
    assert (code, told["error"]["error"]) == (1, "crash")
    assert any("no room in here" in line for line in told["error"]["tail"])
    assert run_cli("status")[0] == 3
    for folder in deployment.runs_folder().glob("*"):
        assert all(gone(one["pid"]) for one in deployment.read_state(folder)["members"].values())


@pytest.mark.parametrize(
    ("router", "code", "same", "chat"),
    [("R", 0, 2, "words"), ("forgetful", 1, 0, "words"), ("failing", 1, 0, "words"), ("silent", 1, 2, "")],
)
def test_smoke_holds_if_texts_are_the_same_cold_and_hot_and_chat_answers(
    named: Callable[..., None], router: str, code: int, same: int, chat: str
) -> None:
    named({"R": router})
    found, told = run_cli("smoke")
    result = told["result"]
    assert (found, result["same_texts"], result["chat"], told["error"]) == (code, same, chat, None)
    assert [len(result[when]) for when in ("cold", "hot")] == [2, 2]
    assert all(bool(answer["error"]) == (router == "failing") for answer in result["cold"])
    # It ends what it started.
    assert run_cli("status")[0] == 3
    (folder,) = deployment.runs_folder().glob("*")
    assert all(gone(one["pid"]) for one in deployment.read_state(folder)["members"].values())


def test_smoke_says_what_it_saw_in_words(named: Callable[..., None]) -> None:
    result = CliRunner().invoke(main, ["smoke"])
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split(" in ")[0] for line in lines[:4]] == 2 * ["request 0: 16 tokens", "request 1: 16 tokens"]
    assert lines[4] == "2 of 2 texts are the same cold and hot; chat answered 5 characters"
