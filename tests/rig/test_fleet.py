"""Members that turn one by one, and the walk through all mixtures: what is counted, and what turns it red."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lab.load.accounting import Sent
from lab.load.run import Endpoint, Log
from lab.load.stream import Failure
from lab.load.workload import Request
from lab.rig import boot, deployment, engine, models, rolling, runner
from lab.rig.errors import RigError
from lab.rig.fleet import NEW, STOCK, Fleet, Place
from lab.rig.member import Spec
from lab.rig.ports import free
from lab.rig.rolling import Count, Spell, count, judge, prompts, spell_of, table, verdict, walk
from lab.rig.tree import Tree

SERVES = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        print("rig: pools tokens={tokens} cached=0 requests=0 bytes=9", flush=True)
        print("rig: pools tokens=0 cached=0 requests=0 bytes=9", flush=True)
        self.send_response({status}); self.end_headers()
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", {port}), Handler)
print("up", flush=True)
server.serve_forever()
"""
BOOT = """
model = "mla"
[engine.P]
role = "prefill"
[engine.P-new]
like = "P"
tree = "patched"
gates = { G = "1" }
[engine.D]
role = "decode"
[router.R]
prefill = ["P"]
decode = ["D"]
build = "stock"
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """A fleet whose members are small servers; ``SERVES`` says what each does."""
    monkeypatch.setenv("PATCHBUNDLE_CACHE", str(tmp_path))
    monkeypatch.setattr(runner, "KEEPER_LAG", 2.0)
    ports = free(4)
    tree = Tree("prefill", tmp_path, "0.5.19")
    places = {
        "P": Place("P", {STOCK: "P", NEW: "P-new"}, ports[0], ports[1], STOCK, tree),
        "D": Place("D", {STOCK: "D"}, ports[2], ports[3], STOCK),
    }
    one = Fleet(boot.parse("toy", BOOT), places, {}, {}, limit=20.0)
    yield one
    one.end()


def serving(tokens: int = 0, status: int = 200, code: str = SERVES) -> Callable[[Fleet, Place, Path], Spec]:
    def spec(self: Fleet, place: Place, folder: Path) -> Spec:
        text = code.replace("{tokens}", str(tokens)).replace("{status}", str(status)).replace("{port}", str(place.port))
        return Spec(place.name, (sys.executable, "-c", text), dict(os.environ), ("up",), "prefill", place.port)

    return spec


def test_a_member_stops_and_starts_at_its_own_port_while_another_stays(
    made: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fleet, "spec", serving())
    made.start_all()
    other = made.places["D"].running
    time.sleep(0.5)  # a keeper that ended with the thread that started it is gone by then
    assert made.memory("P") > 0 and made.memory("D") > 0 and not made.lost()
    assert {place.running.state()["phase"] for place in made.places.values() if place.running} == {"ready"}
    made.stop("P")
    assert made.memory("P") == 0 and made.events("P") == [] and made.held("P") == "P does not run"
    made.start("P")
    assert made.held("P") == "" and made.places["P"].starts == 2 and made.places["D"].running is other
    assert [event.name for event in made.events("P")] == ["pools", "pools"]


@pytest.mark.parametrize(
    ("tokens", "status", "said"),
    [(3, 200, "P holds 3 tokens and 0 requests"), (0, 400, "P is not idle after 1 s")],
)
def test_an_engine_that_holds_something_or_is_not_idle_is_named(
    made: Fleet, monkeypatch: pytest.MonkeyPatch, tokens: int, status: int, said: str
) -> None:
    monkeypatch.setattr(Fleet, "spec", serving(tokens, status))
    made.start("P")
    assert made.held("P", within=1.0).startswith(said)


def test_an_engine_that_does_not_say_what_it_holds_is_named(made: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fleet, "spec", serving(code=SERVES.replace("rig: pools", "no pools")))
    made.start("P")
    assert made.held("P") == "P does not say what it holds"


def test_a_member_that_ends_by_itself_is_lost_and_one_that_was_killed_is_not(
    made: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fleet, "spec", serving(code="import time\nprint('up', flush=True)\ntime.sleep(0.5)\n"))
    made.start("P")
    monkeypatch.setattr(Fleet, "spec", serving())
    made.start("D")
    running = made.places["D"].running
    assert running is not None
    running.kill("D")
    until = time.monotonic() + 10
    while not made.lost() and time.monotonic() < until:
        time.sleep(0.05)
    assert [told.partition(":")[0] for told in made.lost()] == ["P"]


def test_a_member_that_does_not_come_up_is_an_error(made: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fleet, "spec", serving(code="raise SystemExit('no memory')"))
    with pytest.raises(RigError, match="P: ended with exit status 1"):
        made.start("P")


def test_a_place_is_turned_by_the_bundles_tool_and_only_while_it_is_stopped(
    made: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned: list[tuple[object, str]] = []
    monkeypatch.setattr(runner, "turn_trees", lambda own, verb, say: turned.append((next(iter(own)), verb)))
    monkeypatch.setattr(Fleet, "spec", serving())
    made.turn("P", NEW)
    made.turn("P", NEW)
    assert made.member(made.places["P"]).name == "P-new"
    made.turn("P", STOCK)
    assert turned == [(("prefill", "own"), "apply"), (("prefill", "own"), "revert")]
    made.start("P")
    for name, variant in (("P", NEW), ("D", NEW)):
        with pytest.raises(RigError, match="runs, or has no variant"):
            made.turn(name, variant)


def test_a_routers_keeper_waits_for_nobody_and_it_gets_the_engines_ports(
    made: Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    place = Place("router", {STOCK: "R"}, 7, 8, STOCK)
    one = replace(made, places={**made.places, "router": place}, pythons={"prefill": python, "decode": python})
    tree = Tree("decode", tmp_path, "0.5.17")
    monkeypatch.setattr(engine, "router_package", lambda build, folder, python: tmp_path / build)
    monkeypatch.setattr(models, "ensure", lambda model, ensure: tmp_path)
    spec = replace(one, trees_of={("decode", "stock"): tree}).spec(place, tmp_path)
    urls = [word for word in spec.argv if word.startswith("http")]
    assert spec.after == () and spec.port == 7 and spec.env["PYTHONPATH"] == str(tmp_path / "stock")
    assert urls == [f"http://127.0.0.1:{made.places[name].port}" for name in ("P", "D")]
    assert str(made.places["P"].other_port) in spec.argv
    with pytest.raises(RigError, match="router is no engine"):
        one.engine(place)


def see_places(name: str, places: dict[str, dict[str, str]]) -> None:
    """Places are members of their boot, and a tree that is turned begins as stock."""
    which = boot.load(name)
    known = {part.name: part for part in which.parts}
    routers = {router.name: router for router in which.routers}
    for place, names in places.items():
        if names[next(iter(names))] in routers:
            for router in names.values():
                assert {*routers[router].prefill, *routers[router].decode} <= set(places)
            continue
        trees = {variant: known[part].tree for variant, part in names.items()}
        assert trees == ({STOCK: "stock", NEW: "patched"} if len(names) > 1 else {NEW: "patched"}), place
        assert {known[part].role for part in names.values()} == {"prefill" if place.startswith("P") else "decode"}


def test_the_places_of_the_walk_are_members_of_its_boot() -> None:
    see_places(rolling.BOOT, rolling.PLACES)


# The walk.


def sent(number: int, started: float, ended: float | None, text: str = "right", **more: Any) -> Sent:
    return Sent(number, started, started, started, ended, text=text, **more)


SPELLS = [
    Spell("stock-stock", 0, 10, True),
    Spell("P to new", 10, 20, False),
    Spell("new-stock", 20, 30, True),
]


def test_a_request_counts_with_the_mixture_that_stood_all_of_its_time() -> None:
    assert spell_of(sent(0, 1, 9), SPELLS).name == "stock-stock"
    assert spell_of(sent(0, 9, 11), SPELLS).name == "P to new"
    assert spell_of(sent(0, 19, 25), SPELLS).name == "P to new"
    assert spell_of(sent(0, 21, 25), SPELLS).name == "new-stock"
    assert spell_of(sent(0, 9, None), SPELLS).name == "P to new"
    assert spell_of(sent(0, 29, 31), SPELLS).name == "new-stock"


def test_every_request_is_served_wrong_hung_or_refused_by_name() -> None:
    found = count(
        [
            sent(0, 1, 2, "a"),
            sent(1, 1, 3, "b"),
            sent(2, 1, 2, "b"),  # the text of the other prompt
            sent(3, 11, 12, "", failure=Failure.STATUS),
            sent(4, 11, 12, "", failure=Failure.STATUS),
            sent(5, 11, 13, "", failure=Failure.CUT),
            sent(6, 21, 22, "", failure=Failure.TIMEOUT),
            sent(7, 21, None),
            sent(8, 21, 29, "a"),  # right, but later than the limit
        ],
        ["a", "b"],
        SPELLS,
        limit=5.0,
    )
    first, turn, last = found.values()
    assert (first.served, first.wrong, first.hung, first.slowest) == (2, 1, 0, 2)
    assert turn.refused == {"status": 2, "cut": 1} and turn.ended == 3 and turn.slowest_refused == 2
    assert (last.served, last.hung) == (0, 3)
    assert "status 2" in table(found)[2]


@pytest.mark.parametrize(
    ("own", "red"),
    [
        (Count(served=1, refused=Counter(cut=3)), []),
        (Count(served=3, wrong=1), ["wrong texts == 0"]),
        (Count(served=3, hung=1), ["requests without an end == 0"]),
        (Count(refused=Counter(status=3)), ["served >= 1"]),
    ],
)
def test_a_wrong_text_a_hang_and_a_mixture_that_serves_nobody_are_red(own: Count, red: list[str]) -> None:
    lines = judge({SPELLS[0]: own}, mixtures=1)
    assert [line.hold for line in lines if not line.holds] == red
    assert verdict(lines)[-1] == f"{4 - len(red)} passed, {len(red)} failed"


def test_a_hang_while_a_place_is_turned_is_red_and_a_mixture_that_never_stood_too() -> None:
    lines = judge({SPELLS[0]: Count(served=1), SPELLS[1]: Count(hung=1)}, mixtures=2)
    assert [(line.scenario, line.hold) for line in lines if not line.holds] == [
        ("P to new", "requests without an end == 0"),
        ("walk", "mixtures == 2"),
    ]


@dataclass
class Served:
    """A load that serves ten requests a second, by its own clock."""

    log: Log = field(default_factory=Log)
    serves: bool = True
    at: float = 0.0

    @property
    def now(self) -> float:
        self.at += 0.1
        if self.serves:
            self.log.sent.append(sent(len(self.log.sent), self.at, self.at))
        return self.at

    def check(self) -> None:
        _ = self.now


@dataclass
class Turned:
    """A fleet that only keeps a diary."""

    places: dict[str, Place]
    did: list[str] = field(default_factory=list)
    memories: Callable[[int], int] = lambda call: 100 << 20
    calls: int = 0

    def stop(self, name: str) -> None:
        self.did.append(f"stop {name}")

    def turn(self, name: str, variant: str) -> None:
        self.did.append(f"turn {name} {variant}")
        self.places[name].now = variant

    def start(self, name: str) -> None:
        self.did.append(f"start {name}")

    def memory(self, name: str) -> int:
        self.calls += 1
        return self.memories(self.calls)

    def lost(self) -> list[str]:
        return []

    def events(self, name: str) -> list[deployment.Event]:
        return [deployment.Event("offload", {})] * 4 + [deployment.Event("transfer", {"kind": "kv", "room": "1"})] * 3


def turned(places: dict[str, dict[str, str]]) -> Any:
    return Turned({name: Place(name, names, 1, 2, next(iter(names))) for name, names in places.items()})


DO = ("stop", "turn", "start")


def test_two_calls_are_one_to_each_rank_and_three_are_slices() -> None:
    made: Any = turned(rolling.PLACES)
    calls = [
        deployment.Event("transfer", {"kind": kind, "room": room})
        for kind, room in (("kv", "1"), ("aux", "1"), ("kv", "2"))
    ]
    made.events = lambda name: calls * 2
    assert rolling.worked(made, "P")["requests sent in slices"] == 0
    made.events = lambda name: calls * 3
    assert rolling.worked(made, "P")["requests sent in slices"] == 2


def test_the_walk_meets_all_eight_mixtures_one_turn_at_a_time_and_comes_back() -> None:
    made: Any = turned(rolling.PLACES)
    running: Any = Served()
    spells: list[Spell] = []
    told: Counter[str] = Counter()
    walk(made, running, rolling.WALK, 2, 5.0, lambda text: None, spells, told)
    stood = [spell.name for spell in spells if spell.whole]
    assert len(stood) == 13 and len(set(stood)) == 8 and stood[0] == stood[-1] == "stock-stock-stock"
    up = ["stock-stock-stock", "stock-stock-new", "new-stock-new", "new-new-new"]
    assert stood[:7] == up + up[2::-1]  # the safe order, as docs/fleet.md has it, and its way back
    for before, after in itertools.pairwise(stood):
        assert sum(a != b for a, b in zip(before.split("-"), after.split("-"), strict=True)) == 1
    assert made.did[:6] == [f"{did} {name}{' new' * (did == 'turn')}" for name in ("router", "P") for did in DO]
    assert told == {"retractions": 2 * len(rolling.WALK), "requests sent in slices": len(rolling.WALK)}
    assert all(a.end <= b.begin for a, b in itertools.pairwise(spells))


def test_a_mixture_that_serves_nobody_is_not_waited_for_longer_than_the_patience() -> None:
    running: Any = Served(serves=False)
    began = time.monotonic()
    spells: list[Spell] = []
    walk(turned(rolling.PLACES), running, ("P",), 2, 0.3, lambda text: None, spells, Counter())
    assert 0.5 < time.monotonic() - began < 5 and len(spells) == 3


def test_a_load_that_cannot_begin_is_an_error_and_not_a_run_without_requests() -> None:
    (port,) = free(1)
    load = rolling.Load(Endpoint(f"http://127.0.0.1:{port}", "tiny"), [Request(0, 0, 0, "x")], 2)
    with pytest.raises(RigError, match="does not answer"):
        load.end(20)
    with pytest.raises(RigError, match="does not answer"):
        load.check()


def test_prompts_are_seeded_and_no_two_are_alike() -> None:
    assert prompts(4, 10, 1) == prompts(4, 10, 1) != prompts(4, 10, 2)
    assert [len(text) for text in prompts(3, 10, 1)] == [10, 17, 24] and len(set(prompts(9, 3, 1))) == 9


@dataclass
class Stands:
    """A fleet that is not there: the members start, one engine answers with its name, and nothing is held."""

    made: Any

    def __enter__(self) -> Any:
        return self.made

    def __exit__(self, *_: object) -> None:
        self.made.did.append("down")


def play(monkeypatch: pytest.MonkeyPatch, module: Any, made: Any, trouble: BaseException | None) -> None:
    """Let ``module.main`` run without engines: ``made`` is the fleet, and turning it ends with ``trouble``."""

    class Loaded(Served):
        def end(self, within: float) -> None:
            made.did.append("end")

        def __enter__(self) -> Loaded:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    def fails(name: str) -> None:
        if trouble is not None:
            raise trouble

    monkeypatch.setattr(module, "fleet", lambda *_: Stands(made))
    monkeypatch.setattr(module, "endpoint_of", lambda *_: Endpoint("http://127.0.0.1:1", "tiny"))
    monkeypatch.setattr(module, "expect", lambda endpoint, texts, new: ["right"] * len(texts))
    monkeypatch.setattr(module, "load", lambda *_: Loaded())
    monkeypatch.setattr(made, "start_all", lambda: None, raising=False)
    monkeypatch.setattr(made, "start", fails)


@pytest.mark.parametrize(
    ("trouble", "code", "said"),
    [
        (None, 0, "failed"),
        (RigError("crash", "P: ended with exit status 1"), 1, "FAIL walk: turns that failed == 0"),
        (KeyboardInterrupt(), 1, "interrupted"),
    ],
)
def test_the_walk_tells_what_it_saw_also_when_a_member_does_not_come_up(
    trouble: BaseException | None, code: int, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = turned(rolling.PLACES)
    play(monkeypatch, rolling, made, trouble)
    out = tmp_path / "walk.json"
    done = CliRunner().invoke(rolling.main, ["--out", str(out)])
    told = json.loads(out.read_text())
    assert done.exit_code == code and said in done.output and made.did[-2:] == ["end", "down"], done.output
    assert told["spells"][0]["name"] == "stock-stock-stock" and told["green"] is (code == 0)
    assert told["script"] == "lab/rig/rolling.py" and told["label"] == "CPU, TCP loopback"
