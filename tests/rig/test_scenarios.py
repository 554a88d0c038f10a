"""Scenario and boot files: what is refused, and that every shipped one is sound."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lab.rig import (
    boot,
    engine,
    faults,
    faults_retract,  # noqa: F401  registers its faults
    lists,
    runner,
    scenario,
    tree,
)
from lab.rig.boot import Part
from lab.rig.errors import RigError
from lab.rig.measure import MEASURES
from lab.rig.scenario import Drain, Refusal, Scenario, Send, Turn

BOOT = """
about = "x"
model = "mla"
[engine.P]
role = "prefill"
[engine.D]
role = "decode"
flags = ["--one"]
env = { A = "1" }
[engine.D-cured]
like = "D"
tree = "patched"
flags = ["--two"]
gates = { G = "1" }
[refuser.P-refuses]
of = "P"
[router.R]
prefill = ["P"]
decode = ["D"]
build = "patched"
"""
SCENARIO = """
about = "x"
boot = "b"
hold = ["done(one) == 3", "same_texts(one, two) >= 2.5"]
[[step]]
send = "one"
to = ["P", "D"]
new = 7
[[step]]
send = "two"
again = "one"
to = ["R"]
"""


def test_an_engine_like_another_takes_over_and_adds() -> None:
    part = boot.parse("b", BOOT).part("D-cured")
    assert part.role == "decode" and part.tree == "patched"
    assert part.flags == ("--one", "--two") and part.env == {"A": "1"} and part.gates == {"G": "1"}


def test_a_stock_engine_does_not_inherit_gates() -> None:
    text = BOOT.replace("[router.R]", '[engine.S]\nlike = "D-cured"\ntree = "stock"\n[router.R]')
    assert boot.parse("b", text).part("S").gates == {}


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('like = "D"', 'like = "nobody"', "names no engine above"),
        ('role = "prefill"', 'role = "judge"', "is unknown"),
        ('tree = "patched"\n', "", "gates without a patched tree"),
        ('tree = "patched"', 'tree = "other"', "is unknown"),
        ('flags = ["--one"]', 'flags = "--one"', "a list of strings"),
        ('env = { A = "1" }', "env = { A = 1 }", "a table of strings"),
        ('role = "prefill"', 'role = "prefill"\nrolle = "x"', "unknown keys"),
        ('about = "x"', 'abuot = "x"', "unknown keys"),
        ("[engine.P]", '[engine."a b"]', "is no name"),
        ('prefill = ["P"]', 'prefill = ["D"]', "no prefill engine"),
        ('decode = ["D"]', 'decode = ["X"]', "no decode engine"),
        ('decode = ["D"]', 'decode = ["P-refuses"]', "no decode engine"),
        ("[router.R]", "[router.P]", "no name for a router"),
        ("[router.R]", "[router.P-refuses]", "no name for a router"),
        ('build = "patched"', 'build = "released"', "stock or patched"),
        ('of = "P"', 'of = "D"', "of a prefill engine"),
        ('of = "P"', "", "of a prefill engine"),
        ("[refuser.P-refuses]", "[refuser.D]", "a new name"),
        ('model = "mla"', 'model = "big"', "no model 'big'"),
        ('about = "x"', "about = ", "boot b: "),
    ],
)
def test_a_boot_file_with_a_mistake_is_refused(old: str, new: str, told: str) -> None:
    assert old in BOOT
    with pytest.raises(RigError, match=told):
        boot.parse("b", BOOT.replace(old, new, 1))


def test_a_boot_without_engines_is_refused() -> None:
    with pytest.raises(RigError, match="no engine"):
        boot.parse("b", 'about = "x"\nmodel = "mla"')


@pytest.mark.parametrize("name", ["../boots/mla", "nothing", ""])
def test_an_unknown_file_is_refused_with_the_known_names(name: str) -> None:
    with pytest.raises(RigError, match="mla-dcp2"):
        boot.load(name)
    with pytest.raises(RigError, match="mla-router"):
        scenario.load(name)


def test_a_send_again_takes_over_everything_but_the_flush() -> None:
    text = SCENARIO.replace("new = 7", 'new = 7\nflush = ["P"]\ntogether = true')
    one, two = scenario.parse("s", text).steps
    assert isinstance(one, Send) and isinstance(two, Send)
    assert two.new == 7 and two.together and two.flush == () and two.to == ("R",)
    assert (two.seed, two.count, two.length) == (one.seed, one.count, one.length)


def test_a_drain_and_a_turn_are_steps() -> None:
    more = '[[step]]\nturn = "apply"\n[[step]]\ndrain = "end"\nengines = ["P", "D"]\nwithin = 10\n'
    one = scenario.parse("s", SCENARIO.replace('"done(one) == 3"', '"held(end) == 0"') + more)
    assert one.steps[-2:] == (Turn("apply"), Drain("end", ("P", "D"), 10.0))
    assert one.engines == {"P", "D", "R"}


def test_an_engine_that_is_to_be_refused_is_not_started_with_the_others() -> None:
    more = '[[step]]\nrefusal = "no"\nengine = "X"\nsays = "needs more"\n'
    one = scenario.parse("s", SCENARIO.replace('"done(one) == 3"', '"refused(no) == 1"') + more)
    assert one.steps[-1] == Refusal("no", "X", "needs more")
    assert one.engines == {"P", "D", "R"} and one.refused == {"X"}


def test_words_may_be_asked_of_the_clients_of_a_send_that_fails() -> None:
    text = SCENARIO.replace('"done(one) == 3"', '"told(one) == 3"')
    one, two = scenario.parse("s", text.replace("new = 7", 'fails = true\nsays = "by name"')).steps
    assert isinstance(one, Send) and isinstance(two, Send)
    assert (one.kill, one.says, two.says) == ("", "by name", "")


def test_what_was_done_to_engines_in_a_send_is_not_done_again() -> None:
    text = SCENARIO.replace("new = 7", 'new = 7\nkill = "D"\nsays = "x"\nat = "held"\nleave = 4')
    one, two = scenario.parse("s", text).steps
    assert isinstance(one, Send) and isinstance(two, Send)
    assert (one.kill, one.says, one.at, one.leave) == ("D", "x", "held", 4)
    assert (two.kill, two.says, two.at, two.leave) == ("", "", 1, 0)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('again = "one"', 'again = "three"', "names no send before it"),
        ('send = "two"', 'send = "one"', "no new name"),
        ("new = 7", "nwe = 7", "unknown keys"),
        ("new = 7", "new = 0", "at least 1"),
        ("new = 7", "prefix = 1000", "longer than the prompt"),
        ("new = 7", 'says = "gone"', "without kill"),
        ("new = 7", 'fails = true\nsays = "gone"', r"asks for told\(one\)"),
        ('to = ["R"]', 'to = ["A", "B", "C"]', "to = "),
        ("done(one) == 3", "done(one) = 3", "not of the form"),
        ("done(one) == 3", "dune(one) == 3", "no measure 'dune'"),
        ("done(one) == 3", "done(one, two) == 3", "takes 1 names"),
        ("done(one) == 3", "done(three) == 3", "names no send"),
        ("done(one) == 3", "done(one) >= 0", "holds whatever is measured"),
        ("done(one) == 3", "done(one) > -1", "holds whatever is measured"),
        ("done(one) == 3", "errors(one) == 3", r"gave up after 400 s; add told\(one\) == N"),
        ("done(one) == 3", "errors(one) >= 1", "gave up after 400 s"),
        ("done(one) == 3", 'errors(one) == 3", "told(one) == 0', "gave up after 400 s"),
        ("done(one) == 3", 'errors(one) == 3", "seconds(one) <= 400', "gave up after 400 s"),
        ("done(one) == 3", 'errors(one) == 3", "seconds(one) >= 300', "gave up after 400 s"),
        ('boot = "b"', "", "names no boot"),
        ('send = "two"\nagain = "one"', 'sned = "two"', "neither send, drain, turn nor refusal"),
        ('send = "two"\nagain = "one"\nto = ["R"]', 'turn = "round"', "turn = one of apply, revert"),
        ('send = "two"\nagain = "one"\nto = ["R"]', 'turn = "apply"\nto = ["P"]', "unknown keys"),
        ('send = "two"\nagain = "one"\nto = ["R"]', 'drain = "two"', "drain needs engines"),
        ('send = "two"\nagain = "one"\nto = ["R"]', 'refusal = "two"\nengine = "P"', "needs engine = and says ="),
        ('send = "two"\nagain = "one"\nto = ["R"]', 'drain = "one"\nengines = ["P"]', "no new name"),
        ('again = "one"\nto = ["R"]', 'again = "one"\nto = ["R"]\ngathered = true', "only a pair's requests"),
        ('about = "x"', 'about = "x"\nhodl = []', "unknown keys"),
    ],
)
def test_a_scenario_file_with_a_mistake_is_refused(old: str, new: str, told: str) -> None:
    assert old in SCENARIO
    with pytest.raises(RigError, match=told):
        scenario.parse("s", SCENARIO.replace(old, new, 1))


@pytest.mark.parametrize(
    "more",
    [
        'errors(one) == 3", "told(one) == 3',
        'errors(one) == 3", "seconds(one) <= 30',
        'errors(one) == 3", "seconds(one) >= 400',
        "errors(one) == 0",
        "errors(one) < 1",
    ],
)
def test_failed_requests_that_were_told_or_ended_in_time_or_whose_clients_are_to_leave_are_counted(more: str) -> None:
    assert scenario.parse("s", SCENARIO.replace("done(one) == 3", more, 1)).holds


def test_failed_requests_of_an_engine_that_ended_by_its_own_words_are_counted() -> None:
    text = SCENARIO.replace("done(one) == 3", "errors(one) == 3").replace("new = 7", 'new = 7\nkill = "D"\nsays = "x"')
    assert scenario.parse("s", text).holds


def test_what_may_be_below_nothing_may_be_held_from_there_on() -> None:
    assert scenario.parse_hold("saved_bytes(one, two) >= -1").bound == -1
    assert scenario.parse_hold("extra_steps(one, two) >= 0").bound == 0


@pytest.mark.parametrize("text", ['boot = "b"\nhold = ["done(a) == 1"]'])
def test_a_scenario_that_sends_nothing_is_refused(text: str) -> None:
    with pytest.raises(RigError, match=r"sends nothing"):
        scenario.parse("s", text)


def test_a_scenario_in_which_nothing_must_hold_is_refused() -> None:
    with pytest.raises(RigError, match="nothing must hold"):
        scenario.parse("s", SCENARIO.replace('["done(one) == 3", "same_texts(one, two) >= 2.5"]', "[]"))


@pytest.mark.parametrize(
    ("operator", "low", "same", "high"),
    [
        ("==", False, True, False),
        ("!=", True, False, True),
        ("<", True, False, False),
        ("<=", True, True, False),
        (">", False, False, True),
        (">=", False, True, True),
    ],
)
def test_each_comparison_means_what_it_says(operator: str, low: bool, same: bool, high: bool) -> None:
    hold = scenario.parse_hold(f"done(a) {operator} 2")
    assert (hold.compare(1), hold.compare(2), hold.compare(3)) == (low, same, high)


@pytest.mark.parametrize("name", scenario.names())
def test_every_shipped_scenario_fits_its_boot(name: str) -> None:
    one = scenario.load(name)
    which = boot.load(one.boot)
    members = {part.name for part in which.parts} | {router.name for router in which.routers}
    for step in one.steps:
        assert step.members <= members
    assert one.refused <= {part.name for part in which.parts} - runner.needed(which, [one])
    assert one.about and which.about


@pytest.mark.parametrize("path", sorted(boot.FOLDER.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_boot_is_sound(path: Path) -> None:
    assert boot.load(path.stem).parts


def test_the_short_list_is_short_and_its_scenarios_use_every_engine() -> None:
    entries = lists.short()
    assert 0 < len(entries) <= lists.MOST_BOOTS
    for entry in entries:
        assert runner.needed(entry.boot, entry.scenarios) >= {part.name for part in entry.boot.parts}
        assert entry.seconds > 0
    assert sum(entry.seconds for entry in entries) <= 900


def test_the_full_list_holds_every_scenario_once() -> None:
    names = [one.name for entry in lists.full() for one in entry.scenarios]
    assert sorted(names) == scenario.names()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "0 boots"),
        ('[[boot]]\nname = "mla"\nscenarios = ["glm-dsa-cache"]\nseconds = 1', "runs on glm-dsa"),
        ('[[boot]]\nname = "mla"\nscenarios = []\nseconds = 1', "has no scenario"),
        ('[[boot]]\nname = "mla"\nscenarios = ["mla-router"]\nseconds = 1\n' * 2, "named twice"),
        ('[[boot]]\nname = "mla"\nscenarios = ["mla-router"]\nseconds = 1\n' * 7, "7 boots"),
    ],
)
def test_a_short_list_that_breaks_its_rules_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "short.toml"
    path.write_text(text)
    with pytest.raises(RigError, match=told):
        lists.short(path)


def test_every_planted_fault_names_a_scenario_that_runs_a_patched_engine() -> None:
    assert faults.FAULTS
    for fault in faults.FAULTS.values():
        which = boot.load(scenario.load(fault.scenario).boot)
        assert fault.role in which.needs_patched
    with pytest.raises(RigError, match="no fault 'nothing'"):
        faults.get("nothing")


def test_every_planted_fault_runs_in_an_engine_of_its_own_and_is_measured_there() -> None:
    seen: set[str] = set()
    for one in map(scenario.load, scenario.names()):
        for part in boot.load(one.boot).parts:
            sends = [step.name for step in one.steps if isinstance(step, Send) and part.name in step.to]
            if faults.VARIABLE in part.env and sends:
                measured = {argument.partition(".")[0] for hold in one.holds for argument in hold.arguments}
                assert measured >= set(sends)
                seen.add(part.env[faults.VARIABLE])
    assert seen == set(faults.FAULTS)


# A gate that only checks what the ranks have selected.
CHECK = "SGLANG_RESEARCH_DSA_DCP_CHECK"


def _without_fault(part: Part) -> Part:
    env = {name: value for name, value in part.env.items() if name != faults.VARIABLE}
    gates = {name: value for name, value in part.gates.items() if name != CHECK}
    return replace(part, name="", env=env, gates=gates)


def _parts(one: Scenario, send: Send) -> list[Part]:
    parts = {part.name: part for part in boot.load(one.boot).parts}
    return [parts[name] for name in send.to if name in parts]


def _is_control(right: Send, faulty: Send) -> bool:
    """Whether ``right`` sends all prompts of ``faulty``, for no fewer tokens: the first ones of a text are the same."""
    same = ("seed", "length", "vary", "prefix", "gathered")
    return (
        right.count >= faulty.count
        and right.new >= faulty.new
        and all(getattr(right, key) == getattr(faulty, key) for key in same)
    )


def test_texts_that_a_planted_fault_turns_are_right_without_it() -> None:
    """The same requests to the same engines without the fault bring the right texts, or are what they differ from."""
    found: set[str] = set()
    controls = [
        (other, right)
        for other in map(scenario.load, scenario.names())
        for right in other.steps
        if isinstance(right, Send)
        and any(
            hold.measure == "same_texts"
            and right.name in hold.arguments
            and hold.operator == "=="
            and hold.bound == right.count
            for hold in other.holds
        )
    ]
    for one in map(scenario.load, scenario.names()):
        turned = {
            argument.partition(".")[0]
            for hold in one.holds
            if hold.measure == "different_texts"
            for argument in hold.arguments
        }
        for faulty in (step for step in one.steps if isinstance(step, Send) and step.name in turned):
            parts = _parts(one, faulty)
            planted = {part.env[faults.VARIABLE] for part in parts if faults.VARIABLE in part.env}
            bare = list(map(_without_fault, parts))
            beside = [
                (one, step) for step in one.steps if isinstance(step, Send) and step.name in turned - {faulty.name}
            ]
            if planted and not any(
                _is_control(right, faulty)
                and not any(faults.VARIABLE in part.env for part in _parts(other, right))
                and list(map(_without_fault, _parts(other, right))) == bare
                for other, right in controls + beside
            ):
                found |= {f"{one.name} {faulty.name}"}
    assert found == set()


def test_a_decode_engine_whose_prefill_is_killed_looks_after_it_as_the_release_does() -> None:
    """Else what a scenario tells of a stock D would be the harness's: see ``lab.rig.engine.ENVIRONMENT``."""
    seen = set()
    for one in map(scenario.load, scenario.names()):
        which = boot.load(one.boot)
        parts = {part.name: part for part in which.parts}
        behind = {router.name: router.decode for router in which.routers}
        for step in one.steps:
            if isinstance(step, Send) and step.kill in parts and parts[step.kill].mode == "prefill":
                for name in (name for to in step.to for name in behind.get(to, (to,))):
                    if parts[name].mode == "decode":
                        seen.add(one.name)
                        assert parts[name].env["SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE"] == "2"
                        assert parts[name].env["SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL"] == "5"
    assert seen == {"killed", "router-faults"}


