"""Everything that is measured on one GPU outside a whole engine, in one command, one result each.

``python -m lab.rig.gpu.parts PACK --pack`` puts beside the archives of ``lab.rig.gpu.pack`` what they lack. On the GPU
machine ``python3 -m lab.rig.gpu.parts PACK --out FOLDER`` runs the steps of :func:`steps`: first those that only check,
beside each other, then those that take times, one after another on an idle machine. A step that fails or is not done in
time takes nothing from the others; each result is written by the script that it names. ``--only`` runs some of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from lab.rig import cache, trees
from lab.rig.engine import clean_environment
from lab.rig.errors import RigError
from lab.rig.gpu.engine import GHOSTS, SITE, unpack
from lab.rig.gpu.pack import KERNELS
from lab.rig.tree import REPOSITORY

# The prefill release needs another Torch than a GPU machine has; of it this file alone is run there.
PREFILL = "prefill-0.5.19"
GATHER = "sglang/kernels/ops/kvcache/pd_dcp_gather.py"
# Compiles the engine's own selection and copies its library to where the other steps look for it.
TOPK_V2 = (
    "import pathlib, shutil, sys; from sglang.kernels.ops.attention.dsv4 import topk; topk._jit_topk_v2_module(); "
    "(made,) = pathlib.Path('~/.cache/tvm-ffi').expanduser().glob('*topk_v2*/*.so'); shutil.copyfile(made, sys.argv[1])"
)
# Compiles the norm that the prefill's script times: no compiler may run beside what is timed.
NORM = (
    "import torch, sgl_kernel; x = torch.ones(2, 6144, dtype=torch.bfloat16, device='cuda'); "
    "sgl_kernel.fused_add_rmsnorm(x, x.clone(), x[0].clone()); print('made')"
)
PYTEST = ("-m", "pytest", "-q", "-m", "device", "-p", "no:cacheprovider", "-o", "filterwarnings=")
# Nothing above their folder is loaded: what that needs is not on a GPU machine.
TESTS = (*PYTEST, "--confcutdir=tests/device", "tests/device", "-k")
CLASSES = "every_class"


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        argv: after the interpreter.
        result: the file that it writes, for those that read the list.
        library: whether the archive's library is on its path with what stands for the packages that it lacks.
        alone: whether it takes times and so needs the machine for itself.
        prints: the result is what it prints.
        after: a step that has to be done before.
        limit: seconds.
    """

    name: str
    argv: tuple[str, ...]
    result: Path
    library: bool = False
    alone: bool = False
    prints: bool = False
    after: str = ""
    limit: float = 300.0
    env: dict[str, str] = field(default_factory=dict)


