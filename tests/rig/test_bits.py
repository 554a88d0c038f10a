"""What is compared bit for bit: which engines, which sends, and what counts as the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from lab.rig import bits, boot, faults, lists, runner, scenario
from lab.rig.client import Answer
from lab.rig.errors import RigError
from lab.rig.lists import Entry
from lab.rig.measure import Result
from lab.rig.scenario import Send
from lab.rig.tree import REPOSITORY

BOOT = """
about = "x"
model = "mla"
[engine.P]
role = "prefill"
[engine.P-wide]
like = "P"
tree = "patched"
gates = { G = "1" }
gated = true
[engine.D]
role = "decode"
[engine.D-cured]
like = "D"
tree = "patched"
gates = { G = "1" }
env = { PATCHBUNDLE_RIG_FAULT = "x", PATCHBUNDLE_RIG_TRANSFER_FAIL = "2" }
[engine.D-small]
like = "D"
tokens = 128
[router.R]
prefill = ["P"]
decode = ["D"]
build = "stock"
[router.S]
prefill = ["P"]
decode = ["D-cured"]
build = "patched"
env = { SMG_PD_STRICT_ACK = "1" }
"""
HEAD = 'about = "x"\nboot = "b"\nhold = ["done(one) == 3"]\n'


def step(name: str, more: str = "", to: str = '"P", "D"') -> str:
    return f'[[step]]\nsend = "{name}"\nto = [{to}]\n{more}\n'


def entry(steps: str, text: str = BOOT) -> Entry:
    return Entry(boot.parse("b", text), (scenario.parse("s", HEAD + steps),))


def sends(one: Entry) -> list[tuple[str, tuple[str, ...]]]:
    return [(step.name, step.to) for s in one.scenarios for step in s.steps if isinstance(step, Send)]


@pytest.mark.parametrize("more", ['kill = "D"', "leave = 2", "fails = true"])
def test_what_is_not_the_same_in_every_run_is_not_compared(more: str) -> None:
    both = step("one") + step("two", more)
    for made in (bits.without_gates([entry(both)]), bits.as_they_are([entry(both)])):
        assert [sends(one) for one in made] == [[("one", ("P", "D"))]]


@pytest.mark.parametrize(("count", "kept"), [(5, 5), (200, 8)])
def test_requests_that_come_together_go_one_by_one_without_gates_and_not_at_all_twice(count: int, kept: int) -> None:
    both = step("one") + step("two", f"seed = 2\ncount = {count}\ntogether = true")
    (made,) = bits.without_gates([entry(both)])
    assert sends(made) == [("one", ("P", "D")), ("two", ("P", "D"))]
    two = made.scenarios[0].steps[1]
    assert isinstance(two, Send) and (two.together, two.count) == (False, kept)
    assert [sends(one) for one in bits.as_they_are([entry(both)])] == [[("one", ("P", "D"))]]


def test_turns_and_drains_are_left_out() -> None:
    more = '[[step]]\nturn = "apply"\n[[step]]\ndrain = "end"\nengines = ["P"]\n'
    (made,) = bits.without_gates([entry(step("one") + more)])
    assert sends(made) == [("one", ("P", "D"))]


def test_of_engines_that_differ_by_gates_and_faults_alone_the_first_stands_for_all() -> None:
    (made,) = bits.without_gates([entry(step("one") + step("two", "seed = 2", '"P", "D-cured"'))])
    assert sends(made) == [("one", ("P", "D")), ("two", ("P", "D"))]
    assert [part.name for part in made.boot.parts] == ["P", "D", "D-small"]
    assert not any(part.gates or part.env for part in made.boot.parts)


def test_what_was_sent_to_its_double_before_is_not_sent_again_but_a_repeat_on_one_engine_is() -> None:
    again = '[[step]]\nsend = "two"\nagain = "one"\nto = ["P", "D-cured"]\n[[step]]\nsend = "hot"\nagain = "one"\n'
    (made,) = bits.without_gates([entry(step("one") + again)])
    assert sends(made) == [("one", ("P", "D")), ("hot", ("P", "D"))]


def test_an_engine_that_only_a_gate_makes_possible_is_left_out_with_what_is_sent_to_it() -> None:
    (made,) = bits.without_gates([entry(step("one") + step("wide", to='"P-wide", "D"'))])
    assert sends(made) == [("one", ("P", "D"))]
    assert bits.without_gates([entry(step("one", to='"P-wide", "D"'))]) == []


def test_routers_lose_their_gates_and_are_one_when_nothing_else_tells_them_apart() -> None:
    (made,) = bits.without_gates([entry(step("one", to='"R"') + step("two", "seed = 2", '"S"'))])
    assert sends(made) == [("one", ("R",)), ("two", ("R",))]
    assert [(one.name, one.build, one.env) for one in made.boot.routers] == [("R", "stock", {})]
    assert bits.patched(made.boot).routers[0].build == "patched"


def test_a_stock_router_is_never_told_of_ranks() -> None:
    text = BOOT.replace('build = "patched"', 'build = "patched"\nflags = ["--dp-aware", "--policy=cache_aware"]')
    (made,) = bits.without_gates([entry(step("one", to='"S"'), text)])
    assert all("--dp-aware" not in router.flags for router in made.boot.routers)
    with pytest.raises(RigError, match="needs build = 'patched'"):
        boot.parse("b", text.replace('build = "patched"', 'build = "stock"'))


def test_a_published_router_stays_the_published_one() -> None:
    (made,) = bits.without_gates([entry(step("one", to='"R"'), BOOT.replace('build = "stock"\n', ""))])
    assert (made.boot.routers[0].build, bits.patched(made.boot).routers[0].build) == ("", "")


def test_all_engines_are_stock_and_then_patched() -> None:
    (made,) = bits.without_gates([entry(step("one"))])
    assert {part.tree for part in made.boot.parts} == {"stock"}
    assert {part.tree for part in bits.patched(made.boot).parts} == {"patched"}
    assert (bits.patched(made.boot).name, bits.again(made.boot).name) == ("b-patched", "b-again")
    assert bits.again(made.boot).parts == made.boot.parts


def test_a_boot_that_another_holds_whole_runs_there_under_its_names() -> None:
    small = BOOT.split("[engine.P-wide]")[0].replace("engine.P", "engine.Q") + '[engine.E]\nrole = "decode"\n'
    guest = Entry(boot.parse("c", small), (scenario.parse("t", HEAD + step("one", to='"Q", "E"')),))
    (made,) = bits.without_gates([guest, entry(step("one") + step("two", to='"P", "D-small"'))])
    assert made.boot.name == "b"
    assert [one.name for one in made.scenarios] == ["s", "t"]
    assert sends(made)[-1] == ("one", ("P", "D"))


@pytest.mark.parametrize("other", ['model = "glm-dsa"', 'model = "mla"\n[engine.X]\nrole = "prefill"\ntokens = 64'])
def test_a_boot_with_another_engine_has_a_start_of_its_own(other: str) -> None:
    text = BOOT.replace('model = "mla"', other)
    to = '"X", "D"' if "engine.X" in other else '"P", "D"'
    guest = Entry(boot.parse("c", text), (scenario.parse("t", HEAD + step("one", to=to)),))
    assert len(bits.without_gates([entry(step("one")), guest])) == 2


def test_every_shipped_scenario_that_can_be_the_same_twice_is_compared_without_its_gates() -> None:
    compared = {one.name for made in bits.without_gates(lists.full()) for one in made.scenarios}
    # Killed in the middle of a stream; and without their gates nothing is left of the others.
    left = {"router-lost", "recovery", "misfit-cp", "left-out", "left-out-prefill"}
    assert set(scenario.names()) - compared == left
    for made in bits.without_gates(lists.full()):
        assert not any(faults.VARIABLE in part.env for part in made.boot.parts)


def test_the_page_tells_of_every_boot_that_is_compared_without_its_gates_what_was_run() -> None:
    page = (REPOSITORY / "docs" / "rig.md").read_text(encoding="utf-8")
    section = page.partition("### Bit for bit, measured")[2].partition("\n## ")[0]
    told = re.findall(r"^\| `([\w-]+)` \| (.+) \| (\d+) \| (\d+) \| (\d+ of \d+|not run) \|$", section, re.MULTILINE)
    made = {one.boot.name: one for one in bits.without_gates(lists.full())}
    assert sorted(name for name, *_ in told) == sorted(made)
    run = [0, 0]
    for name, names, count, requests, result in told:
        steps = [step for one in made[name].scenarios for step in one.steps if isinstance(step, Send)]
        assert sorted(re.findall(r"`([\w-]+)`", names)) == sorted(one.name for one in made[name].scenarios)
        assert (int(count), int(requests)) == (len(steps), sum(step.count for step in steps)), name
        assert result in (f"{count} of {count}", "not run")
        run = [run[0] + int(count), run[1] + int(requests)] if result != "not run" else run
    assert f"All {run[0]} sends with {run[1]} requests that were run" in section
    compared = {one.name for entry in made.values() for one in entry.scenarios}
    assert all(f"`{name}`" in section for name in set(scenario.names()) - compared)


def test_a_shipped_engine_that_stock_cannot_be_is_marked_so() -> None:
    dsa_under_dcp = [
        part
        for path in boot.FOLDER.glob("*.toml")
        for part in boot.load(path.stem).parts
        if part.model.startswith("glm-dsa") and any(flag.startswith("--dcp-size") for flag in part.flags)
    ]
    assert dsa_under_dcp and all(part.gated for part in dsa_under_dcp)


def test_an_engine_that_stock_is_not_twice_is_left_out() -> None:
    text = BOOT + '[engine.D-two]\nlike = "D"\ntp = 2\nflags = ["--dp-size=2", "--enable-dp-attention"]\n'
    steps = step("one") + step("two", to='"P", "D-two"')
    (made,) = bits.without_gates([entry(steps, text)])
    assert "D-two" not in {part.name for part in made.boot.parts}
    assert sends(made) == [("one", ("P", "D"))]
    (kept,) = bits.without_gates([entry(steps, text.replace(', "--enable-dp-attention"', ""))])
    assert sends(kept) == [("one", ("P", "D")), ("two", ("P", "D-two"))]


@pytest.mark.parametrize(("gate", "kept"), [("G", "4,14"), (bits.RETRACTS_UNDER_DCP, None)])
def test_a_retraction_that_only_a_gate_survives_is_not_forced_without_it(gate: str, kept: str | None) -> None:
    env = f'gates = {{ {gate} = "1" }}\nenv = {{ PATCHBUNDLE_RIG_RETRACT = "4,14" }}\nflags = ["--dcp-size=2"]\n'
    text = BOOT + f'[engine.D-forced]\nlike = "D"\ntree = "patched"\n{env}'
    (made,) = bits.without_gates([entry(step("one", to='"P", "D-forced"'), text)])
    (forced,) = [part for part in made.boot.parts if part.name == "D-forced"]
    assert forced.env.get(bits.RETRACT) == kept and forced.gates == {}


ANSWER = Answer(ids=(1, 2), logprobs=(-0.5, -0.25))


@pytest.mark.parametrize(
    ("second", "holds"),
    [
        (ANSWER, True),
        (Answer(ids=(1, 2), logprobs=(-0.5, -0.25000001)), False),
        (Answer(ids=(1, 3), logprobs=(-0.5, -0.25)), False),
        (Answer(ids=(1, 2), logprobs=(-0.5,)), False),
        (Answer(error="gone"), False),
    ],
)
def test_one_bit_is_a_difference(monkeypatch: pytest.MonkeyPatch, second: Answer, holds: bool) -> None:
    answers = iter([ANSWER, second])

    def run_boot(which: Any, scenarios: Any, *rest: Any, keep: dict[str, Mapping[str, Result]]) -> runner.Report:
        keep["s"] = {"one": Result((next(answers),))}
        return runner.Report(which.name)

    monkeypatch.setattr(runner, "run_boot", run_boot)
    made = entry(step("one"))
    first, other = bits.run_twice(made.boot, made.boot, made.scenarios, {})
    assert first.green and other.green == holds


def test_a_run_that_did_not_get_to_its_end_is_compared_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = runner.Report("b", [runner.Line("s", "the engines go on", None, False)])
    monkeypatch.setattr(runner, "run_boot", lambda *args, keep: lost)
    made = entry(step("one"))
    assert bits.run_twice(made.boot, made.boot, made.scenarios, {}) == [lost]
