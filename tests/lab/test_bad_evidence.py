"""Bad input of the evidence, through the tool: each is a named error with the exit code of the table."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from patchbundle import cli
from patchbundle.errors import Exit

ROOT = Path(__file__).parents[2]
# Put together, so that the scan of this file finds none.
ADDRESS = ".".join(["10", "1", "2", "3"])
KEY = "api" + '_key = "0123456789abcdef"'


def edit(path: str, old: str, new: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        text = (root / path).read_text(encoding="utf-8")
        assert old in text
        (root / path).write_text(text.replace(old, new, 1), encoding="utf-8")

    return change


def add(path: str, text: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        with (root / path).open("a", encoding="utf-8") as file:
            file.write(text)

    return change


def without_source(root: Path) -> None:
    path = root / "evidence/claims.toml"
    text, count = re.subn(r'\nsource = "[^"]*"', "", path.read_text(encoding="utf-8"), count=1)
    assert count == 1
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Everything that the check reads."""
    for name in ("config", "docs", "evidence", "patches", "sources", "benchmarks", "lab", "tests", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def check(root: Path) -> tuple[int, dict[str, Any]]:
    done = CliRunner().invoke(cli.check_cli, ["--evidence", "--json", "--bundle", str(root)])
    return done.exit_code, json.loads(done.stdout)


def test_the_copy_holds(root: Path) -> None:
    code, told = check(root)
    assert (code, told["error"]) == (Exit.DONE, None), told


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        (without_source, "evidence", "is reported and lacks source"),
        (edit("evidence/claims.toml", 'unit = "tokens/s/GPU"\nkind = "recomputed"', 'unit = "ms"\nkind = "recomputed"'),
         "evidence", "is in ms, its formula gives tokens/s/GPU"),
        (add("benchmarks/sweep.py", "# changed\n"), "evidence", "evidence/models/sweep.json is stale"),
        (add("lab/models/fleet.py", "# changed\n"), "evidence", "is stale: lab/models/fleet.py has changed"),
        (edit("evidence/models/sweep.json", '"seed"', '"sown"'), "evidence", "lacks seed"),
        (edit("evidence/upstream.toml", '"bounded-pack"', '"nobody"'), "evidence", "nobody, which is no patch"),
        (edit("evidence/upstream.toml", 'how = "', 'who = "'), "evidence", "lacks how; has who"),
        (add("README.md", "\nIt is 3.7 times faster: 12.7 ms.\n"), "evidence", "12.7 ms is behind no claim"),
        (add("config/prefill.toml", f"\n# at {ADDRESS}\n"), "scan", ADDRESS),
        (add("config/decode.toml", f"\n# {KEY}\n"), "scan", "a credential"),
        (add("config/router.toml", "\nmore = 1\n"), "artifact", "config/router.toml"),
    ],
)  # fmt: skip
def test_each_bad_input_is_refused_by_name(root: Path, change: Callable[[Path], None], reason: str, words: str) -> None:
    change(root)
    code, told = check(root)
    assert code == Exit.REFUSED == told["error"]["exit"]
    assert told["error"]["reason"] == reason
    assert words in json.dumps(told, ensure_ascii=False)
