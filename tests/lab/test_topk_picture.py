"""The picture of the top-k page is the one that the evidence draws."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks import topk_plot, topk_tables


def test_the_picture_is_that_of_the_evidence(tmp_path: Path) -> None:
    topk_plot.draw(tmp_path / "topk.svg")
    assert (tmp_path / "topk.svg").read_bytes() == topk_plot.PICTURE.read_bytes()


def test_the_tables_are_those_of_the_evidence() -> None:
    text = topk_tables.PAGE.read_text(encoding="utf-8")
    assert topk_tables.replaced(text, topk_tables.tables()) == text
    assert all(f"{made}\n" in text for made in topk_tables.tables())


def test_the_counts_of_the_runs_against_the_oracle_are_those_of_the_evidence() -> None:
    text, told = topk_tables.PAGE.read_text(encoding="utf-8"), topk_tables.told("exactness.json")
    for name, what in (
        ("rows", "rows"),
        ("row_launches", "launches of a row"),
        ("launches_beside_noise", "launches beside"),
        ("graph_replays", "replays"),
    ):
        assert f"{told[name]:,} {what}" in text


def section(title: str) -> str:
    return topk_tables.PAGE.read_text(encoding="utf-8").split(f"\n### {title}\n")[1].split("\n#")[0]


def test_the_shapes_at_which_a_peer_is_faster_are_those_of_the_evidence() -> None:
    faster: dict[str, list[str]] = {}
    peers = set()
    for name, row in topk_tables.by_name("speed.json").items():
        if ahead := {peer for peer, us in row.get("peers_us", {}).items() if us < row["value"]}:
            shape, kind = name.split()
            faster.setdefault(kind, []).append(shape)
            peers |= ahead
    wanted = [
        f"* {kind}: {', '.join(sorted(faster[kind], key=lambda shape: [int(part) for part in shape.split('x')]))}"
        for kind in topk_tables.KINDS
        if kind in faster
    ]
    assert peers == {"stock topk_v2"}
    assert [line for line in section("Where stock is faster").splitlines() if line.startswith("*")] == wanted


def test_the_decode_steps_in_which_stock_is_faster_are_those_of_the_evidence() -> None:
    told: dict[str, Any] = json.loads((topk_tables.ROOT / "evidence/engine/h200.json").read_text(encoding="utf-8"))
    stock, exact = (
        {(point["context"], point["batch"]): point for point in told["runs"][f"{arm} wide"]["wide"]}
        for arm in ("stock", "exact")
    )
    ours = [cell for cell in stock if exact[cell]["topk_us"] < stock[cell]["topk_us"]]
    contexts = " and ".join(f"{context // 1024}K" for context, _ in ours)
    (batch,) = {batch for _, batch in ours}
    text = " ".join(section("Where stock is faster").split())
    assert f"smaller with stock in {len(stock) - len(ours)} of {len(stock)} cells" in text
    assert f"ours is smaller at {contexts} with a batch of {batch} alone" in text
    points = [*stock.values(), *exact.values()]
    assert all(any("topk_plan" in kernel for kernel in point["topk_kernels"]) for point in points)
    shares = [point["kernels_us"] / 1000 / point["step_ms"] for point in points]
    rig = " ".join((topk_tables.ROOT / "docs/rig.md").read_text(encoding="utf-8").split())
    assert f"the kernels are between {min(shares):.2f} and {max(shares):.2f}," in rig


def test_the_shapes_that_reach_their_aim_are_those_of_the_evidence() -> None:
    bound = {name.split()[0]: row for name, row in topk_tables.by_name("speed.json").items() if name.endswith(" randn")}
    bound = {shape: row for shape, row in bound.items() if "must" in row}
    text = " ".join(topk_tables.PAGE.read_text(encoding="utf-8").split())
    found = re.search(r"in the order of the table at ([\d, ]+)\. That is reached at (\S+) and nowhere else\.", text)
    assert found is not None
    aims = dict(zip(bound, map(int, found[1].split(", ")), strict=True))
    assert [shape for shape, row in bound.items() if row["value"] <= aims[shape]] == [found[2]]
    assert all(aims[shape] < row["must"] for shape, row in bound.items())


def test_another_table_takes_the_place_of_the_first_and_leaves_the_text_and_the_others() -> None:
    text = "a\n| 1 |\n| 2 |\nb\n\n| 3 |\nc\n"
    assert topk_tables.replaced(text, ["| x |\n| y |\n| z |"]) == "a\n| x |\n| y |\n| z |\nb\n\n| 3 |\nc\n"


def test_what_the_profiler_did_not_tell_is_said_to_be_not_measured() -> None:
    known = {"kernel": "stream_rows", "us": 9.5, "read_mb": 8.4, "written_mb": 0.1, "memory_rate_percent": 12.4}
    known |= {"occupancy_percent": None, "instructions": 700000.0, "instructions_a_clock": 0.5, "registers": 64.0}
    rows = [{"name": "1x32768", "floor": {"read_mb": 4.2}, "kernels": [known]}]
    line = topk_tables.profile({"rows": rows}).splitlines()[2]
    assert line == "| 1x32768 `stream_rows` | 9.5 | 2 | 0.1 | 12 | not measured | 700000 | 0.5 | 64 |"


def test_a_claim_of_how_time_grows_holds_the_values_in_the_order_of_the_result() -> None:
    rows = [{"name": f"{shape} randn", "value": value} for shape, value in (("64x8192", 5.9), ("1x8192", 4.9))]
    text = topk_tables.claims({"rows": rows, "date": "2026-11-30"})
    assert 'id = "topk-by-short-rows"' in text and "value = [5.9, 4.9]" in text and "value = [4.9]" in text
