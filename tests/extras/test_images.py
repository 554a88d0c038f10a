"""Images by other programs: skopeo and umoci read what the verb writes, and build what it reads."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from patchbundle import bases as bases_module
from patchbundle import fetch
from tests import images, trees
from tests import toy as toys
from tests.extras.conftest import program
from tests.images import SITE, Item, Layout, folder, link, tar
from tests.toy import Toy
from workstation import streams

pytestmark = pytest.mark.extras


HOST = ["--platform", "linux/amd64"]


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return toys.make(tmp_path / "toy")


def command(*words: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run([program(str(words[0])), *words[1:]], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def image(toy: Toy, source: Path, out: Path, *more: str | Path) -> trees.Result:
    result = trees.run(toy, "image", "--from", source, "--to", out, "--role", "prefill", *HOST, "--json", *more)
    assert result.code == 0, result.out
    return result


def unpack(layout: Path, name: str, to: Path) -> Path:
    """The root that umoci makes of an image."""
    more = [] if os.geteuid() == 0 else ["--rootless"]
    command("umoci", "raw", "unpack", *more, "--image", f"{layout}:{name}", to)
    return to


@pytest.mark.parametrize("compression", ["gzip", ""], ids=["gzip", "plain"])
def test_umoci_unpacks_the_tree_that_a_run_makes_of_the_unpacked_base(
    compression: str, toy: Toy, tmp_path: Path
) -> None:
    label = {"user.label": b"kept"}
    items = images.files_of(images.tree_files(toy.tree), uid=os.geteuid(), gid=os.getegid(), attributes=label)
    upper = [Item(f"{SITE}/sglang/srt/__pycache__/engine.cpython-311.pyc", b"x" * 40), link("usr/lib64", "local")]
    Layout(tmp_path / "in").image([tar([folder("usr", 0o711)]), tar(items), tar(upper)], compression)
    image(toy, tmp_path / "in", tmp_path / "out")
    patched = unpack(tmp_path / "out", "latest", tmp_path / "patched")
    step = unpack(tmp_path / "out", "latest-base", tmp_path / "step")
    assert trees.run(toy, "apply", "--root", step / SITE).code == 0
    assert trees.snapshot(patched, times=False) == trees.snapshot(step, times=False)
    image(toy, tmp_path / "out", tmp_path / "back", "--image", "latest", "--revert")
    back = unpack(tmp_path / "back", "latest", tmp_path / "again")
    assert trees.run(toy, "revert", "--root", step / SITE).code == 0
    assert trees.snapshot(back, times=False) == trees.snapshot(step, times=False)


def test_what_whiteouts_and_opaque_folders_hide_is_what_umoci_says(toy: Toy, tmp_path: Path) -> None:
    """Layers in which every way of hiding is used, so that only one reading of them is the pinned tree."""
    good = images.files_of(images.tree_files(toy.tree))
    stale = [
        folder(f"{SITE}/{toys.HOME}"),
        Item(f"{SITE}/{toys.HOME}/gates.py", b"older"),
        Item(f"{SITE}/sglang/srt/layers/pool.py/below", b"a folder where a file is"),
        folder(f"{SITE}/sglang/srt/layers/deep"),
    ]
    lower = [item for item in good if not item.name.endswith("pool.py")]
    second = [Item(f"{SITE}/sglang/srt/.wh.research"), Item(f"{SITE}/sglang/srt/engine.py", b"wrong")]
    third = [*(item for item in good if "/sglang/srt" in item.name), Item(f"{SITE}/sglang/srt/.wh..wh..opq")]
    Layout(tmp_path / "in").image([tar([*lower, *stale]), tar(second), tar(third)])
    root = unpack(tmp_path / "in", "latest", tmp_path / "root")
    assert trees.run(toy, "status", "--root", root / SITE, "--json").table["result"]["status"]["level"] == 0
    image(toy, tmp_path / "in", tmp_path / "out")
    assert trees.apply(toy).code == 0
    made = unpack(tmp_path / "out", "latest", tmp_path / "made")
    assert images.tree_files(made / SITE) == images.tree_files(toy.tree)


def test_skopeo_reads_and_copies_every_compression_and_chooses_by_name(toy: Toy, tmp_path: Path) -> None:
    layers = [tar([folder("usr")]), tar(images.files_of(images.tree_files(toy.tree))), tar([folder("etc")])]
    base = Layout(tmp_path / "in").image(layers, ["gzip", "zstd", "zstd"], name="engine:1")
    image(toy, tmp_path / "in", tmp_path / "out")
    made = images.read(tmp_path / "out", "engine:1")
    assert made["manifest"]["layers"][-1]["mediaType"] == f"{images.TAR}+zstd"
    assert images.flat(made["layers"])[f"{SITE}/sglang/srt/engine.py"].data == toys.ENGINE_BETA
    for name, digest in (("engine:1", made["digest"]), ("engine:1-base", base["digest"])):
        told = json.loads(command("skopeo", "inspect", f"oci:{tmp_path / 'out'}:{name}"))
        assert told["Digest"] == digest
        # It reads every blob, and compares each with its digest.
        command("skopeo", "copy", "--insecure-policy", f"oci:{tmp_path / 'out'}:{name}", f"oci:{tmp_path / 'copy'}:x")
        shutil.rmtree(tmp_path / "copy")
    words = ["--insecure-policy", "--dest-decompress", f"oci:{tmp_path / 'out'}:engine:1", f"dir:{tmp_path / 'dir'}"]
    command("skopeo", "copy", *words)
    plain = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "dir").iterdir()}
    assert {digest.removeprefix("sha256:") for digest in made["config"]["rootfs"]["diff_ids"]} <= plain


def test_what_skopeo_saves_as_dockers_archive_goes_in(toy: Toy, tmp_path: Path) -> None:
    layers = [tar([folder("usr")]), tar(images.files_of(images.tree_files(toy.tree)))]
    Layout(tmp_path / "in").image(layers)
    saved = tmp_path / "saved.tar"
    words = ["--insecure-policy", f"oci:{tmp_path / 'in'}:latest", f"docker-archive:{saved}:localhost/engine:1"]
    command("skopeo", "copy", *words)
    image(toy, saved, tmp_path / "out")
    stands = images.flat(images.read(tmp_path / "out", "localhost/engine:1")["layers"])
    assert stands[f"{SITE}/sglang/srt/engine.py"].data == toys.ENGINE_BETA


@pytest.mark.parametrize("what", ["garbage", "cut", "a bomb", "a window of gigabytes"])
def test_a_zstd_layer_that_is_not_sound_is_refused(
    what: str, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zstandard

    data = tar(images.files_of(images.tree_files(toy.tree)))
    good = images.packed(data, "zstd")
    if what == "a bomb":
        monkeypatch.setattr(streams, "FLOOR", 1 << 16)
        data += bytes(1 << 26)
        good = images.packed(data, "zstd")
    wide = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(window_log=30)).compressobj()
    bad = {
        "garbage": b"garbage" * 99,
        "cut": good[:-9],
        "a bomb": good,
        # As a stream: of one whose size is told a reader asks for no more than that.
        "a window of gigabytes": wide.compress(data) + wide.flush(),
    }[what]
    with monkeypatch.context() as patch:
        patch.setattr(images, "packed", lambda *_: bad)
        Layout(tmp_path / "in").image([data], "zstd")
    result = trees.run(
        toy, "image", "--from", tmp_path / "in", "--to", tmp_path / "out", "--role", "prefill", *HOST, "--json"
    )
    assert (result.code, result.reason) in ((1, "layer"), (1, "image"))
    assert not list(tmp_path.glob("*out*"))


# The real wheel.


def real(tmp_path: Path) -> tuple[Toy, Path]:
    """Our own bundle, and a layout that umoci made of the real wheel as pip installs it, compiled files included."""
    bundle = Toy(trees.REPOSITORY, tmp_path / "none", fetch.cache_folder())
    base = next(
        base for base in bases_module.load(trees.REPOSITORY / "config/bases.toml").values() if base.role == "prefill"
    )
    wheel = fetch.fetch(base, fetch.default_archive(base))
    root = tmp_path / "site"
    words: list[str | Path] = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--target",
        root,
        wheel,
    ]
    subprocess.run([sys.executable, *words], check=True)
    compiled: list[str | Path] = [
        "-m",
        "compileall",
        "-q",
        "-j",
        "2",
        root / "sglang/srt/disaggregation",
        root / "sglang/srt/layers",
    ]
    subprocess.run([sys.executable, *compiled], check=True)
    layout = tmp_path / "in"
    command("umoci", "init", "--layout", layout)
    command("umoci", "new", "--image", f"{layout}:engine")
    for source, to in ((trees.REPOSITORY / "docs", "/usr/share/doc"), (root, f"/{SITE}")):
        command("umoci", "insert", "--image", f"{layout}:engine", source, to)
    return bundle, layout


def test_the_real_wheel_in_an_image_that_umoci_made_up_and_down(tmp_path: Path) -> None:
    bundle, layout = real(tmp_path)
    told = image(bundle, layout, tmp_path / "out").table["result"]
    assert told["dropped_bytecode"]
    patched = unpack(tmp_path / "out", "engine", tmp_path / "patched")
    words: list[str | Path] = ["--root", patched / SITE, "--expect", "applied", "--full", "--json"]
    checked = trees.run(bundle, *words, check=True)
    assert checked.code == 0, checked.out
    # In a build step, on the same base.
    step = unpack(tmp_path / "out", "engine-base", tmp_path / "step")
    before = images.tree_files(step)
    assert trees.run(bundle, "apply", "--root", step / SITE).code == 0
    assert trees.snapshot(patched, times=False) == trees.snapshot(step, times=False)
    # The layer is its files, packed.
    changed = [op for op in told["plan"]["operations"] if op["new"] != "absent"]
    assert told["image"]["size"] < sum(int(op["new"].split()[2]) for op in changed) / 2
    image(bundle, tmp_path / "out", tmp_path / "back", "--image", "engine", "--revert")
    back = unpack(tmp_path / "back", "engine", tmp_path / "again")
    words = ["--root", back / SITE, "--expect", "base", "--full", "--json"]
    assert trees.run(bundle, *words, check=True).code == 0
    gone = {path.removeprefix("/") for path in told["dropped_bytecode"]}
    assert images.tree_files(back) == {path: file for path, file in before.items() if path not in gone}
