"""Bytes, sources, calls and descriptors that scenarios of the rig demand of running engines are those of the models.

``make rig`` and ``make rig-full`` count them on the wire; here each demanded number is computed from the scenario's own
prompts and the tiny model's shape.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.models.capacity import INDEX_ROW, Kv
from lab.models.transfer import Packing, Way, by_source, crossing

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCENARIOS = Path(__file__).parents[2] / "lab/rig/scenarios"
FLOAT32 = 4 * (512 + 64)  # bytes of a latent row that the rig keeps in float32
ROWS_OF_A_GRID = 65_535


@dataclass(frozen=True)
class Shape:
    """A tiny model's storage: layers, bytes of a latent row."""

    layers: int
    row: int


SHAPES = {
    "glm-dsa-cache": Shape(2, Kv.BF16.value),
    "cp4-layer-split": Shape(4, Kv.BF16.value),
    "dsa-dcp-cp2": Shape(3, Kv.BF16.value),
    "bounded-pack": Shape(3, FLOAT32),
    "bounded-pack-stock": Shape(3, FLOAT32),
}


def scenario(name: str) -> dict[str, Any]:
    return tomllib.loads((SCENARIOS / f"{name}.toml").read_text(encoding="utf-8"))


def demanded(name: str) -> dict[str, int]:
    """The numbers that a scenario holds the engines to, by their measure."""
    found = (re.fullmatch(r"(\w+\([\w.-]+\)) == (\d+)", line) for line in scenario(name)["hold"])
    return {match[1]: int(match[2]) for match in found if match}


def prompts(name: str) -> list[int]:
    """Lengths of the prompts of the first step: ``count`` of them, each ``vary`` longer than the one before."""
    step = scenario(name)["step"][0]
    return [step["length"] + number * step.get("vary", 0) for number in range(step["count"])]


def test_a_decode_hit_saves_latent_rows_and_no_index_keys() -> None:
    name, shape = "glm-dsa-cache", SHAPES["glm-dsa-cache"]
    # Whole pages are in D's cache after the first send: all but the last, unfinished one.
    cold, hot = ([crossing(prompt, prompt // 64 * 64 * hit) for prompt in prompts(name)] for hit in (0, 1))
    wanted = demanded(name)
    for send, sizes in (("cold", cold), ("hot", hot)):
        assert wanted[f"bytes({send})"] == shape.layers * shape.row * sum(latent for latent, _ in sizes)
        assert wanted[f"index_bytes({send})"] == shape.layers * INDEX_ROW * sum(index for _, index in sizes)


def test_layer_owners_send_a_quarter_each_and_rank_zero_sends_all_of_the_same_bytes() -> None:
    name, shape = "cp4-layer-split", SHAPES["cp4-layer-split"]
    sizes = [crossing(prompt, 0) for prompt in prompts(name)]
    tokens, index = (sum(part) for part in zip(*sizes, strict=True))
    owners, alone = (by_source(way, [1] * 4, tokens, shape.row) for way in (Way.LAYER_OWNER, Way.CP0))
    wanted = demanded(name)
    assert [wanted[f"bytes(split.cp{rank})"] for rank in range(4)] == owners
    assert wanted["bytes(whole)"] == sum(alone) == sum(owners)
    assert wanted["index_bytes(whole)"] == shape.layers * INDEX_ROW * index
    assert (wanted["sources(whole)"], wanted["sources(split)"]) == tuple(
        sum(1 for size in sizes if size) for sizes in (alone, owners)
    )


@pytest.mark.parametrize(("name", "small"), [("bounded-pack", "bounded"), ("bounded-pack-stock", "small")])
def test_rows_that_do_not_fit_the_buffer_are_slices_with_the_patch_and_a_descriptor_each_without(
    name: str, small: str
) -> None:
    shape, wanted, dcp = SHAPES[name], demanded(name), 2
    rows = prompts(name)[0] // dcp
    boot = tomllib.loads((SCENARIOS.parent / "boots/pack.toml").read_text(encoding="utf-8"))
    buffer = int(boot["engine"]["P-small"]["env"]["PATCHBUNDLE_RIG_PACK_BYTES"])
    packing = Packing(buffer, (shape.row,) * shape.layers, ROWS_OF_A_GRID)
    assert not packing.fits(rows)
    assert wanted["bytes(fits)"] == sum(prompts(name)) * shape.layers * shape.row
    # Packed rows are one piece a layer.
    assert wanted["blocks(fits)"] == shape.layers
    if small == "bounded":
        assert wanted["blocks(bounded)"] == shape.layers
        assert wanted["transfer_calls(bounded)"] == len(prompts(name)) * dcp * len(packing.slices(rows))
    else:
        assert wanted["blocks(small)"] == rows * shape.layers


def test_under_dcp_every_latent_row_crosses_once_in_slices_and_the_index_keys_to_each_rank() -> None:
    name, dcp = "dsa-dcp-cp2", 2
    shape, wanted = SHAPES[name], demanded(name)
    engines = tomllib.loads((SCENARIOS.parent / f"boots/{name}.toml").read_text(encoding="utf-8"))["engine"]
    buffer = int(engines["P-cp2"]["env"]["PATCHBUNDLE_RIG_PACK_BYTES"])
    flags = dict(flag.split("=") for flag in engines["P-cp2"]["flags"] if "=" in flag)
    chunk = int(flags["--chunked-prefill-size"])
    packing = Packing(buffer, (shape.row,) * shape.layers, ROWS_OF_A_GRID)
    # What each rank owns of each chunk.
    owned = [
        len(range(rank, min(chunk, prompt - start), dcp))
        for prompt in prompts(name)
        for start in range(0, prompt, chunk)
        for rank in range(dcp)
    ]
    assert not packing.fits(chunk // dcp)
    assert wanted["bytes(cp2)"] == sum(prompts(name)) * shape.layers * shape.row
    assert wanted["index_bytes(cp2)"] == dcp * shape.layers * INDEX_ROW * sum(crossing(p, 0)[1] for p in prompts(name))
    assert wanted["transfer_calls(cp2)"] == sum(len(packing.slices(rows)) for rows in owned)
    assert (wanted["blocks(cp2)"], wanted["sources(cp2)"]) == (shape.layers, dcp)


def test_a_hit_that_is_no_whole_page_or_longer_than_the_prompt_is_refused() -> None:
    for prompt, hit in ((100, 65), (100, 128), (0, 0), (100, -64)):
        with pytest.raises(ValueError, match="at decode"):
            crossing(prompt, hit)
