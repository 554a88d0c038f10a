"""Each line of the router page's tables is the one that its result gives: a figure's claim alone knows no cell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def rows(result: str) -> dict[str, float]:
    found = json.loads((ROOT / "evidence" / result).read_text(encoding="utf-8"))["rows"]
    return {row["name"]: row["value"] for row in found}


def page() -> set[str]:
    return set((ROOT / "docs" / "router.md").read_text(encoding="utf-8").splitlines())


def test_every_failure_of_p_has_its_line() -> None:
    found = rows("router/failures.json")
    modes = list(dict.fromkeys(name.partition(":")[0] for name in found))
    assert len(modes) > 16
    for mode in modes:
        cells = [
            f"{found[f'{mode}: {what}']:.1f}"
            for what in ("client's error, median", "client's error, worst", "D's abort, median", "D's abort, worst")
        ]
        name = mode if mode.startswith("all") else f"`{mode}`"
        assert any(line.startswith(f"| {name}") and line.endswith(f"| {' | '.join(cells)} |") for line in page()), mode


@pytest.mark.parametrize("headers", ["late", "early"])
def test_every_arm_of_the_gate_in_pairs_has_its_line(headers: str) -> None:
    found, before = rows("rig/strict-ack.json"), ""
    for arm in ("stock", "gate off", "gate on"):
        what = f"D's headers {headers}, {arm}"
        low, mean, high = (found.get(f"{what} - {before}: {one}") for one in ("low", "mean", "high"))
        more = f"{mean:.2f}, {low:.2f} to {high:.2f}" if before else ""
        cells = f"{found[f'{what}: error p50']:.1f} | {found[f'{what}: error, worst']:.1f}"
        assert f"| {headers} | {arm} | {cells} | {found[f'{what}: D was told']:.0f} | {more} |" in page()
        before = arm


@pytest.mark.parametrize("case", ["stock, a second one", "patched, gates unset", "load at dispatch", "both gates"])
@pytest.mark.parametrize("measure", [("request rate", "per_second"), ("p99", "p99_ms"), ("CPU a request", "cpu_us")])
def test_every_ratio_of_what_the_router_costs_has_its_line(case: str, measure: tuple[str, str]) -> None:
    found, (words, name) = rows("router/release.json"), measure
    cells = []
    for count in (1, 4, 16, 64, 256):
        ratio = f"{count:>3} connections, {case}: {name} to stock"
        cells.append(f"{found[ratio]:.2f} ({found[ratio + ', low']:.2f} to {found[ratio + ', high']:.2f})")
    assert f"| {case} | {words} | {' | '.join(cells)} |" in page()
