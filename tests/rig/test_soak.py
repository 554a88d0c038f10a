"""The soak of the whole rig: what is counted, what turns it red, and that a soak without its troubles is none."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from click.testing import CliRunner

from lab.load.stream import Failure
from lab.rig import soak
from lab.rig.fleet import NEW, STOCK
from lab.rig.soak import Diary, ends, growth
from tests.rig.test_fleet import Served, play, see_places, sent, turned


def test_the_places_of_the_soak_are_members_of_its_boot() -> None:
    see_places(soak.BOOT, soak.PLACES)


def test_memory_is_judged_after_the_warm_up_by_medians() -> None:
    flat = [(float(at), 100 + 50 * (at == 60)) for at in range(100)]
    assert growth(flat, 100) == 0
    assert growth([(at, size + (5000 if at < 25 else 0)) for at, size in flat], 100) == 0
    assert growth([(at, 10 * int(at)) for at, _ in flat], 100) == pytest.approx(570, abs=10)
    assert growth(flat[:30], 100) is None and growth([], 100) is None
    assert growth([(at, 0) for at, _ in flat], 100) is None


def test_a_client_that_left_is_neither_served_nor_refused() -> None:
    found = ends(
        [
            sent(0, 1, 2, "a"),
            sent(1, 1, 2, "x"),
            sent(2, 1, 2, "", left=True),
            sent(3, 1, 2, "", failure=Failure.STATUS),
            sent(4, 1, None),
            sent(5, 1, 99, left=True),
        ],
        ["a"],
        10.0,
    )
    assert found == {"served": 1, "wrong": 1, "left": 1, "status": 1, "hung": 2}


def soaked(**change: Any) -> Diary:
    steady = [(float(at), 100 << 20) for at in range(100)]
    plain = {
        "kills": Counter(P1=1, D1=2),
        "turns": Counter(new=1, stock=1),
        "retractions": 3,
        "memory": dict.fromkeys(soak.LIVES, steady),
    }
    return Diary(**{**plain, **change})


FOUND = {"served": 20, "left": 2, "status": 4}
GREW = {name: [(float(at), at << 20) for at in range(100)] for name in soak.LIVES}


@pytest.mark.parametrize(
    ("found", "change", "red"),
    [
        ({}, {}, set()),
        ({"wrong": 1}, {}, {"wrong texts == 0"}),
        ({"hung": 1}, {}, {"requests without an end == 0"}),
        ({"left": 0}, {}, {"left by their clients >= 1"}),
        ({"served": 0}, {}, {"served >= 1"}),
        ({}, {"kills": Counter(P1=1)}, {"kills of D1 >= 1"}),
        ({}, {"turns": Counter(new=1)}, {"times stock >= 1"}),
        ({}, {"retractions": 0}, {"retractions >= 1"}),
        ({}, {"lost": ["P0: gone"]}, {"members lost == 0"}),
        ({}, {"held": ["D0 holds 3 tokens and 0 requests"]}, {"engines that hold something == 0"}),
        ({}, {"memory": GREW}, {f"growth of {name} <= {soak.ALLOWED >> 20} MiB" for name in soak.LIVES}),
        ({}, {"memory": {}}, {f"growth of {name} <= {soak.ALLOWED >> 20} MiB" for name in soak.LIVES}),
    ],
)
def test_each_planted_fault_and_a_soak_without_its_troubles_are_red(
    found: dict[str, int], change: dict[str, Any], red: set[str]
) -> None:
    lines = soak.judge({**FOUND, **found}, soaked(**change), 100.0)
    assert {line.hold for line in lines if not line.holds} == red


class Hasty(Random):
    """Draws no time between two things."""

    def uniform(self, a: float, b: float) -> float:
        return 0.0


def test_victims_are_killed_turned_and_started_again_while_the_others_live() -> None:
    made, running, diary = turned(soak.PLACES), Served(), Diary()
    killed: list[str] = []

    class Running:
        def kill(self, name: str) -> None:
            killed.append(name)

    for place in made.places.values():
        place.running = Running()
    soak.disturb(made, running, 40.0, Hasty(3), diary, lambda text: None)  # type: ignore[arg-type]
    assert set(killed) == set(soak.VICTIMS) and Counter(killed) == diary.kills and killed[:2] == list(soak.VICTIMS)
    assert diary.turns[NEW] - diary.turns[STOCK] in (0, 1) and diary.turns[NEW] > 0
    assert diary.retractions == 2 * diary.kills["D1"]
    assert made.did[:3] == ["stop P1", "turn P1 new", "start P1"] and "turn D1 new" not in made.did
    assert set(diary.memory) == set(soak.LIVES)


@pytest.mark.parametrize("minutes", ["0", "-1", "soon"])
def test_a_soak_of_no_time_is_a_usage_error(minutes: str) -> None:
    done = CliRunner().invoke(soak.main, ["--minutes", minutes])
    assert done.exit_code == 2 and "--minutes" in done.output


@pytest.mark.parametrize(("held", "code"), [("", 0), ("D0 holds 3 tokens and 0 requests", 1)])
def test_the_soak_writes_what_it_saw_and_is_red_where_something_is_held(
    held: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = turned(soak.PLACES)
    play(monkeypatch, soak, made, None)
    monkeypatch.setattr(made, "held", lambda name: held if name == "D0" else "", raising=False)
    monkeypatch.setattr(soak, "ends", lambda *_: Counter(served=20, left=2))

    def disturb(fleet: Any, running: Any, until: float, chance: Random, diary: Diary, say: Any) -> None:
        assert until == 15.0
        vars(diary).update(vars(soaked()))
        running.at = 100.0

    monkeypatch.setattr(soak, "disturb", disturb)
    out = tmp_path / "soak.json"
    done = CliRunner().invoke(soak.main, ["--minutes", "0.25", "--out", str(out)])
    told = json.loads(out.read_text())
    assert done.exit_code == code and (not held or held in done.output), done.output
    assert (told["script"], told["rate"], told["limit_s"]) == ("lab/rig/soak.py", 0.3, 120.0)
    assert told["kills"] == {"P1": 1, "D1": 2} and told["retractions"] == 3 + 2 * 2
