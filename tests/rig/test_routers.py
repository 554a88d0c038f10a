"""Routers of a boot: which build each is, and refusers in front of its prefill engines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.rig import boot, client, engine, runner, scenario
from lab.rig.errors import RigError
from lab.router import build
from lab.router.build import BuildError
from tests.rig.test_scenarios import BOOT as PLAIN

BOOT = PLAIN.replace('prefill = ["P"]', 'prefill = ["P-refuses"]').replace('of = "P"', 'of = "P"\nseconds = 0.5')
SCENARIO = 'about = "x"\nboot = "b"\nhold = ["told(one) == 1"]\n[[step]]\nsend = "one"\nto = ["R"]\n'


def test_a_router_names_its_build_and_a_refuser_among_its_prefill_engines() -> None:
    which = boot.parse("b", BOOT)
    (router,), (refuser,) = which.routers, which.refusers
    assert (router.build, router.prefill) == ("patched", ("P-refuses",))
    assert (refuser.of, refuser.status, refuser.seconds) == ("P", 500, 0.5)
    assert boot.parse("b", BOOT.replace('build = "patched"', "")).routers[0].build == ""


def test_the_engine_behind_a_refuser_is_needed_too() -> None:
    assert runner.needed(boot.parse("b", BOOT), [scenario.parse("s", SCENARIO)]) == {"P", "P-refuses", "D", "R"}


def test_a_send_may_be_read_as_a_stream_and_may_be_meant_to_fail_and_again_keeps_both() -> None:
    text = SCENARIO + 'stream = true\nfails = true\n[[step]]\nsend = "two"\nagain = "one"\n'
    for step in scenario.parse("s", text).steps:
        assert isinstance(step, scenario.Send) and step.stream and step.fails
    (step,) = scenario.parse("s", SCENARIO).steps
    assert isinstance(step, scenario.Send) and not step.stream and not step.fails


@pytest.mark.parametrize("fails", [True, False])
def test_nobody_waits_for_a_crash_after_requests_that_are_meant_to_fail(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    waits: list[float] = []
    fake = SimpleNamespace(mark=lambda: None, check=lambda wait: waits.append(wait), events=lambda name: [])
    running = runner.Running(boot.parse("b", BOOT), fake, {}, {"R": 1})  # type: ignore[arg-type]
    monkeypatch.setattr(client, "send_all", lambda *args: [client.Answer(error="status 500")])
    runner.do_send(running, scenario.Send("one", ("R",), fails=fails))
    assert waits == [0.0 if fails else 5.0]


@pytest.mark.parametrize("stream", [True, False])
def test_a_send_is_read_as_a_stream_only_when_it_says_so(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    heard: list[object] = []
    fake = SimpleNamespace(mark=lambda: None, check=lambda wait: None, events=lambda name: [])
    running = runner.Running(boot.parse("b", BOOT), fake, {}, {"R": 1})  # type: ignore[arg-type]

    def send_all(*args: object) -> list[client.Answer]:
        heard.append(args[4])
        return [client.Answer()]

    monkeypatch.setattr(client, "send_all", send_all)
    runner.do_send(running, scenario.Send("one", ("R",), stream=stream))
    assert (heard[0] is not None) == stream


def test_a_build_of_this_repository_is_taken_from_its_builder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = SimpleNamespace(build=lambda variant: SimpleNamespace(folder=tmp_path / variant))
    monkeypatch.setattr(build, "Builder", lambda: built)
    assert engine.router_package("patched", tmp_path, tmp_path) == tmp_path / "patched"
    assert engine.router_package("stock", tmp_path, tmp_path) == tmp_path / "stock"


def test_a_build_that_fails_is_told_as_the_rig_tells_things(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail() -> None:
        raise BuildError("no cargo here")

    monkeypatch.setattr(build, "Builder", fail)
    with pytest.raises(RigError, match="no cargo here") as refusal:
        engine.router_package("patched", tmp_path, tmp_path)
    assert refusal.value.kind == "router"
