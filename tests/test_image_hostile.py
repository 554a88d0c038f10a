"""Images that were made to do harm: to this machine, to its memory, to whoever reads what is written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests import images, trees
from tests import toy as toys
from tests.images import SITE, Item, Layout, folder, link, tar
from tests.test_image import BY_TIME, ENGINE, NEVER_CHECKED, distribution, edited, refused, run, saved
from tests.toy import Toy
from workstation import merged, streams

REL = "sglang/srt/engine.cpython-311.pyc"


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return toys.make(tmp_path / "toy")


def environment(value: str, **more: Any) -> dict[str, Any]:
    return {"config": {"Env": [f"PYTHONPYCACHEPREFIX={value}"], **more}}


# This machine.


@pytest.mark.parametrize("up", ["../" * 12, "/../" * 12, "a/" + "../" * 12])
def test_an_environment_that_leads_out_of_the_image_leads_nowhere(up: str, toy: Toy, tmp_path: Path) -> None:
    """Compiled files below the prefix are dropped: of the image's, never of this machine's."""
    here = tmp_path / "host" / SITE / REL
    here.parent.mkdir(parents=True)
    here.write_bytes(NEVER_CHECKED)
    config = environment(f"{up}{str(tmp_path / 'host')[1:]}")
    Layout(tmp_path / "in").image([tar(distribution(toy))], config=config)
    assert run(toy, tmp_path / "in", tmp_path / "out").code == 0
    assert here.read_bytes() == NEVER_CHECKED


@pytest.mark.parametrize(
    ("value", "working", "place"),
    [
        ("/var/pyc", "", "var/pyc"),
        ("var/pyc", "", "var/pyc"),
        ("pyc", "/var", "var/pyc"),
        ("../../var//pyc/.", "/x", "var/pyc"),
        ("/cache", "", "var/pyc"),
        ("/", "", ""),
    ],
)
def test_bytecode_is_dropped_where_the_environment_of_the_image_leads(
    value: str, working: str, place: str, toy: Toy, tmp_path: Path
) -> None:
    compiled = f"{place}/{SITE}/{REL}".lstrip("/")
    items = [*distribution(toy), folder("var"), link("cache", "./var/pyc"), Item(compiled, BY_TIME)]
    config = environment(value, WorkingDir=working) if working else environment(value)
    Layout(tmp_path / "in").image([tar(items)], config=config)
    assert run(toy, tmp_path / "in", tmp_path / "out").code == 0
    assert compiled not in images.flat(images.read(tmp_path / "out")["layers"])


def test_a_link_in_the_place_of_compiled_files_is_seen(toy: Toy, tmp_path: Path) -> None:
    items = [*distribution(toy), folder("var"), link(f"var/{SITE}/sglang", "/elsewhere")]
    Layout(tmp_path / "in").image([tar(items)], config=environment("/var"))
    refused(toy, tmp_path / "in", "bytecode")


@pytest.mark.parametrize("lead", ["/etc/hostname", "../../x", "a\0b"])
@pytest.mark.parametrize("key", ["Config", "Layers"])
def test_an_archive_that_was_unpacked_names_nothing_outside_of_itself(
    key: str, lead: str, toy: Toy, tmp_path: Path
) -> None:
    with tarfile.open(saved(tmp_path, [tar(distribution(toy))])) as archive:
        archive.extractall(tmp_path / "in", filter="data")
    (tmp_path / "x").write_bytes(b"{}")
    place = tmp_path / "in/manifest.json"
    table = json.loads(place.read_bytes())
    assert run(toy, tmp_path / "in", tmp_path / "out").code == 0
    table[0][key] = lead if key == "Config" else [lead]
    place.write_text(json.dumps(table))
    assert refused(toy, tmp_path / "in", "image")["found"] in ("none", "nothing")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_who_is_told_to_stop_leaves_nothing_behind(number: int, toy: Toy, tmp_path: Path) -> None:
    # What is not packed takes long to hash, not to make.
    Layout(tmp_path / "in").image([tar([*distribution(toy), Item("zeros", bytes(300 << 20))])], "")
    made, scratch = tmp_path / "made", tmp_path / "scratch"
    made.mkdir()
    scratch.mkdir()
    words = ["image", "--from", tmp_path / "in", "--to", made / "out", "--role", "prefill", "--bundle", toy.bundle]
    tool = trees.REPOSITORY / "tools/apply.py"
    command = [sys.executable, str(tool), *map(str, words), "--platform", "linux/amd64"]
    environment = {**toy.environment, "TMPDIR": str(scratch)}
    quiet = subprocess.DEVNULL

    def begin() -> None:
        # What ran the tests may ignore a signal (nohup, a shell's background), and a child would go on ignoring it.
        signal.signal(number, signal.SIG_DFL)
        os.nice(19)  # on a busy machine this process must see the folder before the other one is through

    with subprocess.Popen(command, env=environment, stdout=quiet, stderr=quiet, preexec_fn=begin) as process:
        while not list(made.iterdir()):
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(number)
        assert process.wait(30) != 0
    assert (list(made.iterdir()), list(scratch.iterdir())) == ([], [])


# Its memory and its time.


def many(kind: str) -> list[Item]:
    if kind == "attributes":
        return [folder(f"d{number}", attributes={"user.x": b"x" * 50_000}) for number in range(30)]
    if kind == "targets":
        return [link(f"l{number}", "x" * 4000) for number in range(300)]
    if kind == "files of concern":
        return [Item(f"{number}/sglang/srt/engine.py") for number in range(2000)]
    if kind == "missing second names":
        return [
            Item(f"{number}/sglang/srt/engine.py", kind=tarfile.LNKTYPE, target=f"x{number}") for number in range(2000)
        ]
    assert kind == "folders above"
    return [Item(f"{number}/" + "d/" * 150 + "x") for number in range(20)]


@pytest.mark.parametrize("kind", ["attributes", "targets", "files of concern", "missing second names", "folders above"])
def test_more_names_and_attributes_than_memory_should_hold_are_refused(
    kind: str, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Layout(tmp_path / "in").image([tar([*distribution(toy), folder("a"), *many(kind)])])
    monkeypatch.setattr(merged, "HELD", 1_000_000)
    assert "names and attributes" in refused(toy, tmp_path / "in", "layer")["found"]
    monkeypatch.setattr(merged, "HELD", 100_000_000)
    assert run(toy, tmp_path / "in", tmp_path / "out").reason != "layer" or kind == "missing second names"


def test_headers_that_hold_for_all_members_do_not_add_up_in_memory(toy: Toy, tmp_path: Path) -> None:
    def header(number: int) -> bytes:
        return tarfile.TarInfo.create_pax_global_header({f"user.{number}": "x" * 500_000})

    data = tar(distribution(toy))
    assert run(toy, layout(tmp_path / "one", header(0) + data), tmp_path / "out").code == 0
    refused(toy, layout(tmp_path / "three", b"".join(map(header, range(3))) + data), "layer")


def layout(place: Path, *layers: bytes) -> Path:
    Layout(place).image(layers)
    return place


@pytest.mark.parametrize("first", ["nothing", "one that goes", "a long chain"])
def test_a_second_name_of_what_is_not_there_ends_in_a_refusal(first: str, toy: Toy, tmp_path: Path) -> None:
    items = [item for item in distribution(toy) if item.name != ENGINE]
    target, more = "x", []
    if first == "a long chain":
        more = [Item("x0", toys.ENGINE)]
        more += [Item(f"x{number}", kind=tarfile.LNKTYPE, target=f"x{number - 1}") for number in range(1, 50)]
        target = "x49"
    layers = [tar([*items, *more, Item(ENGINE, kind=tarfile.LNKTYPE, target=target)])]
    if first == "one that goes":
        layers = [tar([Item("x", toys.ENGINE)]), tar([Item(".wh.x")]), *layers]
    assert "a second name of x" in refused(toy, layout(tmp_path / "in", *layers), "layer")["found"]


@pytest.mark.parametrize("length", [1, 3])
def test_a_second_name_of_a_second_name_is_the_file(length: int, toy: Toy, tmp_path: Path) -> None:
    items = [item for item in distribution(toy) if item.name != ENGINE]
    names = ["x0", *(f"x{number}" for number in range(1, length)), ENGINE]
    more = [Item(name, kind=tarfile.LNKTYPE, target=target) for target, name in pairwise(names)]
    assert run(toy, layout(tmp_path / "in", tar([*items, Item("x0", toys.ENGINE), *more])), tmp_path / "out").code == 0
    assert images.flat(images.read(tmp_path / "out")["layers"])[ENGINE].data == toys.ENGINE_BETA


def test_a_layer_that_is_named_again_and_again_unpacks_to_no_more_than_one(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = tar([Item("zeros", bytes(1 << 20))])
    monkeypatch.setattr(streams, "FLOOR", 3 << 20)
    monkeypatch.setattr(streams, "RATIO", 1)
    data = tar(distribution(toy))
    assert run(toy, layout(tmp_path / "two", data, zeros, zeros), tmp_path / "out").code == 0
    assert "bytes out of" in refused(toy, layout(tmp_path / "many", data, *[zeros] * 9), "layer")["found"]


# Whoever reads it.


ODD: dict[str, Callable[[Path], object]] = {
    "half of a pair in a name": lambda root: rename(root, "\ud800"),
    "no number": lambda root: add(root, '"x": NaN, '),
    "too large a number": lambda root: add(root, f'"x": {"9" * 9999}, '),
}


def rename(root: Path, name: str) -> None:
    table = json.loads((root / "index.json").read_bytes())
    table["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"] = name
    (root / "index.json").write_text(json.dumps(table))


def add(root: Path, text: str) -> None:
    place = root / "index.json"
    place.write_text(f"{{{text}{place.read_text()[1:]}")


@pytest.mark.parametrize("case", ODD)
def test_what_could_not_be_written_again_is_not_read(case: str, toy: Toy, tmp_path: Path) -> None:
    ODD[case](layout(tmp_path / "in", tar(distribution(toy))))
    refused(toy, tmp_path / "in", "image")


@pytest.mark.parametrize(
    "config",
    [
        {"config": {"Env": 7}},
        {"config": {"Env": {"a": 1}}},
        {"config": {"Env": "PYTHONPYCACHEPREFIX=/x"}},
        {"config": [1], "created": ["x"], "history": {"a": 1}, "os.features": {"a": 1}},
        environment("/pyc", WorkingDir=7),
    ],
    ids=repr,
)
def test_a_configuration_of_odd_kinds_does_no_harm(config: dict[str, Any], toy: Toy, tmp_path: Path) -> None:
    Layout(tmp_path / "in").image([tar(distribution(toy))], config=config)
    assert run(toy, tmp_path / "in", tmp_path / "out").code == 0


@pytest.mark.parametrize("value", ["/a\0b", "/x" * 3000], ids=["zero", "long"])
def test_a_folder_for_bytecode_that_can_be_none_is_refused(value: str, toy: Toy, tmp_path: Path) -> None:
    Layout(tmp_path / "in").image([tar(distribution(toy))], config=environment(value))
    refused(toy, tmp_path / "in", "image")


@pytest.mark.parametrize("tags", [5, "engine:1", {"a": 1}, [1]], ids=repr)
@pytest.mark.parametrize("more", [(), ("--image", "engine:1")], ids=["unnamed", "named"])
def test_names_of_odd_kinds_are_refused(more: tuple[str, ...], tags: Any, toy: Toy, tmp_path: Path) -> None:
    with tarfile.open(saved(tmp_path, [tar(distribution(toy))])) as archive:
        archive.extractall(tmp_path / "in", filter="data")
    place = tmp_path / "in/manifest.json"
    place.write_text(json.dumps([{**json.loads(place.read_bytes())[0], "RepoTags": tags}]))
    assert refused(toy, tmp_path / "in", "image", *more)["expected"] == "a list of names"


@pytest.mark.parametrize("root", ["usr/l\udcffb", "usr/a\nb", "usr/\x1b[31m"], ids=ascii)
def test_a_distribution_below_a_name_that_no_annotation_should_hold_is_refused(
    root: str, toy: Toy, tmp_path: Path
) -> None:
    assert ascii(refused(toy, layout(tmp_path / "in", tar(distribution(toy, root))), "image")["found"]).isascii()


def test_an_attribute_whose_name_is_no_text_is_refused(toy: Toy, tmp_path: Path) -> None:
    layer = tar([*distribution(toy), Item("x", attributes={"user.Q": b"x"})]).replace(b"user.Q", b"user.\xff")
    assert "user" in refused(toy, layout(tmp_path / "in", layer), "layer")["found"]


@pytest.mark.parametrize("more", [{"mediaType": images.INDEX}, {"manifests": []}], ids=repr)
def test_a_manifest_that_may_be_read_as_something_else_is_refused(
    more: dict[str, Any], toy: Toy, tmp_path: Path
) -> None:
    made = Layout(tmp_path / "in")
    made.image([tar(distribution(toy))])
    edited(made, lambda table: table.update(more))
    assert "one thing" in refused(toy, tmp_path / "in", "image")["expected"]
