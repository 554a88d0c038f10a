"""Tiny models: the same bytes from the same seed, damage found, weights that torch and the engines can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.rig import models, safetensors_file
from lab.rig.errors import RigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    models.write(models.get("mla-twin"), made)
    return made


def _copy(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_an_unknown_model_is_refused_with_the_known_names() -> None:
    with pytest.raises(RigError, match="mla-twin") as caught:
        models.get("nothing")
    assert caught.value.kind == "model"


def test_a_fresh_folder_passes_its_own_check(folder: Path) -> None:
    models.check(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_one_changed_byte_is_found(folder: Path, tmp_path: Path, name: str) -> None:
    copy = _copy(folder, tmp_path / "copy")
    data = bytearray((copy / name).read_bytes())
    data[-2] ^= 1
    (copy / name).write_bytes(data)
    with pytest.raises(RigError, match=f"{name} is damaged"):
        models.check(copy)


def test_a_missing_file_is_found(folder: Path, tmp_path: Path) -> None:
    copy = _copy(folder, tmp_path / "copy")
    (copy / "tokenizer.json").unlink()
    with pytest.raises(RigError, match=r"tokenizer\.json is missing"):
        models.check(copy)


def test_a_file_too_many_is_found(folder: Path, tmp_path: Path) -> None:
    copy = _copy(folder, tmp_path / "copy")
    (copy / "extra.py").write_text("")
    with pytest.raises(RigError, match=r"extra.py does not belong"):
        models.check(copy)


@pytest.mark.parametrize("content", ["", "[]", '{"files": 3}'])
def test_a_manifest_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / models.MANIFEST).write_text(content)
    with pytest.raises(RigError, match="no readable"):
        models.check(tmp_path)


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RigError, match="no readable"):
        models.check(tmp_path)


def test_the_same_seed_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    models.write(models.get("mla-twin"), again)
    assert {path.name: path.read_bytes() for path in again.iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }


def test_another_seed_gives_other_weights(folder: Path, tmp_path: Path) -> None:
    model = models.get("mla-twin")
    other = models.Model(model.name, model.about, model.config, model.twin, seed=1)
    models.write(other, tmp_path / "other")
    assert other.digest != model.digest
    assert (tmp_path / "other" / "model.safetensors").read_bytes() != (folder / "model.safetensors").read_bytes()


def test_every_model_has_its_own_digest() -> None:
    assert len({model.digest for model in models.MODELS.values()}) == len(models.MODELS)


def test_the_kinds_of_models_that_the_scenarios_need_are_there() -> None:
    select = models.get("glm-dsa-select").config
    assert select["index_topk"] == 64
    assert models.get("glm-dsa-iteration").config["index_share_for_mtp_iteration"] is True
    assert all(models.get(name).twin for name in ("mla-twin", "glm-dsa-twin"))


def test_torch_reads_the_weights_as_they_were_meant(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    header = safetensors_file.read_header(folder / "model.safetensors")
    raw = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")

    def tensor(name: str) -> Any:
        first, last = (int(number) for number in header[name]["data_offsets"])  # type: ignore[attr-defined]
        kind = torch.bfloat16 if header[name]["dtype"] == "BF16" else torch.float32
        return torch.frombuffer(bytearray(raw[start + first : start + last]), dtype=kind).reshape(header[name]["shape"])

    # The twin's rule: layer 0 adds nothing, the draft layer is the target layer, and it sees the embedding alone.
    assert not torch.any(tensor("model.layers.0.self_attn.o_proj.weight"))
    assert not torch.any(tensor("model.layers.0.mlp.down_proj.weight"))
    shared = [name for name in header if name.startswith("model.layers.1.")]
    assert len(shared) > 10
    for name in shared:
        assert torch.equal(tensor(name), tensor(name.replace("layers.1.", "layers.2.")))
    joined = tensor("model.layers.2.eh_proj.weight")
    assert torch.equal(joined[:, :128].float(), torch.eye(128)) and not torch.any(joined[:, 128:])


def test_bfloat16_rounding_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    values[:4] = [1.00390625, 1.01171875, -1.00390625, 0.0]  # ties go to the even neighbour
    bits = safetensors_file.bfloat16_bits(values).astype(np.int64)
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().astype(np.int64) & 0xFFFF
    assert np.array_equal(bits, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        safetensors_file.bfloat16_bits(np.array([1.0, bad], dtype=np.float32))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda raw: raw[:-1], "bytes of data"),
        (lambda raw: raw + b"x", "bytes of data"),
        (lambda raw: (1 << 40).to_bytes(8, "little") + raw[8:], "header of"),
        (lambda raw: raw[:8] + b"?" + raw[9:], "not JSON"),
    ],
)
def test_a_damaged_weight_file_is_told_from_a_good_one(folder: Path, tmp_path: Path, damage: object, told: str) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(damage((folder / "model.safetensors").read_bytes()))  # type: ignore[operator]
    with pytest.raises(ValueError, match=told):
        safetensors_file.read_header(path)


def test_the_tokenizer_has_a_token_for_every_byte(folder: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(259))
    assert len(set(models.byte_alphabet())) == 256
    assert [vocabulary[special] for special in models.SPECIAL] == [256, 257, 258]
    assert data["model"]["merges"] == []
