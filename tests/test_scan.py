"""What must not be published is found; what may be is not."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchbundle import manifest, scan
from patchbundle.errors import BundleError
from tests import toy as toys
from tests import trees

# Written in parts, so that this file itself may be published.
BAD = {
    "an IPv4 address": ("an address", "connect 203.0." + "114.7 now"),
    "a private IPv4 address": ("an address", "10.1." + "2.3"),
    "an IPv4 address with a port": ("an address", "--host=192.168." + "0.10:3000"),
    "an IPv6 address": ("an address", "fd00:1:2:3:4:5:" + "6:7"),
    "a short IPv6 address": ("an address", "fe80" + "::1c2:3ff:fe4:5"),
    "an account": ("an account", "mail someone@" + "somewhere.net"),
    "a host": ("a host", "https:/" + "/registry.example.cloud/simple"),
    "a name of a private network": ("a host", "pull registry.co" + "rp.inte" + "rnal:5000/x"),
    "a name of a home network": ("a host", "node17.cluster." + "local"),
    "a copy from a host": ("an account", "scp bob@" + "node17:/x ."),
    "a bucket": ("a host", "s3://" + "models-bucket/x"),
    "a home folder": ("a private path", "see /home/" + "someone/x"),
    "root's folder": ("a private path", "cp /ro" + "ot/x ."),
    "a home folder in a URL": ("a private path", "file:/" + "//home/" + "bob/x"),
    "a service's folder": ("a private path", "/srv/" + "models"),
    "a mount": ("a private path", "/mnt/" + "models"),
    "a private key": ("a private key", "-----BEGIN RSA PRIVATE " + "KEY-----"),
    "a code host's token": ("an access token", "gh" + "p_" + "a" * 36),
    "a model hub's token": ("an access token", "h" + "f_" + "a" * 34),
    "a cloud key": ("an access token", "AKI" + "A" + "B" * 16),
    "a signed token": ("an access token", "ey" + "J" + "a" * 12 + ".ey" + "J" + "b" * 12 + "." + "c" * 12),
    "an index's token": ("an access token", "pypi-" + "A" * 40),
    "a package registry's token": ("an access token", "npm_" + "a" * 36),
    "a repository host's token": ("an access token", "glpat-" + "a" * 20),
    "a header with a token": ("an access token", "Authorization: Bea" + "rer " + "a" * 30),
    "a cloud secret": ("a bare credential", "aws_secret_access_key " + "= " + "a" * 40),
    "a password": ("a credential", 'password = "' + 'hunter2hunter2"'),
    "a password in a URL": ("a credential in a URL", "https:/" + "/user:secret" + "@github.com/x"),
}
BARE = ["DB_PASSWORD" + "=hunter2hunter2", "export API_" + "KEY=abcdefgh1234", "password" + ": hunter2hunter2"]
GOOD = [
    "TOKEN=$(make-token) and PASSWORD=",
    "token: the one that the caller holds",
    "the internal state, a local variable, self.local(x) and names.local()",
    "127.0.0.1:8000 and 0.0.0.0 and [::1]",
    "version 0.5.19.1 is not an address, nor is 1.2.3",
    "999.1.1.1",
    "192.0.2.7, 198.51.100.1, 203.0.113.9 and 2001:db8::1 are for documentation",
    "12:34:56:78 and x[1::2]",
    "nvidia-package==13.0.3.0",
    "std::sync::Arc and a::b::c",
    "someone@example.com and maintainers@host.example",
    "https://github.com/x/y/pull/1, https://docs.python.org/3, http://127.0.0.1:30000, http://worker:8000@3",
    "the @property decorator; a@b is no address of a mail",
    "/usr/lib, /tmp, sglang/srt/data/x and ./home/x",
    "password = os.environ['PASSWORD']",
    "token = tokens[0]",
    "-----BEGIN CERTIFICATE-----",
    "sk-short",
]


@pytest.mark.parametrize("name", BAD)
def test_found(name: str) -> None:
    what, text = BAD[name]
    findings = list(scan.scan_bytes("f", f"first\nsome {text}\n".encode()))
    assert what in [finding.what for finding in findings]
    assert {finding.line for finding in findings} == {2}


@pytest.mark.parametrize("name", [name for name, (what, _) in BAD.items() if "credential" in what or "token" in name])
def test_a_secret_is_not_repeated_in_the_report(name: str) -> None:
    what, text = BAD[name]
    for finding in scan.scan_bytes("f", text.encode()):
        assert finding.what != what or text not in str(finding)


@pytest.mark.parametrize("text", BARE)
def test_a_setting_without_quotes_is_found_and_not_repeated(text: str) -> None:
    (finding,) = scan.scan_bytes("f", f"# settings\n{text}\n".encode())
    assert (finding.what, finding.line) == ("a bare credential", 2)
    assert "hunter2" not in str(finding) and "abcdefgh" not in str(finding)


@pytest.mark.parametrize("text", GOOD)
def test_not_found(text: str) -> None:
    assert list(scan.scan_bytes("f", text.encode())) == []


@pytest.mark.parametrize("pattern", scan._CORE)
@given(st.data())
def test_what_is_looked_for_first_is_in_every_match(pattern: re.Pattern[str], data: st.DataObject) -> None:
    assert re.search(scan._CORE[pattern], data.draw(st.from_regex(pattern)), pattern.flags)


@pytest.mark.parametrize("pattern", scan._WORDS, ids=lambda pattern: pattern.pattern[:20])
@given(st.data())
def test_one_of_the_words_looked_for_first_is_in_every_match(pattern: re.Pattern[str], data: st.DataObject) -> None:
    # Letters of either case, and those that only count as one.
    text = data.draw(st.from_regex(pattern)).casefold()
    assert any(word in text for word in scan._WORDS[pattern])


HEADS = [b"\x7fELF\x02", b"MZ\x90", b"PK\x03\x04", b"\x1f\x8b\x08", b"!<arch>\n", b"text\nand\0more"]
HEADS += [b"BZh9", b"\xfd7zXZ", b"\x89PNG", b"\xce\xfa\xed\xfe", b"\x80\x04K\x01."]


@pytest.mark.parametrize("head", HEADS)
def test_binaries_are_found_whatever_they_are_called(head: bytes, tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_bytes(head)
    with pytest.raises(BundleError, match="binary"):
        scan.check(tmp_path)


def test_every_finding_is_named_and_all_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("deep/one", "two"):
        (tmp_path / name).write_text(BAD["an account"][1])
    with pytest.raises(BundleError) as caught:
        scan.check(tmp_path)
    assert "deep/one:1" in caught.value.where
    assert "two:1" in caught.value.where


def test_made_folders_are_left_out_and_links_are_read_as_links(tmp_path: Path) -> None:
    for folder, name in ((".venv", "f"), ("build", "f"), ("lab/__pycache__", "f.pyc"), ("x.egg-info", "f")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / name).write_text(BAD["an account"][1])
    assert scan.check(tmp_path) == 0
    (tmp_path / "link").symlink_to("/home/" + "someone/secret")
    with pytest.raises(BundleError, match="private path"):
        scan.check(tmp_path)


@pytest.mark.parametrize("path", ["lab/build/leak.py", "tools/target/x", "lab/__pycache__/notes.txt", "docs/.coverage"])
def test_a_name_of_a_made_folder_hides_nothing_elsewhere(path: str, tmp_path: Path) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(BAD["a model hub's token"][1])
    with pytest.raises(BundleError, match="access token"):
        scan.check(tmp_path)


def test_what_only_looks_like_a_checkout_is_scanned_whole(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / "leak").write_text(BAD["an account"][1])
    assert [finding.path for finding in scan.scan(tmp_path)] == ["leak"]


def test_a_checkout_is_scanned_as_it_would_be_published(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text("/kept-out/\n")
    for folder in ("kept-out", "new"):
        (tmp_path / folder).mkdir()
    (tmp_path / "kept-out" / "f").write_text(BAD["an account"][1])
    assert scan.check(tmp_path) == 1
    (tmp_path / "new" / "f").write_text(BAD["an account"][1])
    with pytest.raises(BundleError, match="new/f:1"):
        scan.check(tmp_path)


def test_a_pipe_and_a_huge_file_are_named_and_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(BundleError) as caught:
        scan.check(tmp_path)
    assert "pipe:1: binary: a special file" in caught.value.where
    assert f"huge:1: binary: {1 << 40} bytes" in caught.value.where


def test_an_author_scans_the_bundle_and_a_look_at_a_tree_compares_it_with_the_lock(tmp_path: Path) -> None:
    toy = toys.make(tmp_path)
    (toy.bundle / "notes").write_text(BAD["an account"][1])
    assert trees.run(toy, "--json", check=True).reason == "scan"
    # Nothing is published from a node, and what an operator keeps beside a bundle is no fault of the tree.
    done = trees.run(toy, "--root", toy.tree, "--full", "--json", check=True)
    assert done.code == 0
    assert done.table["result"]["bundle"]["files"] == len(manifest.load(toy.bundle).artifacts)
    patch = toy.bundle / "patches/prefill/alpha-first.patch"
    patch.write_bytes(patch.read_bytes() + b"\n")
    done = trees.run(toy, "--root", toy.tree, "--full", check=True)
    assert (done.code, "[artifact]" in done.err, patch.name in done.err) == (1, True, True)


def test_this_repository_holds_nothing_of_the_kind() -> None:
    assert scan.scan(trees.REPOSITORY) == []
