"""The keeper: readiness by what is printed, a crash ends all, and nothing outlives its parent, also on kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lab.rig import deployment, leash
from lab.rig.deployment import Deployment
from lab.rig.errors import RigError
from lab.rig.member import FATAL, Spec, Watch
from lab.rig.tree import REPOSITORY

FOREVER = "import time\nprint('up', flush=True)\ntime.sleep(1000)"
# A member that starts a child of its own in another session, as an engine starts its schedulers.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
print("child", child.pid, flush=True)
print("up", flush=True)
time.sleep(1000)
"""


def spec(name: str, code: str, *, ready: tuple[str, ...] = ("up",), after: tuple[str, ...] = ()) -> Spec:
    return Spec(name, (sys.executable, "-c", code), dict(os.environ), ready, "decode", 1, after)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    made: list[Deployment] = []

    def build(*specs: Spec, tied: bool = True) -> Deployment:
        folder = tmp_path / f"run{len(made)}"
        folder.mkdir()
        made.append(Deployment(folder, specs, tied))
        return made[-1]

    yield build
    for one in made:
        try:
            one.down()
        except RigError:
            continue


def gone(pid: int, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if leash.start_time(pid) is None:
            return True
        time.sleep(0.02)
    return False


def child_of(one: Deployment, member: str) -> int:
    (line,) = [line for line in one.log(member).splitlines() if line.startswith("child ")]
    return int(line.split()[1])


def test_everything_is_ready_only_when_every_line_was_printed(run: Callable[..., Deployment]) -> None:
    one = run(spec("a", FOREVER), spec("b", "print('half', flush=True)\n" + FOREVER, ready=("half", "up")))
    state = one.up(20)
    assert state["phase"] == "ready"
    assert set(state["members"]) == {"a", "b"}
    assert all(member["ready_after_s"] is not None for member in state["members"].values())


def test_a_member_starts_only_after_those_it_waits_for(run: Callable[..., Deployment], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    first = f"import pathlib, time\ntime.sleep(0.5)\npathlib.Path({str(mark)!r}).touch()\n" + FOREVER
    second = f"import pathlib\nassert pathlib.Path({str(mark)!r}).exists()\n" + FOREVER
    assert run(spec("late", second, after=("early",)), spec("early", first)).up(20)["phase"] == "ready"


def test_a_member_that_ends_is_a_crash_with_its_last_lines(run: Callable[..., Deployment]) -> None:
    one = run(spec("good", FOREVER), spec("bad", "print('last words', flush=True)\nraise SystemExit(3)"))
    with pytest.raises(RigError) as caught:
        one.up(20)
    assert caught.value.kind == "crash"
    assert "bad: ended with exit status 3" in str(caught.value)
    assert "last words" in caught.value.tail


@pytest.mark.parametrize("marker", FATAL)
def test_a_fatal_line_ends_the_run_at_once_though_the_process_lingers(
    run: Callable[..., Deployment], marker: str
) -> None:
    one = run(
        spec("good", FOREVER), spec("bad", f"print('x {marker} y', flush=True)\n" + "import time\ntime.sleep(90)")
    )
    began = time.monotonic()
    with pytest.raises(RigError) as caught:
        one.up(60)
    assert caught.value.kind == "crash" and marker.strip() in str(caught.value)
    assert time.monotonic() - began < 30


def test_a_crash_after_readiness_is_seen_by_the_next_check(run: Callable[..., Deployment]) -> None:
    one = run(
        spec("a", FOREVER), spec("b", "import time\nprint('up', flush=True)\ntime.sleep(0.3)\nraise SystemExit(1)")
    )
    state = one.up(20)
    assert one.keeper is not None
    one.keeper.wait(20)
    with pytest.raises(RigError, match="b: ended with exit status 1"):
        one.check()
    assert gone(state["members"]["a"]["pid"])


def test_not_being_ready_in_time_is_a_crash_that_names_who_was_late(run: Callable[..., Deployment]) -> None:
    one = run(spec("quick", FOREVER), spec("slow", "import time\ntime.sleep(100)"))
    with pytest.raises(RigError, match="slow: not ready within 1 s"):
        one.up(1)


def test_down_ends_children_of_members_too(run: Callable[..., Deployment]) -> None:
    one = run(spec("a", PARENT))
    state = one.up(20)
    child = child_of(one, "a")
    one.down()
    assert gone(child) and gone(state["members"]["a"]["pid"])


def test_children_end_when_the_members_parent_is_killed_with_9(run: Callable[..., Deployment]) -> None:
    one = run(spec("a", PARENT))
    state = one.up(20)
    child = child_of(one, "a")
    os.kill(state["members"]["a"]["pid"], signal.SIGKILL)
    assert one.keeper is not None
    one.keeper.wait(20)
    assert gone(child)


def test_a_member_ends_when_the_keeper_is_killed_with_9(run: Callable[..., Deployment]) -> None:
    one = run(spec("a", FOREVER))
    state = one.up(20)
    os.kill(state["keeper"]["pid"], signal.SIGKILL)
    assert gone(state["members"]["a"]["pid"])


def test_everything_ends_when_whoever_started_it_is_killed_with_9(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    code = f"""
import json, os, sys, time
from pathlib import Path
from lab.rig.deployment import Deployment
from lab.rig.member import Spec
parent = {PARENT!r}
one = Deployment(Path({str(tmp_path / "run")!r}),
                 [Spec("a", (sys.executable, "-c", parent), dict(os.environ), ("up",), "decode", 1)])
print(json.dumps(one.up(20)), flush=True)
time.sleep(1000)
"""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        state = json.loads(process.stdout.readline())
        log = (tmp_path / "run" / "logs" / "a.log").read_text()
        process.kill()
    pids = [state["keeper"]["pid"], state["members"]["a"]["pid"], int(log.split()[1])]
    assert all(gone(pid) for pid in pids)


def test_a_detached_deployment_lives_on_and_down_by_folder_ends_it(run: Callable[..., Deployment]) -> None:
    one = run(spec("a", PARENT), tied=False)
    state = one.up(20)
    child = child_of(one, "a")
    assert one.keeper is not None
    assert deployment.read_state(one.folder)["phase"] == "ready"
    assert deployment.end(one.folder) is True
    one.keeper.wait(20)
    assert gone(child) and gone(state["members"]["a"]["pid"])
    assert deployment.read_state(one.folder)["phase"] == "stopped"
    assert deployment.end(one.folder) is False


def test_down_never_touches_a_process_that_got_the_id_later(run: Callable[..., Deployment], tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", FOREVER], stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None and stranger.stdout.readline()
        started = leash.start_time(stranger.pid)
        assert started is not None
        other = {"pid": stranger.pid, "start_time": started - 1}
        state = {"phase": "ready", "reason": "", "tail": [], "keeper": other, "members": {"a": other}}
        (tmp_path / "state.json").write_text(json.dumps(state))
        assert deployment.read_state(tmp_path)["phase"] == "lost"
        assert deployment.end(tmp_path) is False
        assert leash.start_time(stranger.pid) == started
        stranger.kill()


def test_members_whose_keeper_was_lost_are_ended_by_down(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", FOREVER], stdout=subprocess.PIPE) as orphan:
        assert orphan.stdout is not None and orphan.stdout.readline()
        member = {"pid": orphan.pid, "start_time": leash.start_time(orphan.pid)}
        keeper = {"pid": orphan.pid, "start_time": 1}
        state = {"phase": "ready", "reason": "", "tail": [], "keeper": keeper, "members": {"a": member}}
        (tmp_path / "state.json").write_text(json.dumps(state))
        assert deployment.end(tmp_path) is True
        assert orphan.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("content", ["", "{}", '{"keeper": 3, "phase": "ready"}', "not json"])
def test_a_folder_without_a_readable_state_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(RigError, match="no deployment"):
        deployment.end(tmp_path)


def test_a_kill_that_a_scenario_asked_for_is_no_crash(run: Callable[..., Deployment]) -> None:
    one = run(spec("a", FOREVER), spec("b", PARENT))
    state = one.up(20)
    child = child_of(one, "b")
    one.kill("b")
    assert gone(child) and gone(state["members"]["b"]["pid"])
    one.check()
    assert one.state()["phase"] == "ready"
    with pytest.raises(RigError, match="no member 'c'"):
        one.kill("c")


def test_a_name_that_could_leave_the_folder_is_refused() -> None:
    for name in ("../x", "", "a b", ".hidden", "a/b"):
        with pytest.raises(RigError, match="no name"):
            deployment.new_folder(name)


def test_a_watch_needs_all_its_lines_and_keeps_the_first_fatal_one() -> None:
    watch = Watch(("one", "two"))
    watch.line("xx one xx")
    assert not watch.is_ready
    watch.line("two")
    assert watch.is_ready == (watch.fatal == "")
    watch.line(f"first {FATAL[0]}")
    watch.line(f"second {FATAL[1]}")
    assert watch.fatal.startswith("first")


def test_a_spec_survives_its_file() -> None:
    one = spec("a", "code", after=("b",))
    assert Spec.from_json(json.loads(json.dumps(one.as_json()))) == one


def test_too_little_memory_is_refused_with_both_numbers(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9999999999 kB\nMemAvailable:    1000000 kB\n")
    with pytest.raises(RigError, match=r"need 1\.8 GB of memory, 1\.0 GB") as caught:
        deployment.need_memory(1, 2, meminfo, tmp_path)
    assert caught.value.kind == "memory"
    meminfo.write_text("nothing")
    with pytest.raises(RigError, match="does not tell"):
        deployment.need_memory(1, 1, meminfo, tmp_path)


def test_the_limit_of_a_control_group_counts_and_what_it_has_cached_does_not(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 9000000 kB\n")
    for limit, current, available in (("max", 7, 9_216_000_000), ("1000", 700, 550), ("99999999999", 1, 9_216_000_000)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{current}\n")
        (tmp_path / "memory.stat").write_text("anon 450\nactive_file 200\ninactive_file 50\n")
        assert deployment.available_memory(meminfo, tmp_path) == available
    (tmp_path / "memory.max").write_text("1000\n")
    with pytest.raises(RigError, match=r"need 1\.4 GB of memory, 0\.0 GB"):
        deployment.need_memory(1, 1, meminfo, tmp_path)
    (tmp_path / "memory.stat").unlink()
    deployment.need_memory(1, 1, meminfo, tmp_path)


def test_events_are_read_from_a_log_with_other_lines_in_it() -> None:
    text = "noise\n[x] rig: transfer kind=kv blocks=3 bytes=99\nrig: tree root=/a foreign=0\nrig transfer blocks=1\n"
    events = deployment.parse_events(text)
    assert [event.name for event in events] == ["transfer", "tree"]
    assert events[0].number("blocks") == 3 and events[0].values["kind"] == "kv"
