"""Run the real 0.5.17 engine on one GPU, stock and patched, plain and speculative, and compare them.

``python3 -m lab.rig.gpu.engine PACK --out evidence/engine/NAME.json`` on the GPU machine, where ``PACK`` is the folder
that ``lab.rig.gpu.pack`` wrote. Needs nothing beyond Python 3.12, Torch, numpy and CUDA's compiler, which are there.

The first engine starts alone and compiles. Its kernels are packed, unpacked into an empty home, and all other engines
start from that home, beside each other. The stock top-k appends its picks in the order in which its threads come, so a
long prompt's text differs from one run to the next: that is counted here too, against a selection by plain Torch.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import shutil
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab import provenance
from lab.rig import cache, client, deployment, models, ports
from lab.rig.client import Answer, Request, Route
from lab.rig.engine import LISTENS, READY, clean_environment
from lab.rig.errors import RigError
from lab.rig.gpu.pack import ENGINE, KERNELS, PATCHED, archive, files
from lab.rig.member import Spec
from lab.rig.tree import REPOSITORY

SITE = Path(__file__).with_name("site")
MODEL = "glm-dsa-gpu"
# Imported by name, never used on this path.
GHOSTS = [
    "IPython",
    "soundfile",
    "_soundfile_data",
    "torchcodec",
    "mistral_common",
    "pycountry",
    "nvidia_cutlass_dsl",
    "cutlass",
    "cudnn",
    "cutile_cache",
    "datasets",
    "torchao",
    "tilelang",
    "xgrammar",
    "outlines",
    "llguidance",
    "quack",
    "flash_attn",
    "helion",
    "gguf",
    "openai_harmony",
    "compressed_tensors",
    "watchfiles",
    "modelscope",
    "anthropic",
    "jsonschema",
    "zstandard",
    "triton_kernels",
    "pydantic_extra_types",
    "multiprocess",
    "blobfile",
    "smg_grpc_servicer",
    "tokenspeed_mla",
]
SPECULATION = (
    "--speculative-algorithm=EAGLE",
    "--speculative-num-steps=3",
    "--speculative-eagle-topk=1",
    "--speculative-num-draft-tokens=4",
    "--cuda-graph-max-bs=8",
)
LENGTHS = (40, 2_049, 5_000, 60_000, 100_000)
# What is compiled at run time lies here, below the home folder.
COMPILED = (".cache/deep_gemm", ".cache/flashinfer", ".cache/tvm-ffi", ".triton")
# Of the decode gates these two start in one process; the others need a prefill engine beside it.
EXACT = {"SGLANG_RESEARCH_EXACT_TOPK": "1"}
# The reference sorts, and counting reads numbers back: neither belongs into a CUDA graph.
EAGER = ("--disable-cuda-graph",)


# Engines that work on long prompts at the same time: the memory that each takes for one is kept by its process.
ASKED = 4


@dataclass(frozen=True)
class Variant:
    """One engine: which tree, with which flags and variables.

    Attributes:
        like: name of the variant whose texts it must bring.
        steps: whether its decode steps are timed.
    """

    name: str
    tree: str
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    like: str = ""
    steps: bool = False


FIRST = Variant("stock speculative", "stock", SPECULATION, steps=True)
VARIANTS = (
    Variant("stock plain", "stock", steps=True),
    Variant("patched plain", "patched", like="stock plain"),
    Variant("patched speculative", "patched", SPECULATION, like="stock speculative"),
    Variant("exact plain", "patched", env=EXACT, steps=True),
    Variant("exact speculative", "patched", SPECULATION, EXACT, steps=True),
    Variant("reference plain", "patched", EAGER, {**EXACT, "PATCHBUNDLE_RIG_TOPK": "reference"}, "exact plain"),
    Variant(
        "reference speculative",
        "patched",
        (*SPECULATION, *EAGER),
        {**EXACT, "PATCHBUNDLE_RIG_TOPK": "reference"},
        "exact speculative",
    ),
    Variant(
        "gates speculative",
        "patched",
        SPECULATION,
        {**EXACT, "SGLANG_RESEARCH_DCP_RETRACT": "1"},
        "exact speculative",
    ),
    Variant("stock watched", "patched", EAGER, {"PATCHBUNDLE_RIG_TOPK": "watch"}),
)


def unpack(pack: Path, home: Path) -> dict[str, Path]:
    """Lay out the stock library and a patched copy of its engine below ``home``; return their folders.

    Raises:
        RigError: kind ``pack``; an archive is missing or damaged.
    """
    library, patched = home / "library", home / "patched"
    try:
        if not library.is_dir():
            work = home / "library.making"
            shutil.rmtree(work, ignore_errors=True)
            with tarfile.open(pack / ENGINE, "r:xz") as source:
                source.extractall(work, filter="data")
            work.rename(library)
        shutil.rmtree(patched, ignore_errors=True)
        shutil.copytree(library / "sglang", patched / "sglang")
        with tarfile.open(pack / PATCHED, "r:xz") as source:
            source.extractall(patched, filter="data")
    except (OSError, tarfile.TarError, EOFError) as error:
        raise RigError("pack", f"{pack}: {error}") from error
    return {"stock": library, "patched": patched}


def spec(variant: Variant, trees: Mapping[str, Path], model: Path, port: int, home: Path) -> Spec:
    """The engine that runs a variant; packages come from the stock library, compiled kernels from ``home``."""
    tree, library = trees[variant.tree], trees["stock"]
    env = {
        **clean_environment(),
        "HOME": str(home),
        "PYTHONPATH": os.pathsep.join(map(str, dict.fromkeys((tree, SITE, library, REPOSITORY)))),
        "PATCHBUNDLE_RIG_GHOSTS": ",".join(GHOSTS),
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": ports.HOST,
        "CUDA_HOME": os.environ.get("CUDA_HOME", "/usr/local/cuda"),
        "FLASHINFER_USE_CUDA_NORM": "1",  # no CuTe DSL in the archive
        "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",  # short prompts by the sparse path too: no FA3 there
        "PYTHONUNBUFFERED": "1",
        **({"PATCHBUNDLE_RIG_HOOKS": "lab.rig.gpu.reference"} if "PATCHBUNDLE_RIG_TOPK" in variant.env else {}),
        **variant.env,
    }
    argv = [sys.executable, "-m", "sglang.launch_server", f"--model-path={model}", "--load-format=auto"]
    argv += ["--sampling-backend=pytorch", "--grammar-backend=none", f"--host={ports.HOST}", f"--port={port}"]
    argv += ["--skip-server-warmup", "--max-running-requests=8", "--random-seed=0", "--sleep-on-idle"]
    # A share of what is free when it starts, but few tokens: ten engines find room beside each other.
    argv += ["--mem-fraction-static=0.5", "--max-total-tokens=262144", "--context-length=131072"]
    argv += ["--chunked-prefill-size=4096"]
    argv += ["--kv-cache-dtype=fp8_e4m3", *variant.flags]
    return Spec("E", tuple(argv), env, (READY, LISTENS), "alone", port, tree=str(tree))


def compiled(home: Path) -> list[str]:
    """Libraries that were compiled at run time, below ``home``."""
    found = [path for top in COMPILED for end in ("*.so", "*.cubin") for path in (home / top).rglob(end)]
    return sorted(path.relative_to(home).as_posix() for path in found)


def pack_kernels(home: Path, target: Path) -> None:
    """Write what was compiled below ``home`` to the archive ``target``."""
    target.parent.mkdir(parents=True, exist_ok=True)
    archive(home, [f"{top}/{name}" for top in COMPILED for name in files(home / top)], target)


@dataclass
class Running:
    """A variant whose engine runs, and what it brought."""

    variant: Variant
    deployment: deployment.Deployment
    port: int
    found: dict[str, Any] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)

    def up(self) -> None:
        """Start it and bring the first token.

        Raises:
            RigError: kind ``crash``.
        """
        began = time.monotonic()
        self.deployment.up(500)
        ready = time.monotonic()
        client.send(Route(self.port), Request(client.prompts(7, 1, LENGTHS[0])[0], 1), timeout=400.0)
        self.found |= {"ready_s": round(ready - began, 1), "first_token_s": round(time.monotonic() - ready, 1)}

    def ask(self, new: int) -> None:
        """Send the prompts twice, the cache emptied before each time."""
        requests = [Request(client.prompts(7, 1, length)[0], new, str(length)) for length in LENGTHS]
        client.flush(self.port)
        self.answers = client.send_all(Route(self.port), requests, together=False, timeout=400.0)
        client.flush(self.port)
        again = client.send_all(Route(self.port), requests, together=False, timeout=400.0)
        client.flush(self.port)
        difference = client.compare(self.answers, again)
        self.found |= {
            "accept": [round(answer.accept_length, 3) for answer in self.answers],
            "seconds": [round(answer.seconds, 2) for answer in self.answers],
            "errors": [answer.error for answer in self.answers],
            # The same engine, the same prompts: what differs here is the engine's own noise.
            "same_texts_again": difference.same_texts,
            "first_difference_again": difference.first_token,
            "ids": [list(answer.ids) for answer in self.answers],
        }
        counts = [event.values for event in deployment.parse_events(self.deployment.log("E"))]
        if counts:
            self.found["selections"] = {name: int(value) for name, value in counts[-1].items()}

    def repeat(self, length: int, times: int, new: int) -> None:
        """Send one prompt so many times, all of it but the last page cached, and count the texts that differ."""
        request = Request(client.prompts(7, 1, length)[0], new, str(length))
        hot = [client.send(Route(self.port), request, timeout=400.0) for _ in range(times + 1)][1:]
        texts = {answer.ids for answer in hot if not answer.error}
        self.found.setdefault("repeated", {})[str(length)] = {"times": len(hot), "different_texts": len(texts)}

    def orders(self, times: int, new: int) -> None:
        """Send several prompts at once in another order each time, and count each prompt's different texts."""
        requests = [Request(client.prompts(7, 1, length)[0], new, str(length)) for length in LENGTHS[:4]]
        texts: dict[str, set[tuple[int, ...]]] = {request.tag: set() for request in requests}
        for turn in range(times):
            order = requests[turn % len(requests) :] + requests[: turn % len(requests)]
            for answer in client.send_all(Route(self.port), order, together=True, timeout=400.0):
                texts[answer.tag].add(answer.ids)
        self.found["batch_orders"] = {
            "times": times,
            "different_texts": {length: len(found) for length, found in texts.items()},
        }

    def step_ms(self, length: int, steps: int = 128, times: int = 5) -> float:
        """Milliseconds of a decode step (with speculation: of a token) behind ``length`` tokens, the median run's."""
        prompt = client.prompts(7, 1, length)[0]

        def seconds(new: int) -> float:
            took = sorted(client.send(Route(self.port), Request(prompt, new), 400.0).seconds for _ in range(times))
            return took[times // 2]

        seconds(1)
        return round((seconds(1 + steps) - seconds(1)) / steps * 1000, 3)

    def time_steps(self) -> None:
        """Time the decode steps behind a middling and a long prompt."""
        self.found["step_ms"] = {str(length): self.step_ms(length) for length in (5_000, 60_000)}

    def shares(self, length: int, folder: Path, steps: int = 10) -> dict[str, Any]:
        """Microseconds a decode step that the GPU's kernels took, and how many of them chose the top-k."""
        folder.mkdir(parents=True, exist_ok=True)
        body = {"output_dir": str(folder), "num_steps": steps, "activities": ["GPU"], "profile_by_stage": False}
        client.post_text(self.port, "/start_profile", body, 60.0)
        client.send(Route(self.port), Request(client.prompts(7, 1, length)[0], 3 * steps), 400.0)
        until = time.monotonic() + 60
        while not (traces := sorted(folder.rglob("*.json.gz"))):
            if time.monotonic() > until:
                raise RigError("profile", f"no trace in {folder}")
            time.sleep(0.2)  # the engine writes the file when it is done; nothing tells of it
        time.sleep(2)
        return kernel_shares(json.loads(gzip.decompress(traces[0].read_bytes())), steps)

    def sum_kernels(self, folder: Path) -> None:
        """Profile some decode steps; that it does not work is told and takes nothing from the other results."""
        try:
            self.found["step_kernels"] = self.shares(60_000, folder / self.variant.name.replace(" ", "-"))
        except (RigError, OSError, KeyError, ValueError) as error:
            self.found["step_kernels"] = {"not_measured": str(error)}


# Words in the names of kernels that choose the top-k: the stock ones, and those of exact_topk.cu.
CHOOSE = re.compile(r"topk|resident_rows|filter_rows|finish_rows|stream_rows", re.IGNORECASE)


def kernel_shares(trace: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Sum a profiler's trace: microseconds a step of all kernels, of those that choose the top-k, and their names."""
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    chosen = [one for one in kernels if CHOOSE.search(one["name"]) and "moe" not in one["name"].lower()]
    return {
        "kernels_us": round(sum(event["dur"] for event in kernels) / steps, 1),
        "topk_us": round(sum(event["dur"] for event in chosen) / steps, 1),
        "topk_kernels": sorted({event["name"][:120] for event in chosen}),
    }


def begin(variant: Variant, trees: Mapping[str, Path], model: Path, home: Path) -> Running:
    """A variant's deployment, not yet started."""
    (port,) = ports.free(1)
    name = variant.name.replace(" ", "-")
    one = deployment.Deployment(deployment.new_folder(f"gpu-{name}"), [spec(variant, trees, model, port, home)])
    return Running(variant, one, port)


def side_by_side(work: Sequence[Running], what: Callable[[Running], None]) -> None:
    """Do ``what`` for every engine at once; an engine that fails keeps its error and is left out from then on.

    The threads live on as long as this process: a keeper ends with the thread that started it, not with its process.
    """

    def one(running: Running, ended: threading.Event) -> None:
        try:
            what(running)
        except (RigError, OSError, KeyError, ValueError) as error:
            tail = error.tail[-5:] if isinstance(error, RigError) else ()
            running.found["failed"] = "; ".join([f"{type(error).__name__}: {error}", *tail])[:1500]
        ended.set()
        threading.Event().wait()

    waiting = []
    for running in work:
        if "failed" not in running.found:
            waiting.append(threading.Event())
            threading.Thread(target=one, args=(running, waiting[-1]), daemon=True).start()
    for ended in waiting:
        ended.wait()


# Speculation verifies several rows at once, and bf16 sums of another batch shape differ in their last bits, so a near
# tie may go the other way: told, not demanded. The stock top-k's texts of long prompts are told too: they differ from
# themselves.
TOLD = (("stock plain", "stock speculative"), ("exact plain", "exact speculative"))
# Prompts that the stock top-k takes whole or nearly so.
SHORT = 3


def compared(work: Sequence[Running]) -> list[dict[str, Any]]:
    """One entry for each pair of variants that both answered; ``demanded`` tells how many texts must be the same."""
    answered = {running.variant.name: running for running in work if running.answers}
    pairs = [(running.variant.like, name, True) for name, running in answered.items() if running.variant.like]
    found = []
    for left, right, demanded in [*pairs, *((*pair, False) for pair in TOLD)]:
        if left in answered and right in answered:
            one, other = answered[left], answered[right]
            difference = client.compare(one.answers, other.answers)
            stock = one.variant.tree == "stock"
            found.append(
                {
                    "left": left,
                    "right": right,
                    "requests": difference.requests,
                    "demanded": (SHORT if stock else difference.requests) if demanded else 0,
                    "same_texts": difference.same_texts,
                    "first_difference": difference.first_token,
                    "logprob": difference.logprob,
                }
            )
    return found


def write(report: dict[str, Any], work: Sequence[Running], out: Path) -> None:
    """Write what is known so far: a run that is cut off leaves that."""
    report["runs"] = {running.variant.name: running.found for running in work}
    report["compared"] = compared(work)
    report["green"] = (
        all(running.answers and "failed" not in running.found for running in work)
        and len(work) == 1 + len(VARIANTS)
        and all(entry["same_texts"] >= entry["demanded"] for entry in report["compared"])
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main() -> int:
    """Entry point of ``make gpu-engine``: 0 when every engine ran and all demanded texts are the same."""
    parser = argparse.ArgumentParser(description="the real engine on one GPU, stock against patched")
    parser.add_argument("pack", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--save-kernels", type=Path, help=f"write {KERNELS} into this folder")
    arguments = parser.parse_args()
    began = time.monotonic()
    home = cache.root() / "gpu"
    home.mkdir(parents=True, exist_ok=True)
    own, carried = home / "home-first", home / "home"
    report: dict[str, Any] = {**provenance.of(__file__, models.get(MODEL).seed), "prompts": list(LENGTHS)}
    work: list[Running] = []

    def note(text: str) -> None:
        report["seconds"] = round(time.monotonic() - began, 1)
        print(f"[{report['seconds']:6.1f} s] {text}", flush=True)
        write(report, work, arguments.out)

    try:
        trees = unpack(arguments.pack, home)
        model = models.ensure(MODEL, cache.ensure)
        for folder in (own, carried):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        report["carried_kernels"] = (arguments.pack / KERNELS).is_file()
        if report["carried_kernels"]:
            with tarfile.open(arguments.pack / KERNELS, "r:xz") as source:
                source.extractall(own, filter="data")
        before = set(compiled(own))
        note("unpacked")
        work.append(begin(FIRST, trees, model, own))
        side_by_side(work, Running.up)
        report["compiled"] = [name for name in compiled(own) if name not in before]
        note(f"first engine: {work[0].found}")
        side_by_side(work, lambda running: running.ask(arguments.new))
        note("first engine asked")
        kernels = arguments.pack / KERNELS
        if not report["carried_kernels"]:
            kernels = home / KERNELS
            pack_kernels(own, kernels)
        report["kernels_mb"] = round(kernels.stat().st_size / 1e6, 1)
        with tarfile.open(kernels, "r:xz") as source:
            source.extractall(carried, filter="data")
        note("kernels unpacked into an empty home")
        beside = [begin(variant, trees, model, carried) for variant in VARIANTS]
        work += beside
        side_by_side(beside, Running.up)
        note("all others are up")
        for first in range(0, len(beside), ASKED):
            side_by_side(beside[first : first + ASKED], lambda running: running.ask(arguments.new))
            note(f"{min(first + ASKED, len(beside))} of the others asked")
        by_name = {running.variant.name: [running] for running in work}
        repeated = [*by_name["exact plain"], *by_name["exact speculative"], *by_name["stock plain"]]
        side_by_side(repeated, lambda running: running.repeat(5_000, 20, arguments.new))
        side_by_side(repeated, lambda running: running.repeat(60_000, 20, arguments.new))
        side_by_side(repeated, lambda running: running.orders(8, arguments.new))
        note("repeated")
        # One after another: these are times.
        for running in work:
            if running.variant.steps:
                side_by_side([running], Running.time_steps)
        note("steps timed")
        for name in ("stock plain", "exact plain"):
            (running,) = by_name[name]
            side_by_side([running], lambda one: one.sum_kernels(home / "traces"))
        note("kernels summed")
        if arguments.save_kernels:
            pack_kernels(carried, arguments.save_kernels / KERNELS)
    except RigError as error:
        print(*error.tail, f"{error.kind}: {error}", sep="\n", file=sys.stderr)
        report["error"] = error.as_json()
    finally:
        for running in work:
            running.deployment.down()
    note("ended")
    for entry in report["compared"]:
        print(f"{entry['left']} / {entry['right']}: {entry['same_texts']} of {entry['requests']} texts are the same")
    for running in work:
        print(running.variant.name, {key: value for key, value in running.found.items() if key != "ids"})
    return 0 if report["green"] else 1


if __name__ == "__main__":
    sys.exit(main())
