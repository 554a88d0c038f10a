"""Break the kernel in known ways and see that the device tests notice each one. Prints a table, --json writes it."""

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

from tests.device.tree import REPOSITORY

SKIP = "not sanitizer and not thousands and not billion and not noise"
TESTS = {"row offset in 32 bits": "billion"}  # the one that the quick tests cannot see
# name: text of the source, what to put there
MUTATIONS: dict[str, tuple[str, str]] = {
    "resident: ties to the highest column": (
        "if (mark && rank++ < wanted)",
        "if (mark && rank++ >= verdict.equal - wanted)",
    ),
    "stream: ties to the highest column": (
        "key == verdict.key && ~column >= last",
        "key == verdict.key && ~column <= last",
    ),
    "candidates capped": ("const uint32_t kept = m.kept;\n    if", "const uint32_t kept = min(m.kept, 8192u);\n    if"),
    "length read as unsigned": (
        "long long length = a.lengths[number];",
        "long long length = static_cast<unsigned>(a.lengths[number]);",
    ),
    "tail forgotten": ("if (threadIdx.x == 32 && from < to && ragged_last", "if (false && ragged_last"),
    "-0.0 below 0.0": ("x == 0.0f ? 0u : __float_as_uint(x)", "__float_as_uint(x)"),
    "NaN highest": ("return x != x ? 1u : ordered;", "return x != x ? 0xFFFFFFFEu : ordered;"),
    "columns before the start": ("if (column + c >= 0 && column + c < row.length)", "if (column + c < row.length)"),
    "equal ones counted from the warp's own first": (
        "uint32_t rank = found + offset + before[u];",
        "uint32_t rank = found + before[u];",
    ),
    "segment off by one": ("(a.segments[middle] <= number ? low : high)", "(a.segments[middle] < number ? low : high)"),
    "no padding": ("out[i] = i < length ? map(i) : -1;", "out[i] = i < length ? map(i) : 0;"),
    "second window overwrites the first": ("    done += __shfl_sync", "    done *= __shfl_sync"),
    "row offset in 32 bits": ("+ number * a.stride +", "+ static_cast<int>(number * a.stride) +"),
    "infinity not above the pivot": ("return x > pivot; }", "return x > pivot && x < INFINITY; }"),
    "the part of one block lost": ("part < min(split, i * 32 + 32)", "part < min(split - 1, i * 32 + 32)"),
    "short table read beyond": ("return page < pages ?", "return page <= pages ?"),
}


def run(name: str) -> dict[str, object]:
    """Test a copy of this repository that carries one mutation."""
    old, new = MUTATIONS[name]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "copy"
        for part in ("sources", "tests"):
            shutil.copytree(REPOSITORY / part, root / part)
        (root / "pytest.ini").write_text("[pytest]\npythonpath = .\naddopts = --import-mode=importlib\n")
        source, module = (root / "sources" / "kernels" / f"exact_topk.{kind}" for kind in ("cu", "py"))
        text = source.read_text()
        if text.count(old) != 1:
            return {"name": name, "caught": False, "by": f"the text stands {text.count(old)} times in the source"}
        source.write_text(text.replace(old, new))
        digest = hashlib.sha256(source.read_bytes()).hexdigest()
        module.write_text(re.sub(r'SOURCE_SHA256 = "\w+"', f'SOURCE_SHA256 = "{digest}"', module.read_text()))
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", TESTS.get(name, SKIP)]
        environment = {**os.environ, "PYTHONPATH": str(root), "PATCHBUNDLE_CACHE": f"{folder}/cache"}
        environment.pop("EVIDENCE", None)
        ran = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        failed = re.findall(r"^(?:FAILED|ERROR) \S+::(\S.*?)(?: - |$)", ran.stdout, re.MULTILINE)
        built = "KernelBuildError" not in ran.stdout
        return {
            "name": name,
            "caught": ran.returncode == 1 and built and bool(failed),
            "by": failed[0] if failed else "",
        }


def main() -> int:
    """Give 1 if a mutation survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=list(MUTATIONS), help="names")
    options = parser.parse_args()
    with ThreadPoolExecutor(6) as pool:
        rows = list(pool.map(run, options.only))
    for row in rows:
        sys.stdout.write(f"{'caught' if row['caught'] else 'SURVIVED':<9}{row['name']:<40}{row['by']}\n")
    if options.json:
        options.json.write_text(json.dumps({"script": "tests/device/mutate.py", "rows": rows}, indent=1) + "\n")
    return 0 if all(row["caught"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