def steps(out: Path, home: Path, found: dict[str, Path], prefill: Path) -> list[Step]:
    """All steps, those alone in the order in which they run: what a cut leaves out comes last."""
    topk, engine = out / "topk", out / "engine"
    v2 = home / "topk_v2.so"
    stock = (f"--stock-aot={found['stock'] / 'sgl_kernel/sm90/common_ops.abi3.so'}", f"--stock-v2={v2}")
    # For them the stock library lies behind the repository's own files: only tvm_ffi is imported from it.
    path = {"PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(found["stock"])))}
    exact, patched = topk / "exactness.json", str(found["patched"])
    shared = {"EVIDENCE": str(exact)}
    return [
        *(
            Step(f"exactness {number}", (*TESTS, chosen), exact, env=shared)
            for number, chosen in enumerate(
                (
                    f"{CLASSES} and resident",
                    f"{CLASSES} and not resident",
                    f"not {CLASSES} and not sanitizer and not bfloat16",
                    "bfloat16",
                ),
                1,
            )
        ),
        Step(
            "sanitizer", ("-m", "tests.device.sanitize", f"--json={topk / 'sanitizer.json'}"), topk / "sanitizer.json"
        ),
        Step("mutations", ("-m", "tests.device.mutate", f"--json={topk / 'mutations.json'}"), topk / "mutations.json"),
        Step(
            "stand-ins",
            ("-m", "lab.rig.gpu.standins", f"--out={engine / 'standins.json'}"),
            engine / "standins.json",
            True,
        ),
        Step("stock library", ("-c", TOPK_V2, str(v2)), v2, True),
        Step("norm library", ("-c", NORM), home / "norm.txt", True, prints=True),
        Step(
            "stock errors",
            ("-m", "tests.device.stock", *stock, f"--json={topk / 'stock.json'}"),
            topk / "stock.json",
            after="stock library",
            env=path,
        ),
        Step(
            "top-k times",
            ("-m", "benchmarks.topk", *stock, f"--json={topk / 'speed.json'}"),
            topk / "speed.json",
            alone=True,
            after="stock library",
            env=path,
        ),
        Step(
            "merged parts",
            ("-m", "lab.rig.gpu.dsa_parts", patched, f"--out={engine / 'h200-dsa-parts.json'}"),
            engine / "h200-dsa-parts.json",
            True,
            True,
        ),
        Step(
            "top-k profile",
            ("-m", "benchmarks.topk_profile", f"--json={topk / 'profile.json'}"),
            topk / "profile.json",
            alone=True,
        ),
        Step(
            "prefill kernels",
            ("-m", "benchmarks.prefill_gpu", str(prefill), "--json"),
            engine / "h200-prefill-kernels.json",
            True,
            True,
            True,
        ),
        Step(
            "retraction",
            ("-m", "benchmarks.decode_gpu", str(home), "--json"),
            engine / "h200-retraction.json",
            True,
            True,
            True,
            # Both trees are loaded into one process, and this one may be imported there once only.
            env={"PATCHBUNDLE_RIG_GHOSTS": ",".join((*GHOSTS, "torchvision"))},
        ),
    ]


def library(found: dict[str, Path], home: Path) -> dict[str, str]:
    """Variables under which the archive's library runs, with a home of its own for what is compiled."""
    return {
        **clean_environment(),
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join(map(str, (SITE, found["stock"], REPOSITORY))),
        "PATCHBUNDLE_RIG_GHOSTS": ",".join(GHOSTS),
        "CUDA_HOME": os.environ.get("CUDA_HOME", "/usr/local/cuda"),
        "HF_HUB_OFFLINE": "1",
        "FLASHINFER_USE_CUDA_NORM": "1",  # no CuTe DSL in the archive
    }


class Run:
    """The steps under way, and how each ended."""

    def __init__(self, logs: Path, env: dict[str, str], until: float) -> None:
        self.logs, self.env, self.until = logs, env, until
        self.ended: dict[str, str] = {}
        self.began = time.monotonic()

    def step(self, one: Step) -> None:
        """Run it, its words into a log; how it ended is told and kept."""
        began = time.monotonic()
        if one.after and self.ended.get(one.after) != "done":
            return self.tell(one, f"left out: {one.after} is not done", began)
        limit = min(one.limit, self.until - began)
        if limit <= 0:
            return self.tell(one, "left out: no time", began)
        log = self.logs / f"{one.name.replace(' ', '-')}.log"
        one.result.parent.mkdir(parents=True, exist_ok=True)
        printed = one.result.with_suffix(".new")
        with log.open("w", encoding="utf-8") as words, printed.open("w", encoding="utf-8") as made:
            word = self.wait(one, words, made if one.prints else words, limit)
        # What a step printed before it was cut off is no result.
        if one.prints and printed.stat().st_size and not word.startswith("not done"):
            printed.replace(one.result)
        printed.unlink(missing_ok=True)
        self.tell(one, word, began)

    def wait(self, one: Step, words: TextIO, made: TextIO, limit: float) -> str:
        """Start it, wait for its end, and say how it ended."""
        env = {**(self.env if one.library else os.environ), **one.env, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            [sys.executable, *one.argv], cwd=REPOSITORY, env=env, stdout=made, stderr=words, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return "not done in time"
        return "done" if code == 0 else f"ended with {code}"

    def tell(self, one: Step, word: str, began: float) -> None:
        self.ended[one.name] = word
        now = time.monotonic()
        print(f"[{now - self.began:6.1f} s] {one.name}: {word}, {now - began:.1f} s", flush=True)

    def chain(self, row: Sequence[Step]) -> None:
        for one in row:
            self.step(one)

    def all(self, listed: Sequence[Step]) -> None:
        """Those that only check beside each other, each behind what it waits for; then the others."""
        checks = [one for one in listed if not one.alone]
        rows = [[one, *(other for other in checks if other.after == one.name)] for one in checks if not one.after]
        threads = [threading.Thread(target=self.chain, args=(row,)) for row in rows]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.chain([one for one in listed if one.alone])


def pack(folder: Path) -> None:
    """Put the prefill tree's one file beside the archives."""
    target = folder / PREFILL / GATHER
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(trees.stock("prefill", print) / GATHER, target)


def chosen(listed: Sequence[Step], only: str) -> list[Step]:
    """The named steps and what they wait for.

    Raises:
        RigError: kind ``usage``; there is no such step.
    """
    if not only:
        return list(listed)
    names = set(only.split(","))
    if unknown := names - {one.name for one in listed}:
        raise RigError("usage", f"no step {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in listed)}")
    names |= {one.after for one in listed if one.name in names}
    return [one for one in listed if one.name in names]


def main() -> int:
    """Entry point of ``make gpu-parts``: 0 when every step is done."""
    parser = argparse.ArgumentParser(description="what is measured on one GPU outside a whole engine")
    parser.add_argument("pack", type=Path)
    parser.add_argument("--pack", dest="making", action="store_true", help="only put there what the archives lack")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "evidence")
    parser.add_argument("--logs", type=Path, default=REPOSITORY / "build/gpu-parts")
    parser.add_argument("--only", default="", help="names of steps, comma separated")
    parser.add_argument("--limit", type=float, default=500.0, help="seconds after which nothing is left running")
    arguments = parser.parse_args()
    began = time.monotonic()
    try:
        if arguments.making:
            pack(arguments.pack)
            return 0
        home = cache.root() / "gpu"
        own = home / "home-parts"
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True)
        found = unpack(arguments.pack, home)
        listed = steps(arguments.out.resolve(), home, found, (arguments.pack / PREFILL).resolve())
        listed = chosen(listed, arguments.only)
    except (RigError, OSError) as error:
        print(f"{getattr(error, 'kind', 'files')}: {error}", file=sys.stderr)
        return 1
    if (arguments.pack / KERNELS).is_file():
        shutil.unpack_archive(arguments.pack / KERNELS, own, "xztar", filter="data")
    (home / "stock").unlink(missing_ok=True)
    (home / "stock").symlink_to(found["stock"])
    for one in listed:
        one.result.unlink(missing_ok=True)
    arguments.logs.mkdir(parents=True, exist_ok=True)
    run = Run(arguments.logs, library(found, own), began + arguments.limit)
    print(f"[{time.monotonic() - began:6.1f} s] unpacked", flush=True)

    run.all(listed)
    return 0 if all(word == "done" for word in run.ended.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