def test_every_variable_that_the_rig_sets_is_named_in_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in set(os.environ) - {"PATH"}:
        monkeypatch.delenv(name)
    (tmp_path / "config.json").write_text('{"kv_lora_rank": 1}')
    names: set[str] = set()
    for role, release in tree.RELEASES.items():
        one = engine.Engine("E", role, role, tree.Tree(role, tmp_path, release), tmp_path, tmp_path, 1, 2)
        names |= set(engine.engine_spec(one, tmp_path).env)
        names |= set(engine.router_spec("R", tmp_path, 1, 2, [], [], tmp_path).env)
    for path in boot.FOLDER.glob("*.toml"):
        which = boot.load(path.stem)
        names |= {name for part in which.parts for name in part.env}
        names |= {name for router in which.routers for name in router.env}
    page = (tree.REPOSITORY / "docs" / "rig.md").read_text(encoding="utf-8")
    assert {name for name in names - {"PATH"} if not re.search(rf"`{name}( ?=[^`]*)?`", page)} == set()
    table = page.partition("### Variables of the engines")[2].partition("Single boots set more")[0]
    listed = {
        name for row in table.splitlines() if row.startswith("| `") for name in re.findall(r"`(\w+)", row.split("|")[1])
    }
    assert listed <= names
    dropped = page.partition("names that begin with")[2].partition("are dropped")[0]
    assert set(re.findall(r"`(\w+)`", dropped)) == set(engine._DROP)


def test_every_measure_is_told_in_words() -> None:
    assert all(measure.about and measure.arguments in (1, 2) for measure in MEASURES.values())


def test_a_printed_line_of_the_page_is_one_that_its_scenario_demands() -> None:
    """A page once printed `errors(x) == n` of runs before the scenario demanded `told(x) == n`."""
    page = (tree.REPOSITORY / "docs" / "rig.md").read_text(encoding="utf-8")
    printed = re.findall(r"^([\w-]+) +([\w-]+) +(\S.*?\S)  +[\d.e+-]+ +ok$", page, re.MULTILINE)
    demanded = {name: {hold.text for hold in scenario.load(name).holds} for name in scenario.names()}
    told = [(name, hold) for _, name, hold in printed if name in demanded]
    assert len(told) > 100
    assert [(name, hold) for name, hold in told if hold not in demanded[name]] == []
