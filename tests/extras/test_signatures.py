"""Signatures by the real minisign, and documents by their published schemas."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import toy as toys
from tests import trees
from tests.extras.conftest import program
from tests.toy import Toy

pytestmark = pytest.mark.extras

Keys = tuple[Path, Path]
SIGNATURE = "patches/pins.lock.minisig"


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return toys.make(tmp_path)


@pytest.fixture
def signed(toy: Toy, keys: Keys, tmp_path: Path) -> Toy:
    result = trees.run(toy, "attest", "--out", tmp_path / "signed", "--sign", keys[1], "--json")
    assert result.code == 0, result.out
    assert [name for name in result.table["result"]["documents"] if name.endswith(".minisig")]
    shutil.copy(tmp_path / "signed/pins.lock.minisig", toy.bundle / SIGNATURE)
    return toy


def both(toy: Toy, *words: str | Path) -> list[trees.Result]:
    """What apply and check say, on a tree at base."""
    options = ["--require-signature", *words, "--json"]
    return [trees.run(toy, "apply", "--root", toy.tree, "-n", *options), trees.check(toy, *options)]


def refused(toy: Toy, *words: str | Path) -> None:
    before = trees.snapshot(toy.tree)
    for result in both(toy, *words):
        assert (result.code, result.reason) == (1, "signature")
    assert trees.run(toy, "apply", "--root", toy.tree, "--require-signature", *words).code == 1
    assert trees.snapshot(toy.tree) == before


def test_every_file_that_attest_signs_is_verified_by_minisign(signed: Toy, keys: Keys, tmp_path: Path) -> None:
    files = [path for path in (tmp_path / "signed").iterdir() if path.suffix != ".minisig"]
    assert len(files) == 3
    for path in files:
        subprocess.run([program("minisign"), "-V", "-p", keys[0], "-m", path], check=True, capture_output=True)


def test_with_the_right_key_both_hold_and_tell_what_was_signed(signed: Toy, keys: Keys) -> None:
    word = keys[0].read_text().splitlines()[1]
    for key in (keys[0], word):
        for result in both(signed, key):
            assert result.code == 0, result.out
            digest = trees.check(signed, "--json").table["result"]["bundle"]["digest"]
            assert digest in result.table["result"]["signature"]
    assert trees.apply(signed, "--require-signature", keys[0]).code == 0
    assert trees.check(signed, "--expect", "applied", "--require-signature", keys[0]).code == 0


def test_a_signature_may_lie_elsewhere(signed: Toy, keys: Keys, tmp_path: Path) -> None:
    (signed.bundle / SIGNATURE).rename(tmp_path / "elsewhere")
    refused(signed, keys[0])
    for result in both(signed, keys[0], "--signature", tmp_path / "elsewhere"):
        assert result.code == 0


def test_no_signature_is_refused(toy: Toy, keys: Keys) -> None:
    refused(toy, keys[0])


def test_a_signature_by_another_key_is_refused(signed: Toy, keys: Keys, tmp_path: Path) -> None:
    other = tmp_path / "other.pub"
    words: list[str | Path] = [program("minisign"), "-G", "-W", "-p", other, "-s", tmp_path / "other.sec"]
    subprocess.run(words, check=True, capture_output=True)
    refused(signed, other)


@pytest.mark.parametrize("what", ["cut", "empty", "of another file", "one bit", "a folder"])
def test_a_wrong_signature_is_refused(what: str, signed: Toy, keys: Keys, tmp_path: Path) -> None:
    place = signed.bundle / SIGNATURE
    data = place.read_bytes()
    lines = data.splitlines(keepends=True)
    place.unlink()
    if what == "a folder":
        place.mkdir()
    else:
        flipped = lines[1].replace(lines[1][30:31], b"A" if lines[1][30:31] != b"A" else b"B", 1)
        place.write_bytes({
            "cut": data[: len(data) // 2],
            "empty": b"",
            "of another file": (tmp_path / "signed/prefill.cdx.json.minisig").read_bytes(),
            "one bit": b"".join([lines[0], flipped, *lines[2:]]),
        }[what])  # fmt: skip
    refused(signed, keys[0])


def test_a_bundle_that_was_pinned_again_has_lost_its_signature(signed: Toy, keys: Keys) -> None:
    source = signed.bundle / "sources/prefill/alpha.py"
    source.write_bytes(source.read_bytes() + b"# more\n")
    signed.pin()
    refused(signed, keys[0])


@pytest.mark.parametrize("key", ["RWnonsense", "no/such/file", "", "RW" + "A" * 54])
def test_what_is_no_key_of_the_signer_is_refused(key: str, signed: Toy) -> None:
    refused(signed, key)


def test_a_fifo_in_the_place_of_the_key_is_no_key(signed: Toy, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    refused(signed, tmp_path / "fifo")


def test_a_wrong_secret_key_leaves_no_folder(toy: Toy, keys: Keys, tmp_path: Path) -> None:
    for key in (keys[0], tmp_path / "nowhere"):
        result = trees.run(toy, "attest", "--out", tmp_path / "out", "--sign", key, "--json")
        assert (result.code, result.reason) == (1, "signature")
        assert not list(tmp_path.glob("*out*"))


# The published schemas.


@pytest.fixture(params=["toy", "bundle"])
def documents(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The documents of the toy, and of this repository's own bundle."""
    toy = toys.make(tmp_path)
    words = [] if request.param == "toy" else ["--bundle", str(trees.REPOSITORY)]
    assert trees.run(toy, "attest", "--out", tmp_path / "out", *words).code == 0
    return tmp_path / "out"


def test_every_bill_of_materials_is_valid_cyclonedx_1_6(documents: Path) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    validator = JsonStrictValidator(SchemaVersion.V1_6)
    made = list(documents.glob("*.cdx.json"))
    assert made
    for path in made:
        assert validator.validate_str(path.read_text(encoding="utf-8")) is None
        broken = json.loads(path.read_bytes())
        broken["metadata"]["component"]["pedigree"]["patches"][0]["type"] = "ours"
        assert validator.validate_str(json.dumps(broken)) is not None


def test_every_statement_is_a_valid_in_toto_statement_with_a_valid_link(documents: Path) -> None:
    from google.protobuf import json_format
    from in_toto_attestation.predicates.link.v0 import link_pb2
    from in_toto_attestation.v1 import statement_pb2
    from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
    from in_toto_attestation.v1.statement import Statement

    made = list(documents.glob("*.intoto.json"))
    assert made
    for path in made:
        table = json.loads(path.read_bytes())
        # A field that the published message does not have is an error of the reader.
        Statement.copy_from_pb(json_format.ParseDict(table, statement_pb2.Statement())).validate()
        link = json_format.ParseDict(table["predicate"], link_pb2.Link())
        for material in link.materials:
            ResourceDescriptor.copy_from_pb(material).validate()
        with pytest.raises(json_format.ParseError):
            json_format.ParseDict({**table, "surprise": 1}, statement_pb2.Statement())
