"""A series on an image, as a layer: what is read, what is written, what is refused. By other programs: tests/extras."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from patchbundle.identity import File
from tests import images, trees
from tests import toy as toys
from tests.images import SITE, Item, Layout, folder, link, tar
from tests.toy import Toy
from tests.trees import Result
from workstation import streams

ENGINE = f"{SITE}/sglang/srt/engine.py"
OURS = f"{SITE}/{toys.HOME}"
NEVER_CHECKED = b"\xa7\r\r\n" + (1).to_bytes(4, "little") + bytes(8) + b"code"
BY_TIME = b"\xa7\r\r\n" + bytes(4) + bytes(8) + b"code"


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return toys.make(tmp_path / "toy")


def distribution(toy: Toy, root: str = SITE, **more: Any) -> list[Item]:
    return images.files_of(images.tree_files(toy.tree), root, **more)


def run(toy: Toy, source: Path, out: Path, *more: str) -> Result:
    words: list[str | Path] = ["--from", source, "--to", out, "--role", "prefill", "--json"]
    platform = [] if "--platform" in more else ["--platform", "linux/amd64"]
    return trees.run(toy, "image", *words, *platform, *more)


def patched(toy: Toy, layers: Sequence[bytes], tmp_path: Path, *more: str, **image: Any) -> dict[str, Any]:
    """The image that the verb makes of these layers."""
    Layout(tmp_path / "in").image(layers, **image)
    result = run(toy, tmp_path / "in", tmp_path / "out", *more)
    assert result.code == 0, result.out
    return images.read(tmp_path / "out")


def refused(toy: Toy, source: Path, reason: str, *more: str) -> dict[str, Any]:
    """The refusal; nothing is left at the output, nor beside it."""
    beside = set(source.parent.iterdir())
    result = run(toy, source, source.parent / "refused", *more)
    assert (result.code, result.reason) == ({"recovery-needed": 4}.get(reason, 1), reason), result.out
    assert set(source.parent.iterdir()) == beside
    error: dict[str, Any] = result.table["error"]
    assert error["next"]
    return error


def files(stands: dict[str, images.Stands]) -> dict[str, bytes]:
    return {path: item.data for path, item in stands.items() if item.kind != tarfile.DIRTYPE}


# What it writes.


def test_the_files_are_those_that_a_run_in_place_makes(toy: Toy, tmp_path: Path) -> None:
    made = patched(toy, [tar([folder("usr")]), tar(distribution(toy))], tmp_path)
    assert trees.apply(toy).code == 0
    in_place = {f"{SITE}/{path}": file.data for path, file in images.tree_files(toy.tree).items()}
    assert files(images.flat(made["layers"])) == in_place


@pytest.mark.parametrize("compression", ["gzip", ""], ids=["gzip", "plain"])
def test_a_layer_that_takes_it_off_gives_the_files_owners_and_modes_of_the_base(
    compression: str, toy: Toy, tmp_path: Path
) -> None:
    base = [tar([folder("usr")]), tar(distribution(toy, uid=1000, gid=2000))]
    made = patched(toy, base, tmp_path, compression=compression)
    result = run(toy, tmp_path / "out", tmp_path / "back", "--image", "latest", "--revert")
    assert result.code == 0, result.out
    back = images.read(tmp_path / "back")
    assert len(back["layers"]) == 4
    assert images.flat(back["layers"]) == images.flat(images.read(tmp_path / "in")["layers"])
    assert made["manifest"]["annotations"]["org.opencontainers.image.base.digest"]


def test_two_builds_give_the_same_digests_whatever_the_path_umask_time_and_locale(toy: Toy, tmp_path: Path) -> None:
    items = [*distribution(toy), Item(f"{SITE}/sglang/srt/__pycache__/engine.cpython-311.pyc", BY_TIME)]
    made = []
    for name, umask, zone, locale, seed in (
        ("a", 0o022, "UTC", "C", "1"),
        ("b/c", 0o077, "Asia/Tokyo", "C.UTF-8", "2"),
    ):
        place = tmp_path / name
        place.mkdir(parents=True)
        Layout(place / "in").image([tar(items)])
        for path in (place / "in").rglob("*"):
            os.utime(path, (umask, umask))
        words: list[str | Path] = [
            sys.executable,
            trees.REPOSITORY / "tools/apply.py",
            "image",
            "--bundle",
            toy.bundle,
            "--from",
            "in",
        ]
        words += ["--to", "out", "--role", "prefill", "--platform", "linux/amd64"]
        environment = {**toy.environment, "TZ": zone, "LC_ALL": locale, "PYTHONHASHSEED": seed}
        subprocess.run(words, cwd=place, env=environment, umask=umask, check=True, capture_output=True)
        made.append(
            {path.relative_to(place): path.read_bytes() for path in (place / "out").rglob("*") if path.is_file()}
        )
    assert made[0] == made[1]
    assert len(made[0]) == 2 + 2 + 4


def test_owners_modes_and_attributes_of_changed_files_and_of_folders_above_are_kept(toy: Toy, tmp_path: Path) -> None:
    label = {"user.label": b"a=b\n\xff", "security.capability": b"\x01\x00\x00\x02"}
    items = [
        folder("usr", 0o711, uid=3),
        *(item for item in distribution(toy, uid=7, gid=8) if item.name not in ("usr", ENGINE, f"{SITE}/sglang/srt")),
        folder(f"{SITE}/sglang/srt", 0o2775, uid=5, gid=6, attributes={"user.of": b"folder"}),
        Item(ENGINE, toys.ENGINE, mode=0o4640, uid=1, gid=2, attributes=label),
    ]
    stands = images.flat(patched(toy, [tar(items)], tmp_path)["layers"])
    engine = stands[ENGINE]
    assert (engine.data, oct(engine.mode), engine.uid, engine.gid) == (toys.ENGINE_BETA, "0o4640", 1, 2)
    assert {key: text.encode("utf-8", "surrogateescape") for key, text in engine.attributes.items()} == {
        f"SCHILY.xattr.{name}": data for name, data in label.items()
    }
    assert (oct(stands["usr"].mode), stands["usr"].uid) == ("0o711", 3)
    above = stands[f"{SITE}/sglang/srt"]
    assert (oct(above.mode), above.uid, above.gid) == ("0o2775", 5, 6)
    assert above.attributes == {"SCHILY.xattr.user.of": "folder"}
    # What is new is the folder's: bits as the run gives them, owner as the folder's.
    assert [(stands[path].uid, stands[path].gid) for path in (OURS, f"{OURS}/alpha.py")] == [(5, 6), (5, 6)]
    launch = stands[f"{SITE}/sglang/srt/launch.sh"]
    assert (oct(launch.mode), launch.uid) == ("0o755", 7)


def test_files_that_nobody_may_read_keep_such_bits(toy: Toy, tmp_path: Path) -> None:
    items = [item for item in distribution(toy) if item.name != ENGINE]
    made = patched(toy, [tar([*items, Item(ENGINE, toys.ENGINE, mode=0)])], tmp_path)
    assert images.flat(made["layers"])[ENGINE].mode == 0


def test_a_folder_that_no_layer_names_is_made_open_and_roots(toy: Toy, tmp_path: Path) -> None:
    items = [item for item in distribution(toy, uid=9) if item.kind != tarfile.DIRTYPE]
    made = patched(toy, [tar(items)], tmp_path)
    stands = images.flat(made["layers"])
    assert (oct(stands["usr/local"].mode), stands["usr/local"].uid) == ("0o755", 0)


def test_history_annotations_and_index_tell_base_bundle_and_the_way_back(toy: Toy, tmp_path: Path) -> None:
    base = Layout(tmp_path / "in").image([tar(distribution(toy))], config={"config": {"Env": ["A=b"], "User": "x"}})
    assert run(toy, tmp_path / "in", tmp_path / "out", "--level", "beta-second").code == 0
    made = images.read(tmp_path / "out")
    digest = trees.check(toy, "--json").table["result"]["bundle"]["digest"]
    assert made["manifest"]["annotations"] == {
        "org.opencontainers.image.base.digest": base["digest"],
        "org.opencontainers.image.base.name": "latest",
        "patchbundle.bundle": digest,
        "patchbundle.base": toys.BASE_ID,
        "patchbundle.role": "prefill",
        "patchbundle.level": "beta-second",
        "patchbundle.root": f"/{SITE}",
    }
    config = made["config"]
    assert [entry["created_by"] for entry in config["history"]] == ["layer 0", "patchbundle image --role prefill"]
    assert config["history"][-1]["comment"] == f"base to beta-second, bundle {digest}"
    assert config["config"] == {"Env": ["A=b"], "User": "x"}
    assert len(config["rootfs"]["diff_ids"]) == len(made["manifest"]["layers"]) == 2
    # The previous manifest is the way back, and is there under its own name, byte for byte.
    back = images.read(tmp_path / "out", "latest-base")
    assert back["digest"] == base["digest"]
    assert back["manifest"] == images.read(tmp_path / "in")["manifest"]


def test_an_image_without_a_name_or_history_gets_no_history_and_a_plain_name(toy: Toy, tmp_path: Path) -> None:
    Layout(tmp_path / "in").image([tar(distribution(toy))], name=None, config={"history": [], "created": None})
    assert run(toy, tmp_path / "in", tmp_path / "out").code == 0
    made = images.read(tmp_path / "out", "patched")
    assert made["config"]["history"] == []
    assert "org.opencontainers.image.base.name" not in made["manifest"]["annotations"]
    assert images.read(tmp_path / "out", "base")["manifest"]
    # With no time of its own, it is a second after the file that is replaced.
    assert {item.mtime for item in made["layers"][-1] if item.name == ENGINE} == {images.WHEN - 999}


def test_blobs_of_the_base_are_shared_and_the_source_stays_as_it_was(toy: Toy, tmp_path: Path) -> None:
    Layout(tmp_path / "in").image([tar(distribution(toy))])
    before = trees.snapshot(tmp_path / "in")
    assert run(toy, tmp_path / "in", tmp_path / "out").code == 0
    assert trees.snapshot(tmp_path / "in") == before
    layer = images.read(tmp_path / "in")["manifest"]["layers"][0]["digest"].removeprefix("sha256:")
    assert (tmp_path / "out/blobs/sha256" / layer).samefile(tmp_path / "in/blobs/sha256" / layer)


def test_where_blobs_cannot_be_shared_they_are_copied_while_they_are_read(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    Layout(tmp_path / "in").image([tar(distribution(toy))])
    with monkeypatch.context() as patch:
        patch.setattr("workstation.image.os.link", refuse)
        assert run(toy, tmp_path / "in", tmp_path / "out").code == 0
    assert images.flat(images.read(tmp_path / "out", "latest-base")["layers"])
    layer = images.read(tmp_path / "in")["manifest"]["layers"][0]["digest"].removeprefix("sha256:")
    assert not (tmp_path / "out/blobs/sha256" / layer).samefile(tmp_path / "in/blobs/sha256" / layer)


def test_an_image_that_is_there_already_is_not_written(toy: Toy, tmp_path: Path) -> None:
    patched(toy, [tar(distribution(toy))], tmp_path)
    before = set(tmp_path.iterdir())
    for more in ([], ["--dry-run"], ["--level", "gamma-third"]):
        assert run(toy, tmp_path / "out", tmp_path / "again", "--image", "latest", *more).code == 3
    assert set(tmp_path.iterdir()) == before


def test_a_dry_run_writes_nothing(toy: Toy, tmp_path: Path) -> None:
    Layout(tmp_path / "in").image([tar(distribution(toy))])
    before = trees.snapshot(tmp_path)
    result = run(toy, tmp_path / "in", tmp_path / "out", "-n")
    assert (result.code, result.table["result"]["plan"]["to"]) == (0, "gamma-third")
    assert "image" not in result.table["result"]
    assert trees.snapshot(tmp_path) == before


@pytest.mark.parametrize("taken", ["file", "folder", "link", "the source itself"])
def test_what_stands_at_the_output_is_refused_and_kept(taken: str, toy: Toy, tmp_path: Path) -> None:
    Layout(tmp_path / "in").image([tar(distribution(toy))])
    out = tmp_path / ("in" if taken == "the source itself" else "out")
    if taken == "link":
        out.symlink_to("nowhere")
    elif taken != "the source itself":
        (out.touch if taken == "file" else out.mkdir)()
    before = trees.snapshot(tmp_path)
    assert run(toy, tmp_path / "in", out).reason == "output"
    assert trees.snapshot(tmp_path) == before


# What it reads: layers, whiteouts, links.


def test_the_upper_layer_decides(toy: Toy, tmp_path: Path) -> None:
    lower = [item if item.name != ENGINE else Item(ENGINE, b"older\n") for item in distribution(toy)]
    made = patched(toy, [tar(lower), tar([Item(ENGINE, toys.ENGINE)])], tmp_path)
    assert images.flat(made["layers"])[ENGINE].data == toys.ENGINE_BETA
    assert run(toy, tmp_path / "in", tmp_path / "no", "--level", "base").code == 3


def test_what_a_whiteout_hides_is_not_there(toy: Toy, tmp_path: Path) -> None:
    foreign = f"{OURS}/foreign.py"
    layers = [
        tar([*distribution(toy), folder(OURS), Item(foreign, b"x")]),
        tar([Item(f"{SITE}/sglang/srt/.wh.research")]),
    ]
    made = patched(toy, layers, tmp_path)
    assert foreign not in images.flat(made["layers"])
    Layout(tmp_path / "without").image(layers[:1])
    assert "research" in refused(toy, tmp_path / "without", "drift")["where"]


def test_a_whiteout_of_a_touched_file_is_drift(toy: Toy, tmp_path: Path) -> None:
    Layout(tmp_path / "in").image([tar(distribution(toy)), tar([Item(f"{SITE}/sglang/srt/.wh.engine.py")])])
    error = refused(toy, tmp_path / "in", "drift")
    assert error["where"].startswith(f"the image: /{ENGINE} (missing")
    assert f"--root /{SITE}" in error["next"]


@pytest.mark.parametrize("first", [True, False], ids=["opaque first", "opaque last"])
def test_an_opaque_folder_hides_lower_layers_and_nothing_of_its_own(first: bool, toy: Toy, tmp_path: Path) -> None:
    stale = [folder(OURS), Item(f"{OURS}/foreign.py", b"x"), folder(f"{OURS}/deep"), Item(f"{OURS}/deep/x", b"x")]
    lower = [*distribution(toy), *stale, Item(f"{SITE}/sglang/srt/layers/foreign", b"x")]
    upper = [item for item in distribution(toy) if item.name.startswith(f"{SITE}/sglang")]
    opaque = [Item(f"{SITE}/sglang/.wh..wh..opq")]
    made = patched(toy, [tar(lower), tar([*opaque, *upper] if first else [*upper, *opaque])], tmp_path)
    stands = images.flat(made["layers"])
    assert f"{OURS}/foreign.py" not in stands
    assert stands[ENGINE].data == toys.ENGINE_BETA


def test_a_folder_that_was_replaced_by_a_file_is_gone_with_all_in_it(toy: Toy, tmp_path: Path) -> None:
    layers = [tar([*distribution(toy, "opt/old"), *distribution(toy)]), tar([Item("opt/old", b"a file now")])]
    assert patched(toy, layers, tmp_path)["manifest"]["annotations"]["patchbundle.root"] == f"/{SITE}"


def test_names_below_a_link_are_where_the_link_leads(toy: Toy, tmp_path: Path) -> None:
    lower = [folder("usr"), folder("usr/real"), link("usr/local", "real"), link("abs", "/usr/./local/../local")]
    under = distribution(toy, "abs/lib")
    made = patched(toy, [tar(lower), tar([item for item in under if item.name != "abs"])], tmp_path)
    assert made["manifest"]["annotations"]["patchbundle.root"] == "/usr/real/lib"
    assert "usr/real/lib/sglang/srt/engine.py" in made["layers"][-1].getnames()


def test_a_second_name_of_a_file_shares_its_bytes_and_is_replaced_alone(toy: Toy, tmp_path: Path) -> None:
    items = [item for item in distribution(toy) if item.name != ENGINE]
    store = "root/.cache/uv/sglang/srt/engine.py"
    second = Item(ENGINE, kind=tarfile.LNKTYPE, target=store)
    layers = [tar([*items, Item(store, toys.ENGINE, uid=4), second])]
    Layout(tmp_path / "in").image(layers)
    result = run(toy, tmp_path / "in", tmp_path / "out", "--root", f"/{SITE}")
    assert result.code == 0, result.out
    stands = images.flat(images.read(tmp_path / "out")["layers"])
    assert (stands[ENGINE].data, stands[ENGINE].uid) == (toys.ENGINE_BETA, 4)
    assert stands[store].data == toys.ENGINE


def test_bytes_that_went_by_under_a_name_of_no_concern_are_read_again(toy: Toy, tmp_path: Path) -> None:
    items = [item for item in distribution(toy) if item.name != ENGINE]
    layers = [
        tar([Item("store/by-hash/1f", toys.ENGINE)]),
        tar([*items, Item(ENGINE, b"", tarfile.LNKTYPE, target="store/by-hash/1f")]),
    ]
    made = patched(toy, layers, tmp_path)
    assert images.flat(made["layers"])[ENGINE].data == toys.ENGINE_BETA


def test_compiled_files_of_touched_modules_become_whiteouts_and_others_stay(toy: Toy, tmp_path: Path) -> None:
    caches = [f"{SITE}/sglang/srt/__pycache__/{name}.cpython-311.pyc" for name in ("engine", "old", "__init__")]
    prefix = f"var/pyc/{SITE}/sglang/srt/engine.cpython-311.pyc"
    items = [*distribution(toy), *(Item(path, BY_TIME) for path in (*caches, prefix))]
    made = patched(toy, [tar(items)], tmp_path, config={"config": {"Env": ["PYTHONPYCACHEPREFIX=/var/pyc"]}})
    stands = images.flat(made["layers"])
    assert [path for path in (*caches, prefix) if path in stands] == [caches[2]]


def test_a_compiled_file_that_is_never_checked_hides_no_other_module(toy: Toy, tmp_path: Path) -> None:
    assert trees.apply(toy, "--to", "alpha-first").code == 0
    path = f"{OURS}/__pycache__/gates.cpython-311.pyc"
    Layout(tmp_path / "in").image([tar([*distribution(toy), folder(f"{OURS}/__pycache__"), Item(path, NEVER_CHECKED)])])
    assert path in refused(toy, tmp_path / "in", "bytecode")["where"]


def test_it_goes_up_and_down_by_levels_and_from_what_a_build_step_made(toy: Toy, tmp_path: Path) -> None:
    assert trees.apply(toy, "--to", "alpha-first").code == 0
    made = patched(toy, [tar(distribution(toy))], tmp_path, "--level", "beta-second")
    assert images.flat(made["layers"])[ENGINE].data == toys.ENGINE_BETA
    down = ["--image", "latest", "--revert", "--level", "alpha-first"]
    assert run(toy, tmp_path / "out", tmp_path / "down", *down).code == 0
    assert images.flat(images.read(tmp_path / "down")["layers"])[ENGINE].data == toys.ENGINE_ALPHA
    assert run(toy, tmp_path / "down", tmp_path / "no", "--image", "latest", "--level", "base").reason == "not-expected"


# Which image.


def test_of_an_index_the_platform_that_was_asked_for_is_taken(toy: Toy, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "in")
    both = [
        layout.image([tar(distribution(toy, uid=uid))], architecture=name, name=None, listed=False)
        for name, uid in (("amd64", 1), ("arm64", 2))
    ]
    unknown = {**both[0], "platform": {"os": "unknown", "architecture": "unknown"}}
    inner = json.dumps({"schemaVersion": 2, "manifests": [*both, unknown]}).encode()
    layout.manifests = [{**layout.blob(inner, images.INDEX), "annotations": {"org.opencontainers.image.ref.name": "v"}}]
    layout.write()
    assert run(toy, tmp_path / "in", tmp_path / "out", "--platform", "linux/arm64").code == 0
    made = images.read(tmp_path / "out", "v")
    assert images.flat(made["layers"])[ENGINE].uid == 2
    assert [item["platform"]["architecture"] for item in made["index"]["manifests"]] == ["arm64", "arm64"]
    (tmp_path / "in").rename(tmp_path / "again")
    error = refused(toy, tmp_path / "again", "image", "--platform", "linux/s390x")
    assert "linux/amd64, linux/arm64" in error["found"]


def test_images_side_by_side_for_platforms_are_chosen_by_platform(toy: Toy, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "in")
    for name in ("amd64", "arm64"):
        layout.image([tar(distribution(toy))], architecture=name, name=None)
    assert run(toy, tmp_path / "in", tmp_path / "out", "--platform", "linux/arm64").code == 0


def test_of_several_images_one_must_be_named(toy: Toy, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "in")
    layout.image([tar(distribution(toy))], name="one")
    two = layout.image([tar(distribution(toy, uid=3))], name="two")
    assert "one, two" in refused(toy, tmp_path / "in", "image")["found"]
    refused(toy, tmp_path / "in", "image", "--image", "three")
    for name in ("two", two["digest"]):
        assert run(toy, tmp_path / "in", tmp_path / name, "--image", name).code == 0
        assert images.flat(images.read(tmp_path / name, "two")["layers"])[ENGINE].uid == 3


def test_an_image_for_another_platform_is_refused(toy: Toy, tmp_path: Path) -> None:
    Layout(tmp_path / "in").image([tar(distribution(toy))], architecture="arm64")
    error = refused(toy, tmp_path / "in", "image")
    assert (error["expected"], error["found"]) == ("platform linux/amd64", "linux/arm64")


def test_a_distribution_that_is_there_twice_must_be_named(toy: Toy, tmp_path: Path) -> None:
    other = "opt/venv/lib/python3.11/site-packages"
    Layout(tmp_path / "in").image([tar([*distribution(toy), *distribution(toy, other)])])
    error = refused(toy, tmp_path / "in", "two-targets")
    assert error["found"] == f"/{other}, /{SITE}"
    refused(toy, tmp_path / "in", "no-target", "--root", "/opt")
    assert run(toy, tmp_path / "in", tmp_path / "out", "--root", f"/{other}").code == 0
    stands = images.flat(images.read(tmp_path / "out")["layers"])
    assert stands[ENGINE].data == toys.ENGINE
    assert stands[f"{other}/sglang/srt/engine.py"].data == toys.ENGINE_BETA


def saved(folder_: Path, layers: Sequence[bytes], *, shared: bool = False, tags: Sequence[str] = ("engine:1",)) -> Path:
    """What ``docker save`` wrote before it had layouts."""
    config = json.dumps({
        "architecture": "amd64", "os": "linux", "created": images.CREATED,
        "rootfs": {"type": "layers", "diff_ids": [images.digest(data) for data in layers]},
    }).encode()  # fmt: skip
    items = [Item("config.json", config)]
    names = []
    for number, data in enumerate(layers):
        names.append(f"{number}/layer.tar")
        items += [folder(f"{number}"), Item(names[-1] if not shared else f"store/{number}", data)]
        items += [link(names[-1], f"../store/{number}")] if shared else []
    table = [{"Config": "config.json", "RepoTags": [tag], "Layers": names} for tag in tags]
    place = folder_ / "saved.tar"
    place.write_bytes(tar([*items, Item("manifest.json", json.dumps(table).encode())]))
    return place


@pytest.mark.parametrize("shared", [False, True], ids=["layers", "links to layers"])
def test_an_archive_that_docker_saved_goes_in_and_a_layout_comes_out(shared: bool, toy: Toy, tmp_path: Path) -> None:
    place = saved(tmp_path, [tar([folder("usr")]), tar(distribution(toy))], shared=shared)
    result = run(toy, place, tmp_path / "out")
    assert result.code == 0, result.out
    made = images.read(tmp_path / "out", "engine:1")
    assert images.flat(made["layers"])[ENGINE].data == toys.ENGINE_BETA
    base = images.read(tmp_path / "out", "engine:1-base")
    assert base["digest"] == made["manifest"]["annotations"]["org.opencontainers.image.base.digest"]
    assert images.flat(base["layers"])[ENGINE].data == toys.ENGINE


def test_a_layout_in_an_archive_is_one_too(toy: Toy, tmp_path: Path) -> None:
    Layout(tmp_path / "in").image([tar(distribution(toy))])
    with tarfile.open(tmp_path / "in.tar", "w") as archive:
        archive.add(tmp_path / "in", arcname=".")
    assert run(toy, tmp_path / "in.tar", tmp_path / "out").code == 0
    assert run(toy, tmp_path / "in", tmp_path / "other").code == 0
    assert images.read(tmp_path / "out")["digest"] == images.read(tmp_path / "other")["digest"]


def test_an_archive_that_lies_about_a_layer_or_holds_two_images_is_refused(toy: Toy, tmp_path: Path) -> None:
    data = tar(distribution(toy))
    place = saved(tmp_path, [data])
    raw = place.read_bytes()
    place.write_bytes(raw.replace(toys.ENGINE[:40], toys.ENGINE[:40].upper()))
    refused(toy, place, "image")
    place.write_bytes(raw[: len(raw) // 2])
    refused(toy, place, "layer")
    place.write_bytes(gzip.compress(raw))
    refused(toy, place, "layer")
    saved(tmp_path, [data], tags=("a:1", "b:1"))
    assert "a:1, b:1" in refused(toy, place, "image")["found"]
    assert run(toy, place, tmp_path / "out", "--image", "b:1").code == 0


# What it refuses: layers.


def layer_of(toy: Toy, *more: Item) -> bytes:
    return tar([*distribution(toy), *more])


BAD_LAYERS: dict[str, Callable[[Toy], bytes]] = {
    "a name with ..": lambda toy: layer_of(toy, Item("usr/../../etc/passwd", b"x")),
    "an absolute name": lambda toy: layer_of(toy, Item("/etc/passwd", b"x")),
    "a second name of something outside": lambda toy: layer_of(toy, Item("x", kind=tarfile.LNKTYPE, target="../../x")),
    "a second name of something absolute": lambda toy: layer_of(toy, Item("x", kind=tarfile.LNKTYPE, target="/etc/x")),
    "a second name of a folder": lambda toy: layer_of(toy, Item("x", kind=tarfile.LNKTYPE, target="usr")),
    "a character device": lambda toy: layer_of(toy, Item("dev/null", kind=tarfile.CHRTYPE)),
    "a block device": lambda toy: layer_of(toy, Item("dev/sda", kind=tarfile.BLKTYPE)),
    "links in a circle": lambda toy: layer_of(toy, link("a", "b"), link("b", "a"), Item("a/x", b"")),
    "something below a file": lambda toy: layer_of(toy, Item(f"{ENGINE}/x", b"")),
    "a whiteout after its file": lambda toy: layer_of(toy, Item(f"{SITE}/sglang/srt/.wh.engine.py")),
    "a whiteout of nothing": lambda toy: layer_of(toy, Item("usr/.wh.")),
    "a whiteout of the folder above": lambda toy: layer_of(toy, Item("usr/.wh...")),
    "a name of another union file system": lambda toy: layer_of(toy, folder(".wh..wh.plnk")),
    "a name that is too deep": lambda toy: layer_of(toy, Item("a/" * 400 + "x", b"")),
    "a name that is too long": lambda toy: layer_of(toy, Item("/".join(["a" * 200] * 30), b"")),
    "links that lead deeper and deeper": lambda toy: layer_of(
        toy, *(link(f"l{n}", f"l{n - 1}/" + "d/" * 100) for n in range(1, 4)), Item("l3/x", b"")
    ),
    "a member of an unknown type": lambda toy: layer_of(toy, Item("x", kind=b"Z")),
    "cut within a member": lambda toy: layer_of(toy, Item("zeros", bytes(30_000)))[:-20_000],
    "cut within a header": lambda toy: tar([Item("a", b"x" * 512)])[: 1024 + 100],
    "more bytes after the end": lambda toy: layer_of(toy) + b"more",
    "a header with a wrong sum": lambda toy: layer_of(toy).replace(b"engine.py\0", b"engine.pz\0"),
    "no tar at all": lambda _: b"no tar at all" * 100,
    "an extended header that is huge": lambda toy: layer_of(toy, Item("x", attributes={"user.x": b"x" * (1 << 21)})),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_LAYERS)
def test_a_layer_that_is_not_sound_is_refused(case: str, toy: Toy, tmp_path: Path) -> None:
    Layout(tmp_path / "in").image([BAD_LAYERS[case](toy)])
    assert "layer 1" in refused(toy, tmp_path / "in", "layer")["where"]


def test_a_file_with_holes_where_the_distribution_is_is_refused(toy: Toy, tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo(ENGINE)
        info.pax_headers = {"GNU.sparse.major": "1"}
        archive.addfile(info)
    Layout(tmp_path / "in").image([layer_of(toy), out.getvalue()])
    assert "holes" in refused(toy, tmp_path / "in", "layer")["found"]


@pytest.mark.parametrize("compression", ["gzip", ""], ids=["gzip", "plain"])
def test_a_layer_that_unpacks_to_far_too_much_is_refused(
    compression: str, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "FLOOR", 1 << 16)
    monkeypatch.setattr(streams, "RATIO", 20 if compression else 0)
    Layout(tmp_path / "in").image([layer_of(toy, Item("zeros", bytes(1 << 24)))], compression)
    assert "bytes out of" in refused(toy, tmp_path / "in", "layer")["found"]


def blob_of(layout: Path) -> Path:
    digest = str(images.read(layout)["manifest"]["layers"][-1]["digest"])
    return layout / "blobs/sha256" / digest.removeprefix("sha256:")


def flip(data: bytes) -> bytes:
    return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "cut": ("image layer", lambda data: data[:-30]),
    "longer": ("image", lambda data: data + b"x"),
    "one bit": ("image layer", flip),
    "empty": ("image layer", lambda _: b""),
    # The time in the head of a gzip stream: what it unpacks to is the same.
    "its head": ("image layer", lambda data: data[:4] + bytes([data[4] ^ 1]) + data[5:]),
}


@pytest.mark.parametrize("compression", ["gzip", ""], ids=["gzip", "plain"])
@pytest.mark.parametrize("case", DAMAGE)
def test_a_blob_that_is_not_the_one_named_is_refused(case: str, compression: str, toy: Toy, tmp_path: Path) -> None:
    Layout(tmp_path / "in").image([tar(distribution(toy))], compression)
    place = blob_of(tmp_path / "in")
    place.write_bytes(DAMAGE[case][1](place.read_bytes()))
    result = run(toy, tmp_path / "in", tmp_path / "out")
    assert result.code == 1 and result.reason in DAMAGE[case][0].split()
    assert not list(tmp_path.glob("*out*"))


def test_a_blob_that_is_missing_is_refused(toy: Toy, tmp_path: Path) -> None:
    Layout(tmp_path / "in").image([tar(distribution(toy))])
    blob_of(tmp_path / "in").unlink()
    refused(toy, tmp_path / "in", "image")


def test_a_layer_that_unpacks_to_other_bytes_than_the_configuration_says_is_refused(toy: Toy, tmp_path: Path) -> None:
    rootfs = {"type": "layers", "diff_ids": [images.digest(b"other")]}
    Layout(tmp_path / "in").image([tar(distribution(toy))], config={"rootfs": rootfs})
    assert "unpacks to" in refused(toy, tmp_path / "in", "image")["expected"]


@pytest.mark.parametrize("what", ["garbage", "cut", "more"])
def test_a_stream_that_does_not_unpack_is_refused(what: str, toy: Toy, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "in")
    data = tar(distribution(toy))
    good = images.packed(data, "gzip")
    bad = {"garbage": b"garbage" * 99, "cut": good[:-9], "more": good + b"more"}[what]
    images_packed, images.packed = images.packed, lambda *_: bad
    try:
        layout.image([data])
    finally:
        images.packed = images_packed
    refused(toy, tmp_path / "in", "layer")


def test_a_layer_that_ends_with_its_last_byte_is_whole(toy: Toy, tmp_path: Path) -> None:
    last = Item("last", b"x" * 700)
    data = layer_of(toy, last)
    made = patched(toy, [data[: data.rindex(b"x" * 700) + 700]], tmp_path)
    assert images.flat(made["layers"][-1:])[ENGINE].data == toys.ENGINE_BETA


def test_several_gzip_members_are_one_stream(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_parts(data: bytes, _: str) -> bytes:
        return b"".join(gzip.compress(data[at : at + 777]) for at in range(0, len(data), 777)) + gzip.compress(b"")

    monkeypatch.setattr(images, "packed", in_parts)
    made = Layout(tmp_path / "in").image([tar(distribution(toy))])
    assert made
    assert run(toy, tmp_path / "in", tmp_path / "out").code == 0


# What it refuses: what names the layers.


def edited(layout: Layout, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest of the only image, and name it again."""
    blobs = layout.root / "blobs/sha256"
    table = json.loads((blobs / layout.manifests[0]["digest"].removeprefix("sha256:")).read_bytes())
    change(table)
    layout.manifests = [layout.blob(json.dumps(table).encode(), images.MANIFEST)]
    layout.write()


