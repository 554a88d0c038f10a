"""Break the kernel in known ways and see that the device tests notice each one. Prints a table, --json writes it.

The tests also run on the kernel as it is, where they must notice nothing: a copy in which no test can run would catch
everything.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch  # noqa: F401  # the result names the card that it sees

from lab import provenance
from tests.device.topk_data import of_the_kernel
from tests.device.tree import REPOSITORY

SKIP = "not sanitizer and not thousands and not billion and not noise"
WHOLE = "nothing broken"
SECONDS = 240
# The one that the quick tests cannot see; and a few for the kernel as it is, which the exactness run tests in full.
TESTS = {"row offset in 32 bits": "billion", WHOLE: "narrower or ragged or layouts or paged"}
# name: text of the source, what to put there
MUTATIONS: dict[str, tuple[str, str]] = {
    "resident: ties to the highest column": (
        "column_of(first, i) < cut.limit",
        "column_of(first, i) >= cut.limit",
    ),
    "listed: ties to the highest column": ("columns[j] < last.limit", "columns[j] >= last.limit"),
    "few ties: the last one first": ("<< 32 | ~column;", "<< 32 | column;"),
    "candidates capped": ("a.k) || kept > S::kRoom)", "a.k))"),
    "candidates capped at the finish": (" && parts.blocks <= kSlots * kWarps;", ";"),
    "length read as unsigned": (
        "long long length = a.lengths[number];",
        "long long length = static_cast<unsigned>(a.lengths[number]);",
    ),
    "tail forgotten": ("if (threadIdx.x == 32 && inner.ragged_last)", "if (false && inner.ragged_last)"),
    "-0.0 below 0.0": ("__float_as_uint(__fadd_rn(x, 0.0f))", "__float_as_uint(x)"),
    "NaN highest": ("| 0x80000000u)) + 1u;", "| 0x80000000u));"),
    "columns before the start": (
        "static_cast<unsigned>(column + c) < static_cast<unsigned>(row.length);",
        "column + c < row.length;",
    ),
    "equal ones counted from the warp's own first": (
        "uint32_t rank = found + offset + before[u];",
        "uint32_t rank = found + before[u];",
    ),
    "segment off by one": ("(a.segments[middle] <= number ? low : high)", "(a.segments[middle] < number ? low : high)"),
    "no padding": ("out[i] = i < length ? map(i) : -1;", "out[i] = i < length ? map(i) : 0;"),
    "second window overwrites the first": ("    done += __reduce_add_sync", "    done *= __reduce_add_sync"),
    "row offset in 32 bits": ("+ number * a.stride +", "+ static_cast<int>(number * a.stride) +"),
    "the last round counted twice": ("if (left <= u * kThreads) hits &=", "if (false) hits &="),
    "the part of one block lost": ("return b < blocks && i < count;", "return b + 1 < blocks && i < count;"),
    "in order: ties to the highest column": ("columns[j] < edge.limit", "columns[j] >= edge.limit"),
    "plateau: the parts before not counted": (
        "const bool one = equal && end - equal < lacking",
        "const bool one = equal",
    ),
    "short table read beyond": ("return page < pages ?", "return page <= pages ?"),
}


def command(name: str) -> list[str]:
    """The tests of one copy; nothing above their folder is loaded, since what that needs is not on a GPU machine."""
    chosen = ["-k", TESTS.get(name, SKIP), "--confcutdir=tests/device", "tests/device"]
    return [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *chosen]


def copy(root: Path, name: str) -> str:
    """Lay out what the tests need, with one mutation; what is wrong with the mutation, or nothing."""
    for part in ("sources", "tests/device"):
        shutil.copytree(REPOSITORY / part, root / part)
    for part in ("tests/engine/decode/topk_oracle.py", "lab/__init__.py", "lab/provenance.py"):
        (root / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / part, root / part)
    (root / "pytest.ini").write_text("[pytest]\npythonpath = .\naddopts = --import-mode=importlib\n")
    if name == WHOLE:
        return ""
    old, new = MUTATIONS[name]
    source, module = (root / "sources" / "kernels" / f"exact_topk.{kind}" for kind in ("cu", "py"))
    text = source.read_text()
    if text.count(old) != 1:
        return f"the text stands {text.count(old)} times in the source"
    source.write_text(text.replace(old, new))
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    module.write_text(re.sub(r'SOURCE_SHA256 = "\w+"', f'SOURCE_SHA256 = "{digest}"', module.read_text()))
    return ""


def run(name: str) -> dict[str, object]:
    """Test a copy of this repository that carries one mutation."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        if wrong := copy(root, name):
            return {"name": name, "caught": False, "by": wrong}
        environment = {**os.environ, "PYTHONPATH": str(root), "PATCHBUNDLE_CACHE": f"{folder}/cache"}
        environment.pop("EVIDENCE", None)
        try:
            ran = subprocess.run(
                command(name), cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return {"name": name, "caught": False, "by": "the tests were not done in time"}
        return judged(name, ran.returncode, ran.stdout)


def judged(name: str, code: int, out: str) -> dict[str, object]:
    """What the tests' end says: a test that failed caught it, and nothing else does."""
    failed = re.findall(r"^FAILED \S+::(\S.*?)(?: - |$)", out, re.MULTILINE)
    caught = code == 1 and "KernelBuildError" not in out and bool(failed)
    by = failed[0] if failed else "" if code == 0 else out[-500:]
    return {"name": name, "caught": caught, "by": by, "passed": code == 0}


def right(row: dict[str, object]) -> bool:
    return row.get("passed") is True if row["name"] == WHOLE else row["caught"] is True


def main() -> int:
    """Give 1 if a mutation survives, or if the kernel as it is fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=[WHOLE, *MUTATIONS], help="names")
    options = parser.parse_args()
    with ThreadPoolExecutor(12) as pool:
        rows = list(pool.map(run, options.only))
    for row in rows:
        word = "caught" if row["caught"] else "passed" if row.get("passed") else "FAILED"
        sys.stdout.write(f"{word if right(row) else 'SURVIVED':<9}{row['name']:<48}{row['by']}\n")
    if options.json:
        proof = Path("tests/device/test_exact_topk_device.py")
        digest = hashlib.sha256((REPOSITORY / proof).read_bytes()).hexdigest()
        head = {**provenance.of(__file__, None), **of_the_kernel(), "tests": {str(proof): digest}}
        head["seeds"] = "those that the tests name"
        options.json.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")
    return 0 if all(right(row) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
