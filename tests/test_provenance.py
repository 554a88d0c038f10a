"""What ``attest`` writes, on the toy. Against the published schemas and signed: tests/extras."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests import toy as toys
from tests import trees
from tests.toy import Toy

ENGINE, OLD = "sglang/srt/engine.py", "sglang/srt/old.py"


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return toys.make(tmp_path)


def attested(toy: Toy, out: Path, *more: str | Path) -> dict[str, Any]:
    result = trees.run(toy, "attest", "--out", out, *more, "--json")
    assert result.code == 0, result.out
    assert result.table["result"]["documents"] == sorted(path.name for path in out.iterdir())
    return {path.name: json.loads(path.read_bytes()) for path in out.iterdir() if path.suffix == ".json"}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_subjects_are_the_bytes_that_apply_makes_and_materials_those_of_before(toy: Toy, tmp_path: Path) -> None:
    old = {path: (toy.tree / path).read_bytes() for path in toys.BASE}
    documents = attested(toy, tmp_path / "out")
    assert trees.apply(toy).code == 0
    statement = documents["prefill.intoto.json"]
    subjects = {item["name"]: item["digest"]["sha256"] for item in statement["subject"]}
    made = toys.after(3)
    changed = {path for path, file in made.items() if file != toys.BASE.get(path)} | {f"{toys.HOME}/receipt.json"}
    assert subjects == {path: sha256((toy.tree / path).read_bytes()) for path in changed}
    materials = {item["name"]: item["digest"]["sha256"] for item in statement["predicate"]["materials"]}
    wheel = next((toy.cache / "archives").glob("*/*.whl"))
    wanted = {wheel.name: sha256(wheel.read_bytes())}
    wanted |= {
        f"{toys.BASE_ID}/{path}": sha256(data) for path, data in old.items() if made.get(path) != toys.BASE[path]
    }
    bundled = [*(toy.bundle / "patches/prefill").iterdir(), *(toy.bundle / "sources").rglob("*.*")]
    for path in [*bundled, toy.bundle / "patches/pins.lock"]:
        wanted[path.relative_to(toy.bundle).as_posix()] = sha256(path.read_bytes())
    assert materials == wanted
    assert statement["predicate"]["byproducts"]["removed"] == [OLD]


def test_each_patch_is_in_the_pedigree_with_its_diff_and_what_it_resolves(toy: Toy, tmp_path: Path) -> None:
    path = toy.bundle / "patches/prefill/alpha-first.patch"
    link = "https://github.com/sgl-project/sglang/pull/1"
    path.write_bytes(path.read_bytes().replace(b"Class: environment-only", f"Class: temporary, {link}".encode()))
    toy.pin()
    pedigree = attested(toy, tmp_path / "out")["prefill.cdx.json"]["metadata"]["component"]["pedigree"]
    assert [patch["resolves"][0]["id"] for patch in pedigree["patches"]] == list(toys.LEVELS)
    assert [patch["resolves"][0]["type"] for patch in pedigree["patches"]] == ["defect", "enhancement", "enhancement"]
    assert pedigree["patches"][0]["resolves"][0]["references"] == [link]
    assert "references" not in pedigree["patches"][1]["resolves"][0]
    diffs = [base64.b64decode(patch["diff"]["text"]["content"]) for patch in pedigree["patches"]]
    assert diffs == [(toy.bundle / f"patches/prefill/{level}.patch").read_bytes() for level in toys.LEVELS]
    assert pedigree["ancestors"][0]["purl"] == "pkg:pypi/sglang@0.5.19"


def test_of_a_tree_it_tells_the_level_at_which_the_tree_stands(toy: Toy, tmp_path: Path) -> None:
    assert trees.apply(toy, "--to", "alpha-first").code == 0
    documents = attested(toy, tmp_path / "out", "--root", toy.tree)
    byproducts = documents["prefill.intoto.json"]["predicate"]["byproducts"]
    assert (byproducts["level"], byproducts["patches"], byproducts["removed"]) == (1, ["alpha-first"], [])
    assert len(documents["prefill.cdx.json"]["metadata"]["component"]["pedigree"]["patches"]) == 1


def test_a_tree_at_base_has_nothing_to_attest(toy: Toy, tmp_path: Path) -> None:
    result = trees.run(toy, "attest", "--out", tmp_path / "out", "--root", toy.tree, "--json")
    assert (result.code, result.reason) == (1, "not-expected")
    assert not (tmp_path / "out").exists()


def test_nothing_is_attested_of_a_drifted_tree(toy: Toy, tmp_path: Path) -> None:
    (toy.tree / ENGINE).write_bytes(b"other\n")
    result = trees.run(toy, "attest", "--out", tmp_path / "out", "--root", toy.tree, "--json")
    assert (result.code, result.reason) == (1, "drift")
    assert not (tmp_path / "out").exists()


def test_the_documents_are_the_same_bytes_each_time(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attested(toy, tmp_path / "one")
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    monkeypatch.setenv("LC_ALL", "C")
    attested(toy, tmp_path / "two")
    assert [path.read_bytes() for path in sorted((tmp_path / "one").iterdir())] == [
        path.read_bytes() for path in sorted((tmp_path / "two").iterdir())
    ]


@pytest.mark.parametrize("taken", ["file", "folder", "link"])
def test_what_stands_at_the_output_is_refused_and_kept(taken: str, toy: Toy, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if taken == "link":
        out.symlink_to("nowhere")
    else:
        (out.touch if taken == "file" else out.mkdir)()
    before = trees.snapshot(tmp_path)
    result = trees.run(toy, "attest", "--out", out, "--json")
    assert (result.code, result.reason) == (1, "output")
    assert trees.snapshot(tmp_path) == before


def test_no_folder_above_the_output_is_refused(toy: Toy, tmp_path: Path) -> None:
    result = trees.run(toy, "attest", "--out", tmp_path / "no/out", "--json")
    assert (result.code, result.reason) == (1, "output")


def test_a_key_without_the_program_that_signs_leaves_no_folder(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_bytes(b"")
    monkeypatch.setenv("PATH", str(toy.cache))
    result = trees.run(toy, "attest", "--out", tmp_path / "out", "--sign", tmp_path / "key", "--json")
    assert (result.code, result.reason) == (1, "no-program")
    assert not list(tmp_path.glob("*out*"))
