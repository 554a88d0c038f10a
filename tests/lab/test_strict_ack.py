"""The attribution of the strict acknowledgement: what is compared with what, and that no case is missing. No router."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import strict_ack
from benchmarks.engines import Lost
from benchmarks.report import Row
from benchmarks.strict_ack import ARMS, acknowledgement
from lab.router import ack


def figures(rows: Iterator[Row]) -> dict[str, float]:
    return {row.name: row.value for row in rows}


def cases(on: float = 0.003, off: float = 1.9, told: float | None = 0.002) -> list[dict[str, Any]]:
    seconds = {"stock": 1.9, "gate off": off, "gate on": on}
    return [
        {
            "arm": arm,
            "early": early,
            "error_s": seconds[arm] + number / 1e4,
            "abort_s": told if arm == "gate on" else None,
        }
        for number in range(5)
        for early in (False, True)
        for arm in ARMS
    ]


def test_the_error_is_compared_arm_by_arm() -> None:
    found = figures(acknowledgement(cases()))
    assert found["D's headers late, gate on - gate off: mean"] == pytest.approx(-1897)
    assert found["D's headers late, gate on - gate off: high"] < 0
    assert found["D's headers early, gate off - stock: mean"] == pytest.approx(0)
    assert found["D's headers late, stock: D was told"] == 0 and found["D's headers late, gate on: D was told"] == 5


def test_a_planted_slow_error_is_a_figure_and_not_hidden() -> None:
    found = figures(acknowledgement(cases(on=2.5)))
    assert found["D's headers late, gate on - gate off: low"] > 0
    assert found["D's headers late, gate on: error, worst"] > 2500


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_case_that_is_missing_leaves_no_pairs(lost: int) -> None:
    made = cases()
    with pytest.raises(Lost, match="are no pairs"):
        list(acknowledgement(made[:lost] + made[lost + 1 :]))
    with pytest.raises(Lost, match="are no pairs"):
        list(acknowledgement([case for case in made if case["arm"] != ARMS[lost]]))
    with pytest.raises(Lost, match="are no pairs"):
        list(acknowledgement([]))


def test_the_arms_are_those_that_are_run_in_an_order_that_is_its_own_mirror() -> None:
    assert tuple(ack.ARMS) == ARMS
    assert ack.ORDER[::-1] == ack.ORDER and {ack.ORDER.count(arm) for arm in ARMS} == {2}


def test_no_arm_has_one_place_in_all_cases_of_one_kind_of_headers() -> None:
    for turn in (0, 1, 2):
        found = ack.cases(turn)
        assert sorted(found) == sorted((arm, early) for arm in ARMS for early in (True, False))
        assert tuple(arm for arm, _ in found) == ack.ORDER
    late, other = ([arm for arm, early in ack.cases(turn) if not early] for turn in (0, 1))
    assert late[::-1] == other and late != other


def test_the_script_writes_its_result_and_says_what_could_not_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r.json"
    receipts = {"stock": {"series": ""}, "patched": {"series": "0f" * 32}}
    printed = "\n".join(map(json.dumps, [receipts, *cases()]))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0, stdout=printed))
    done = CliRunner().invoke(strict_ack.main, ["--out", str(out)])
    result = json.loads(out.read_text())
    assert done.exit_code == 0 and "lab/router/ack.py" in result["modules"] and result["label"].startswith("CPU")
    assert result["builds"] == receipts

    failed = SimpleNamespace(returncode=1, stdout="", stderr="no router")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    done = CliRunner().invoke(strict_ack.main, [])
    assert done.exit_code == 1 and "no router" in done.output