def test_what_an_image_says_of_itself_need_not_be_sensible(toy: Toy, tmp_path: Path) -> None:
    strange = {"created": "2026-13-41T99:00:00Z", "history": "none", "config": {"Env": [1, "A"]}}
    Layout(tmp_path / "in").image([tar(distribution(toy))], config=strange)
    assert run(toy, tmp_path / "in", tmp_path / "out").code == 0
    assert images.read(tmp_path / "out")["config"]["history"] == "none"


def test_a_fifo_in_the_place_of_a_blob_is_refused(toy: Toy, tmp_path: Path) -> None:
    Layout(tmp_path / "in").image([tar(distribution(toy))])
    place = blob_of(tmp_path / "in")
    place.unlink()
    os.mkfifo(place)
    result = run(toy, tmp_path / "in", tmp_path / "out")
    assert (result.code, result.reason) in ((1, "image"), (1, "layer"))


MANIFESTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "a layer too few": lambda table: table["layers"].clear(),
    "a layer that lies elsewhere": lambda table: table["layers"][0].update(
        mediaType="application/vnd.oci.image.layer.nondistributable.v1.tar+gzip"
    ),
    "an encrypted layer": lambda table: table["layers"][0].update(mediaType=f"{images.TAR}+gzip+encrypted"),
    "a kind of layer that is no text": lambda table: table["layers"][0].update(mediaType=["x"]),
    "another digest algorithm": lambda table: table["layers"][0].update(digest="sha512:" + "0" * 128),
    "a digest that leads elsewhere": lambda table: table["layers"][0].update(digest="sha256:../../../../etc/passwd"),
    "a size that is none": lambda table: table["layers"][0].update(size="12"),
    "no configuration": lambda table: table.pop("config"),
    "layers that are no list": lambda table: table.update(layers={}),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_is_not_sound_is_refused(case: str, toy: Toy, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "in")
    layout.image([tar(distribution(toy))])
    edited(layout, MANIFESTS[case])
    refused(toy, tmp_path / "in", "image")


