"""What the attributions read from scenarios and scripted servers; a figure that is not there is no figure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import attribution
from benchmarks.attribution import ITEMS, Brought, brought, layer_split, retraction, sources
from benchmarks.engines import Lost
from benchmarks.report import Row
from lab.rig import boot, scenario


def line(hold: str, measured: float | None, holds: bool = True) -> dict[str, Any]:
    return {"scenario": "one", "hold": hold, "measured": measured, "holds": holds, "note": ""}


def test_a_line_that_does_not_hold_gives_no_figure() -> None:
    result = {"boots": [{"answers": {}, "lines": [line("lost(x) == 0", 0), line("done(x) == 3", 2, False)]}]}
    found = brought(result)
    for ask in (lambda: found.measure("one", "lost(x)"), lambda: found.sum("one", "x", "retractions")):
        with pytest.raises(Lost, match=r"one: done\(x\) == 3 does not hold, measured 2"):
            ask()


def test_measures_are_found_by_their_line_and_nothing_else_is() -> None:
    found = brought({"boots": [{"answers": {}, "lines": [line("lost(x) == 0", 0), line("lost(xy) >= 1", 5)]}]})
    assert (found.measure("one", "lost(x)"), found.measure("one", "lost(xy)")) == (0, 5)
    for scenario_name, text in (("one", "lost(y)"), ("two", "lost(x)"), ("one", "lost")):
        with pytest.raises(Lost, match="measured no"):
            found.measure(scenario_name, text)


def answer(steps: int, retractions: int, error: str = "") -> dict[str, Any]:
    return {"verify_steps": steps, "retractions": retractions, "error": error}


def retracted(error: str = "", times: int = 1) -> Brought:
    plain = [answer(10, 0), answer(10, 0)]
    return Brought(
        {
            "mla-retract": {"lost(forced) >= 1": 5, "same_texts(calm, forced) == 2": 2},
            "mla-retract-patched": {"lost(cured) == 0": 0, "same_texts(calm, cured) == 2": 2},
        },
        {
            "mla-retract": {"calm": plain, "forced": [answer(10, 0), answer(34, 2, error)]},
            "mla-retract-patched": {"calm": plain, "cured": [answer(10, 0), answer(11, times)]},
        },
    )


def figures(rows: Iterator[Row]) -> dict[str, float]:
    return {row.name: row.value for row in rows}


def test_steps_are_those_more_than_the_same_requests_took_without_retraction() -> None:
    found = figures(retraction(retracted()))
    assert found["stock: steps more than without retraction"] == 24 and found["stock: steps more a retraction"] == 12
    assert found["patched: steps more a retraction"] == 1
    assert (found["stock: accepted tokens thrown away"], found["patched: accepted tokens thrown away"]) == (5, 0)


@pytest.mark.parametrize(
    ("change", "said"), [({"error": "cut"}, "or an error"), ({"times": 0}, "nothing was retracted")]
)
def test_a_failed_request_and_a_retraction_that_was_none_are_no_figures(change: dict[str, Any], said: str) -> None:
    with pytest.raises(Lost, match=said):
        list(retraction(retracted(**change)))


@pytest.mark.parametrize(
    ("rows", "scenarios"),
    [
        (retraction, ("mla-retract", "mla-retract-patched")),
        (layer_split, ("equal-memory",)),
        (sources, ("cp-sources",)),
    ],
)
def test_every_scenario_measures_what_is_read_from_it(
    rows: Callable[[Brought], Iterator[Row]], scenarios: tuple[str, ...]
) -> None:
    """Each shipped scenario's own lines, with a number that holds them, are enough for all rows."""
    measures = {name: {hold.text: hold.bound for hold in scenario.load(name).holds} for name in scenarios}
    sent: dict[str, Any] = {
        name: {step.name: [answer(9, 1)] for step in scenario.load(name).steps if isinstance(step, scenario.Send)}
        for name in scenarios
    }
    made = list(rows(Brought(measures, sent)))
    assert len(made) > 5 and len({row.name for row in made}) == len(made)
    for name in scenarios:
        assert boot.load(scenario.load(name).boot).parts


def test_every_item_has_scenarios_that_are_shipped() -> None:
    assert set(ITEMS) == {"retraction", "layer split", "sources"}
    assert {name for item in ITEMS.values() for name in item.scenarios} <= set(scenario.names())


def test_the_script_keeps_what_was_measured_and_says_what_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r.json"
    asked: list[str] = []

    def compare(*names: str) -> Brought:
        asked.extend(names)
        return retracted()

    monkeypatch.setattr(attribution, "compare", compare)
    done = CliRunner().invoke(attribution.main, ["retraction", "--out", str(out)])
    result = json.loads(out.read_text())
    assert done.exit_code == 0 and result["label"] == "CPU, TCP loopback" and "lab/rig/boots/mla.toml" in result["ran"]
    assert asked == ["mla-retract", "mla-retract-patched"]
    done = CliRunner().invoke(attribution.main, ["--out", str(out)])
    result = json.loads(out.read_text())
    assert done.exit_code == 1 and "sources: scenario cp-sources measured no sources(first)" in done.output
    assert result["rows"][0]["name"] == "retraction, stock: retractions" and len(result["troubles"]) == 2

    def lost(*names: str) -> Brought:
        raise Lost("the engines ended")

    monkeypatch.setattr(attribution, "compare", lost)
    done = CliRunner().invoke(attribution.main, [])
    assert done.exit_code == 1 and "the engines ended" in done.output
