"""What was measured on a GPU was measured on the decode series as it is: a changed patch asks for its results anew."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import decode_gpu
from lab.rig import trees
from lab.rig.gpu import dsa_parts, pack

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / "evidence/engine"


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ENGINE / name).read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def thin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thin")
    decode_gpu.pack(folder)
    return folder


@pytest.mark.parametrize("name", ["stock", "patched"])
def test_retraction_was_measured_on_the_trees_as_they_are(thin: Path, name: str) -> None:
    assert result("h200-retraction.json")["trees"][name] == decode_gpu.digest(thin / name)


def test_another_line_in_a_tree_is_another_digest(thin: Path) -> None:
    (path,) = (thin / "patched").rglob("retract_draft.py")
    before, text = decode_gpu.digest(thin / "patched"), path.read_text(encoding="utf-8")
    path.write_text(text + "\n", encoding="utf-8")
    assert decode_gpu.digest(thin / "patched") != before
    path.write_text(text, encoding="utf-8")
    assert decode_gpu.digest(thin / "patched") == before


def test_the_merged_parts_went_through_the_localisation_as_it_is() -> None:
    source = ROOT / "sources/kernels" / Path(dsa_parts.LOCALISE).name
    files = result("h200-dsa-parts.json")["files"]
    assert files[dsa_parts.LOCALISE] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert set(files) == {dsa_parts.LOCALISE, dsa_parts.MERGE}


def test_an_archive_is_what_is_in_it_but_for_the_receipt(tmp_path: Path) -> None:
    def packed(**texts: str) -> str:
        for name, text in texts.items():
            path = tmp_path / name.replace("_", "/")
            path.parent.mkdir(exist_ok=True)
            path.with_suffix(".json").write_text(text, encoding="ascii")
        pack.archive(tmp_path, pack.files(tmp_path), tmp_path.with_suffix(".tar.xz"))
        return pack.content(tmp_path.with_suffix(".tar.xz"))

    first = packed(a_one="1", a_receipt="1")
    assert packed(a_receipt="2") == first
    assert packed(a_one="2") != first
    assert packed(a_one="1") == first
    assert packed(a_two="") != first


def since(name: str) -> dict[str, str]:
    """Digests that files of the patched tree had when ``name`` was measured, where they are others now."""
    path = Path(__file__).with_name(f"{Path(name).stem}-since.json")
    return dict(json.loads(path.read_text(encoding="utf-8"))["files"]) if path.exists() else {}


def content(packed: Path, instead: Mapping[str, str]) -> str:
    """``pack.content`` of an archive in which these files had these digests."""
    found = dict(instead)
    with tarfile.open(packed, "r:xz") as source:
        for member in source:
            made = source.extractfile(member)
            if made is not None and not member.name.endswith(f"/{pack.RECEIPT}"):
                found.setdefault(member.name, hashlib.sha256(made.read()).hexdigest())
    return hashlib.sha256("".join(f"{one}\0{found[one]}\n" for one in sorted(found)).encode()).hexdigest()


@pytest.mark.rig
@pytest.mark.parametrize("name", ["h200.json", "h200-x2.json"])
def test_whole_engines_ran_the_series_as_it_is_but_for_files_that_are_named(tmp_path: Path, name: str) -> None:
    patched, made = trees.patched("decode", print), tmp_path / pack.PATCHED
    pack.archive(patched, pack.changed(trees.stock("decode", print), patched), made)
    assert content(made, {}) == pack.content(made)
    named, ran = since(name), result(name)["patched_sha256"]
    assert content(made, named) == ran
    for file in named:  # none that has not changed, or is again what it was
        assert content(made, {one: digest for one, digest in named.items() if one != file}) != ran


def test_files_that_changed_since_a_run_hold_checks_of_the_start_alone_and_are_told() -> None:
    changed = {Path(name).name for result in ("h200.json", "h200-x2.json") for name in since(result)}
    assert changed <= {"dsa_dcp_guard.py", "narrow_topology.py", "pcp4_dcp2.py"}
    text = " ".join((ROOT / "docs/dsa-dcp.md").read_text(encoding="utf-8").split())
    for name in changed:
        assert f"`{name}`" in text.partition("Since that run")[2].partition(". ")[0]


def test_the_table_of_the_kernels_by_themselves_is_the_result() -> None:
    text = (ROOT / "docs/dsa-dcp.md").read_text(encoding="utf-8")
    cases = [one for one in result("h200-dsa-parts.json")["rows"] if "localise_us" in one]
    table = [one for one in cases if (one["heads"], one["ranks"]) == (64, 2)]
    assert len(table) == 6
    rows = [
        f"| `{one['kernel']}` | {one['rows']} | {one['attention_us']:.1f} | {one['localise_us']:.1f} |\n"
        for one in table
    ]
    assert "".join(rows) in text
    assert f"{len(cases)} of {len(cases)} cases hold" in text and all(one["holds"] for one in cases)
    assert f"1 + the value, is {max(one['max_error'] for one in cases):.4f};" in text