LAYOUTS: dict[str, Callable[[Path], object]] = {
    "no index": lambda root: (root / "index.json").unlink(),
    "no JSON in the index": lambda root: (root / "index.json").write_text("{"),
    "an index that is a list": lambda root: (root / "index.json").write_text("[]"),
    "an index of nothing": lambda root: (root / "index.json").write_text('{"manifests": []}'),
    "a huge index": lambda root: os.truncate(root / "index.json", 1 << 25),
    "no version": lambda root: (root / "oci-layout").unlink(),
    "another version": lambda root: (root / "oci-layout").write_text('{"imageLayoutVersion": "2.0.0"}'),
    "deep JSON": lambda root: (root / "index.json").write_text("[" * 100_000),
    "no manifest": lambda root: shutil.rmtree(root / "blobs"),
    "nothing": lambda root: shutil.rmtree(root),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_layout_that_is_none_is_refused(case: str, toy: Toy, tmp_path: Path) -> None:
    Layout(tmp_path / "in").image([tar(distribution(toy))])
    LAYOUTS[case](tmp_path / "in")
    refused(toy, tmp_path / "in", "image")


# What it refuses: the tree in the image.


def test_an_image_without_the_distribution_is_refused(toy: Toy, tmp_path: Path) -> None:
    Layout(tmp_path / "in").image([tar([folder("usr")])])
    refused(toy, tmp_path / "in", "no-target")


TREES: dict[str, tuple[str, Callable[[Toy], list[Item]]]] = {
    "one byte off": ("drift", lambda _: [Item(ENGINE, toys.ENGINE.replace(b"7", b"8", 1))]),
    "larger than any": ("drift", lambda _: [Item(ENGINE, bytes(1 << 20))]),
    "executable": ("drift", lambda _: [Item(ENGINE, toys.ENGINE, mode=0o755)]),
    "a link": ("drift", lambda _: [link(ENGINE, "/etc/passwd")]),
    "a fifo": ("drift", lambda _: [Item(ENGINE, kind=tarfile.FIFOTYPE)]),
    "a link above": ("drift", lambda _: [link(f"{SITE}/sglang/srt/layers", "/x")]),
    "a foreign file in a folder of ours": ("drift", lambda _: [Item(f"{OURS}/foreign.py", b"")]),
    "another version": (
        "wrong-version",
        lambda _: [Item(f"{SITE}/{toys.INFO}/METADATA", b"Metadata-Version: 2.4\nName: sglang\nVersion: 0.5.20\n")],
    ),
    "another torch": ("wrong-torch", lambda _: [folder(f"{SITE}/torch-2.11.0.dist-info")]),
    "an edited RECORD": ("record", lambda _: [Item(f"{SITE}/{toys.RECORD}", b"nonsense\n")]),
    "a run that was interrupted": ("recovery-needed", lambda _: [Item(f"{SITE}/.patchbundle-journal", b"{}")]),
    "a rescue copy": ("drift", lambda _: [Item(f"{SITE}/sglang/srt/.patchbundle-1.old", b"x")]),
}  # fmt: skip


@pytest.mark.parametrize("case", TREES)
def test_a_tree_that_is_not_as_pinned_is_refused_as_anywhere_else(case: str, toy: Toy, tmp_path: Path) -> None:
    reason, make = TREES[case]
    Layout(tmp_path / "in").image([tar(distribution(toy)), tar(make(toy))])
    error = refused(toy, tmp_path / "in", reason)
    assert error["where"].startswith("the image: ")
    assert "image-" not in json.dumps(error)


def test_a_foreign_file_beside_ours_is_seen_in_an_image_that_a_build_step_patched(toy: Toy, tmp_path: Path) -> None:
    assert trees.apply(toy, "--to", "alpha-first").code == 0
    Layout(tmp_path / "in").image([tar([*distribution(toy), Item(f"{OURS}/foreign.txt", b"x")])])
    assert f"/{OURS}/foreign.txt (unexpected" in refused(toy, tmp_path / "in", "drift")["where"]


def test_an_image_of_another_role_is_refused(toy: Toy, tmp_path: Path) -> None:
    Layout(tmp_path / "in").image([tar(distribution(toy))])
    result = trees.run(toy, "image", "--from", tmp_path / "in", "--to", tmp_path / "out", "--role", "decode", "--json")
    assert result.code in (1, 2)
    assert not (tmp_path / "out").exists()


def test_a_required_signature_is_required_of_an_image_too(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Layout(tmp_path / "in").image([tar(distribution(toy))])
    monkeypatch.setenv("PATH", str(tmp_path))
    refused(toy, tmp_path / "in", "no-program", "--require-signature", "RW" + "A" * 54)


def test_a_file_in_place_of_the_spool_is_no_matter_for_a_tree_at_the_root_of_the_image(
    toy: Toy, tmp_path: Path
) -> None:
    made = patched(toy, [tar(distribution(toy, ""))], tmp_path)
    assert made["manifest"]["annotations"]["patchbundle.root"] == "/"
    assert images.flat(made["layers"])["sglang/srt/engine.py"].data == toys.ENGINE_BETA


def test_an_empty_file_stays_one(toy: Toy, tmp_path: Path) -> None:
    assert images.tree_files(toy.tree)["sglang/__init__.py"] == File(b"")
    assert patched(toy, [tar(distribution(toy))], tmp_path)
