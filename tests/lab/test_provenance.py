"""Every script that measures says in its result what made it, so that the result can stand behind a claim."""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import Row, show
from lab import provenance
from lab.evidence import claims
from lab.evidence.claims import StaleResult, measured

ROOT = Path(__file__).parents[2]
# Scripts whose output another one takes into its own result.
PARTS = {"lab/rig/gpu/collectives.py"}
# Writes the same fields by itself.
ITSELF = {"benchmarks/router.py"}
# No results: archives, series, what starts scripts or engines, the table's printer, pictures, what engines load.
OTHERS = {
    "benchmarks/boundary_plot.py",
    "benchmarks/engines.py",
    "benchmarks/acceptance_plot.py",
    "benchmarks/pack_plot.py",
    "benchmarks/picture.py",
    "benchmarks/report.py",
    "benchmarks/series.py",
    "benchmarks/topk_plot.py",
    "benchmarks/topk_tables.py",
    "lab/rig/gpu/__init__.py",
    "lab/rig/gpu/convert.py",
    "lab/rig/gpu/counts.py",
    "lab/rig/gpu/filled.py",
    "lab/rig/gpu/pack.py",
    "lab/rig/gpu/parts.py",
    "lab/rig/gpu/reference.py",
    "lab/rig/gpu/seeds.py",
    "lab/rig/gpu/selections.py",
}
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("benchmarks", "lab/rig/gpu")
    for path in (ROOT / folder).glob("*.py")
)
DEVICE = [f"tests/device/{name}.py" for name in ("mutate", "sanitize", "stock", "test_exact_topk_device")]


@pytest.mark.parametrize("script", [name for name in [*SCRIPTS, *DEVICE] if name not in PARTS | OTHERS | ITSELF])
def test_a_script_that_measures_says_what_made_its_result(script: str) -> None:
    tree = ast.parse((ROOT / script).read_text(encoding="utf-8"))
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "provenance.of" and len(node.args) == 2
    ]
    assert calls and all(ast.unparse(call.args[0]) == "__file__" for call in calls)


def test_every_script_is_one_of_these() -> None:
    assert set(SCRIPTS) >= PARTS | OTHERS | ITSELF
    for script in ITSELF:
        text = (ROOT / script).read_text(encoding="utf-8")
        assert all(f'"{name}":' in text for name in ("script", "script_sha256", "machine", "seed"))


def test_the_head_of_a_result_names_script_digest_machine_versions_and_seed_and_no_host() -> None:
    script = ROOT / "benchmarks/sweep.py"
    head = provenance.of(str(script), 17)
    assert head["script"] == "benchmarks/sweep.py" and head["seed"] == 17
    assert head["script_sha256"] == hashlib.sha256(script.read_bytes()).hexdigest()
    assert head["machine"]["cores"] >= 1 and head["versions"]["python"] == platform.python_version()
    assert "torch" in head["versions"]
    assert platform.node() not in json.dumps(head)
    with pytest.raises(ValueError, match="subpath"):
        provenance.of("/elsewhere/script.py", None)


def result(folder: Path, capsys: pytest.CaptureFixture[str], **changed: Any) -> Path:
    """A root with a script and what ``show`` prints for it."""
    script = folder / "benchmarks/it.py"
    script.parent.mkdir()
    script.write_text("pass\n", encoding="utf-8")
    head = provenance.of(str(ROOT / "benchmarks/sweep.py"), 1)
    head |= {
        "script": "benchmarks/it.py",
        "script_sha256": hashlib.sha256(script.read_bytes()).hexdigest(),
        "modules": {},
        **changed,
    }
    show([Row("time", 3.5, "ms")], True, head)
    (folder / "it.json").write_text(capsys.readouterr().out, encoding="utf-8")
    return folder


def test_what_a_benchmark_prints_can_stand_behind_a_claim_until_its_script_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = result(tmp_path, capsys)
    assert measured(root, "it.json", "rows[time].value") == (3.5,)
    (root / "benchmarks/it.py").write_text("pass  # changed\n", encoding="utf-8")
    with pytest.raises(StaleResult, match="is stale"):
        measured(root, "it.json", "rows[time].value")


def test_the_modules_that_a_script_imports_are_named_with_their_digests_and_no_others() -> None:
    code = (
        "import sys, json; from pathlib import Path; import benchmarks.sweep; from lab import provenance; "
        "print(json.dumps(provenance.modules(Path('benchmarks/sweep.py').resolve())))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    named = json.loads(done.stdout)
    assert {"lab/models/fleet.py", "lab/models/capacity.py", "lab/models/transfer.py"} <= named.keys()
    assert all(digest == hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name, digest in named.items())
    assert not {"benchmarks/sweep.py", "benchmarks/report.py", "lab/provenance.py"} & named.keys()
    assert all(name.startswith("lab/") for name in named)


def test_a_real_benchmark_prints_such_a_result() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/load_overhead.py", "--streams=4", "--seconds=1", "--tokens=5", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    made = json.loads(done.stdout)
    assert {"script", "script_sha256", "machine", "versions", "seed", "rows"} <= made.keys()


def test_every_committed_result_names_its_script_and_says_so_where_it_does_not_say_more() -> None:
    """Older results lack a digest: what is read from them is claimed as reported, never as measured."""
    for path in sorted((ROOT / "evidence").rglob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if "script_sha256" in content:
            assert (ROOT / content["script"]).is_file() and re.fullmatch("[0-9a-f]{64}", content["script_sha256"])
        else:
            name = path.relative_to(ROOT).as_posix()
            assert name in claims.older(ROOT)[0]
            assert name not in {claim.result for claim in claims.read(ROOT)[0]}
