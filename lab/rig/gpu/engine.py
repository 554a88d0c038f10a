"""Run the real 0.5.17 engine on one GPU, stock and patched, plain and speculative, and compare them.

``python3 -m lab.rig.gpu.engine PACK --out evidence/engine/NAME.json`` on the GPU machine, where ``PACK`` is the folder
that ``lab.rig.gpu.pack`` wrote. Needs nothing beyond Python 3.12, Torch, numpy and CUDA's compiler, which are there.

The first engine starts alone and compiles; the others start beside each other in its home and find what it compiled.
The stock top-k appends its picks in the order in which its threads come, so a long prompt's text differs from one run
to the next: that is counted here too, against a selection by plain Torch. Where a selection must not depend on threads,
as for the draft's seed, both sides take the engine's top-k by Torch or ours.

A part that fails keeps its error in the result and takes nothing from the other parts; what is known is written after
each part.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import importlib
import itertools
import json
import os
import re
import shutil
import sys
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab import provenance
from lab.rig import cache, client, deployment, models, ports
from lab.rig.client import Answer, Difference, Request, Route
from lab.rig.engine import LISTENS, READY, clean_environment
from lab.rig.errors import RigError
from lab.rig.gpu.pack import ENGINE, KERNELS, PATCHED, archive, content, files
from lab.rig.member import Spec
from lab.rig.tree import REPOSITORY

SITE = Path(__file__).with_name("site")
MODEL = "glm-dsa-gpu"
ITERATION = "glm-dsa-gpu-iteration"
# What engines load: it decides a result as the modules of this process do, so it is loaded here and named.
LOADED = ("lab.rig.gpu.reference", "lab.rig.gpu.seeds")
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
)
LENGTHS = (40, 2_049, 5_000, 60_000, 100_000)
# What is compiled at run time lies here, below the home folder.
COMPILED = (".cache/deep_gemm", ".cache/flashinfer", ".cache/tvm-ffi", ".triton")
# Of the decode gates these two start in one process; the others need a prefill engine beside it.
EXACT = {"SGLANG_RESEARCH_EXACT_TOPK": "1"}
REFERENCE = {**EXACT, "PATCHBUNDLE_RIG_TOPK": "reference"}
# The reference sorts, and counting reads numbers back: neither belongs into a CUDA graph.
EAGER = ("--disable-cuda-graph",)
# The engine's selection by torch.topk: the same whatever the order of threads.
BY_TORCH = ("--dsa-topk-backend=torch",)
UNFUSED = {"SGLANG_DSA_FUSE_TOPK": "0", "SGLANG_OPT_USE_TOPK_V2": "0"}
# The patch is for the decode engine of a pair: ``alone`` leaves out that one condition.
SEED = {"SGLANG_RESEARCH_DRAFT_SEED_RECOMPUTE": "1", "PATCHBUNDLE_RIG_SEEDS": "alone"}
# Every batch of the orders has a graph of its own size, so that a graph adds no rows which the eager reference lacks.
GRAPHS = ("--cuda-graph-bs-decode", "1", "2", "3", "4")

# Contexts and batches of the decode steps that are timed. One token more than whole pages: all but that is cached.
CONTEXTS = (8_192, 81_920, 131_072)
BATCHES = (1, 16, 64)
DECODED = 448
# Steps between two lines of the engine's log that tell its throughput; lines that make a time; steps that are profiled.
INTERVAL, TIMES, PROFILED = 16, 8, 10
# Room for 131,072 tokens and what is decoded; prompts taken up few at a time, all before the first decode step.
WIDE = (
    "--context-length=135168",
    "--max-running-requests=64",
    "--cuda-graph-bs-decode",
    *map(str, BATCHES),
    f"--decode-log-interval={INTERVAL}",
    "--prefill-max-requests=8",
)
# Eight of the 24 orders of four prompts; as many of them are sent again with nothing cached.
ORDERS = tuple(itertools.permutations(range(4)))[::3]
COLD = 4

# Engines that work on long prompts at the same time: the memory that each takes for one is kept by its process.
ASKED = 5
# Seconds a request may take.
PATIENCE = 60.0
# Seconds kept for what follows, so that an engine that does not come up takes no more than itself.
AFTER_OTHERS, AFTER_SEEDS = 160.0, 95.0


@dataclass(frozen=True)
class Variant:
    """One engine: which tree, with which flags and variables.

    Attributes:
        like: name of the variant whose texts it must bring.
        bitwise: both sides' top-k is one that does not depend on threads: all texts must be the same, and every
            log-probability to the last bit.
        steps: whether its decode steps are timed.
    """

    name: str
    tree: str
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    like: str = ""
    bitwise: bool = False
    steps: bool = False
    model: str = MODEL


FIRST = Variant("stock speculative", "stock", SPECULATION, steps=True)
VARIANTS = (
    Variant("stock plain", "stock", steps=True),
    Variant("patched plain", "patched", like="stock plain"),
    Variant("patched speculative", "patched", SPECULATION, like="stock speculative"),
    Variant("exact plain", "patched", env=EXACT, steps=True),
    Variant("exact speculative", "patched", SPECULATION, EXACT, steps=True),
    Variant("reference plain", "patched", EAGER, REFERENCE, "exact plain"),
    Variant("reference speculative", "patched", (*SPECULATION, *EAGER), REFERENCE, "exact speculative"),
    Variant(
        "gates speculative",
        "patched",
        SPECULATION,
        {**EXACT, "SGLANG_RESEARCH_DCP_RETRACT": "1"},
        "exact speculative",
    ),
    Variant("stock watched", "patched", EAGER, {"PATCHBUNDLE_RIG_TOPK": "watch"}),
    # Every gate unset, and a selection that is no noise: to the last bit.
    Variant("stock plain by torch", "stock", BY_TORCH, UNFUSED),
    Variant("patched plain by torch", "patched", BY_TORCH, UNFUSED, "stock plain by torch", bitwise=True),
)
WIDES = (Variant("stock wide", "stock", WIDE), Variant("exact wide", "patched", WIDE, EXACT))


def _seed(
    name: str, env: Mapping[str, str], like: str = "", more: Sequence[str] = (), bitwise: bool = False, tree: str = ""
) -> Variant:
    return Variant(name, tree or "patched", (*SPECULATION, *more), env, like, bitwise, model=ITERATION)


SEEDS = (
    _seed("seed stock", UNFUSED, more=BY_TORCH, tree="stock"),
    _seed("seed gate off", UNFUSED, "seed stock", BY_TORCH, bitwise=True),
    _seed("seed gate on", {**UNFUSED, **SEED}, more=BY_TORCH),
    _seed("seed gate on eager", {**UNFUSED, **SEED}, "seed gate on", (*BY_TORCH, *EAGER)),
    _seed("seed stock poisoned", {**UNFUSED, "PATCHBUNDLE_RIG_SEEDS": "poison"}, more=BY_TORCH, tree="stock"),
    _seed(
        "seed gate on poisoned",
        {**UNFUSED, **SEED, "PATCHBUNDLE_RIG_SEEDS": "alone,poison"},
        "seed gate on",
        BY_TORCH,
        bitwise=True,
    ),
    _seed("seed exact gate off", EXACT),
    _seed("seed exact gate on", {**EXACT, **SEED}),
)
ORDERED = ("stock plain", "exact plain", "exact speculative", "reference plain", "reference speculative")
# Asked once and never again.
DONE = (
    "patched plain",
    "patched speculative",
    "gates speculative",
    "stock watched",
    "stock plain by torch",
    "patched plain by torch",
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
    hooks = {"PATCHBUNDLE_RIG_TOPK": LOADED[0], "PATCHBUNDLE_RIG_SEEDS": LOADED[1]}
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
        "PATCHBUNDLE_RIG_HOOKS": ",".join(module for name, module in hooks.items() if name in variant.env),
        **variant.env,
    }
    argv = [sys.executable, "-m", "sglang.launch_server", f"--model-path={model}", "--load-format=auto"]
    argv += ["--sampling-backend=pytorch", "--grammar-backend=none", f"--host={ports.HOST}", f"--port={port}"]
    argv += ["--skip-server-warmup", "--max-running-requests=8", "--random-seed=0", "--sleep-on-idle"]
    # A share of what is free when it starts, but few tokens: many engines find room beside each other.
    argv += ["--mem-fraction-static=0.8", "--max-total-tokens=262144", "--context-length=131072"]
    argv += ["--chunked-prefill-size=4096", *GRAPHS]
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


# What the engine logs between so many decode steps.
LINE = re.compile(r"Decode batch.*#running-req: (\d+),.* graph: (True|False), gen throughput \(token/s\): ([\d.]+)")


@dataclass
class Running:
    """A variant whose engine runs, and what it brought.

    Attributes:
        ordered: answers to batches in several orders, by whether their prompts were cached.
    """

    variant: Variant
    deployment: deployment.Deployment
    port: int
    found: dict[str, Any] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    ordered: dict[str, list[Answer]] = field(default_factory=dict)

    def boot(self) -> None:
        """Start it.

        Raises:
            RigError: kind ``crash``.
        """
        began = time.monotonic()
        self.deployment.up(420)
        self.found["ready_s"] = round(time.monotonic() - began, 1)

    def first(self) -> None:
        """Bring the first token.

        Raises:
            RigError: kind ``crash``.
        """
        began = time.monotonic()
        self.send(Request(client.prompts(7, 1, LENGTHS[0])[0], 1), 300.0)
        self.found["first_token_s"] = round(time.monotonic() - began, 1)

    def up(self) -> None:
        """Start it and bring the first token.

        Raises:
            RigError: kind ``crash``.
        """
        self.boot()
        self.first()

    def send(self, request: Request, timeout: float = PATIENCE) -> Answer:
        """Send a request whose answer must come.

        Raises:
            RigError: kind ``crash``; it did not.
        """
        answer = client.send(Route(self.port), request, timeout)
        if answer.error:
            raise RigError("crash", answer.error)
        return answer

    def ask(self, new: int) -> None:
        """Send the prompts twice, the cache emptied before each time."""
        requests = [Request(client.prompts(7, 1, length)[0], new, str(length)) for length in LENGTHS]
        client.flush(self.port, PATIENCE)
        self.answers = client.send_all(Route(self.port), requests, together=False, timeout=PATIENCE)
        client.flush(self.port, PATIENCE)
        again = client.send_all(Route(self.port), requests, together=False, timeout=PATIENCE)
        client.flush(self.port, PATIENCE)
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
        for event in deployment.parse_events(self.deployment.log("E")):
            if event.name in ("selections", "seeds"):
                self.found[event.name] = {name: int(value) for name, value in event.values.items()}

    def repeat(self, length: int, times: int, new: int) -> None:
        """Send one prompt so many times, all of it but the last page cached, and count the texts that differ."""
        request = Request(client.prompts(7, 1, length)[0], new, str(length))
        texts = {answer.ids for answer in [self.send(request) for _ in range(times + 1)][1:]}
        self.found.setdefault("repeated", {})[str(length)] = {"times": times, "different_texts": len(texts)}

    def orders(self, new: int) -> None:
        """Send four prompts as one batch, in another order each time, and count each prompt's different texts.

        First with all pages but each prompt's last one cached, so that nothing but the order differs; then with nothing
        cached, so that the order decides which prompts share a chunk of prefill.
        """
        requests = [Request(client.prompts(7, 1, length)[0], new, str(length)) for length in LENGTHS[:4]]
        for name, orders in (("cached", ORDERS), ("cold", ORDERS[:COLD])):
            client.flush(self.port, PATIENCE)
            if name == "cached":
                for request in requests:
                    self.send(request)
            texts: dict[str, set[tuple[int, ...]]] = {request.tag: set() for request in requests}
            answers: list[Answer] = []
            for order in orders:
                if name == "cold":
                    client.flush(self.port, PATIENCE)
                answers += client.send_batch(self.port, [requests[place] for place in order], PATIENCE)
            for answer in answers:
                texts[answer.tag].add(answer.ids)
            self.ordered[name] = answers
            self.found.setdefault("batch_orders", {})[name] = {
                "times": len(orders),
                "different_texts": {length: len(found) for length, found in texts.items()},
            }
        client.flush(self.port, PATIENCE)

    def step_ms(self, length: int, steps: int = 128, times: int = 5) -> float:
        """Milliseconds of a decode step (with speculation: of a token) behind ``length`` tokens, the median run's."""
        prompt = client.prompts(7, 1, length)[0]

        def seconds(new: int) -> float:
            return sorted(self.send(Request(prompt, new)).seconds for _ in range(times))[times // 2]

        seconds(1)
        return round((seconds(1 + steps) - seconds(1)) / steps * 1000, 3)

    def time_steps(self) -> None:
        """Time the decode steps behind a middling and a long prompt."""
        self.found["step_ms"] = {str(length): self.step_ms(length) for length in (5_000, 60_000)}

    def wide(self, context: int, batch: int, folder: Path) -> None:
        """Time and then profile decode steps of ``batch`` requests that share one prompt of ``context`` tokens."""
        prompt = client.prompts(11, 1, context + 1)[0]
        client.flush(self.port, PATIENCE)
        self.send(Request(prompt, 1))
        before = len(self.deployment.log("E"))
        failed: list[str] = []

        def send() -> None:
            try:
                client.send_batch(self.port, [Request(prompt, DECODED)] * batch, PATIENCE, logprobs=False)
            except (OSError, ValueError, KeyError) as error:
                failed.append(str(error))

        asking = threading.Thread(target=send, daemon=True)
        asking.start()
        lines = decode_lines(self.deployment.log("E")[before:], batch)
        while asking.is_alive() and len(lines) < TIMES:
            time.sleep(0.01)  # the engine tells of its steps in its log alone
            lines = decode_lines(self.deployment.log("E")[before:], batch)
        name = f"{batch} x {context}"
        point: dict[str, Any] = {"name": name, "context": context, "batch": batch, "intervals": len(lines)}
        self.found.setdefault("wide", []).append(point)
        try:
            point |= self.profile(folder / f"{self.variant.tree}-{context}-{batch}") if asking.is_alive() else {}
        except (RigError, OSError, KeyError, ValueError, EOFError) as error:
            point["kernels_not_measured"] = str(error)[:500]
        asking.join(PATIENCE)
        if failed or asking.is_alive() or len(lines) < TIMES:
            point["not_measured"] = (failed or [f"{len(lines)} of {TIMES} lines of the log with {batch} requests"])[0]
            return
        times = sorted(one.step_ms for one in lines)
        point["step_ms"] = round((times[(len(times) - 1) // 2] + times[len(times) // 2]) / 2, 4)
        point["step_ms_range"] = [round(times[0], 4), round(times[-1], 4)]
        point["graphs"] = all(one.graph for one in lines)
        if "topk_us" in point:
            point["topk_share_of_kernels"] = round(point["topk_us"] / point["kernels_us"], 4)
            point["topk_share_of_step"] = round(point["topk_us"] / 1000 / point["step_ms"], 4)

    def profile(self, folder: Path) -> dict[str, Any]:
        """Microseconds a decode step that the GPU's kernels take, and those that choose the top-k, from here on."""
        folder.mkdir(parents=True)
        body = {"output_dir": str(folder), "num_steps": PROFILED, "activities": ["GPU"], "profile_by_stage": False}
        client.post_text(self.port, "/start_profile", {**body, "with_stack": False, "record_shapes": False}, 60.0)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            for path in folder.rglob("*.json.gz"):
                # The engine writes the file while it decodes on; nothing tells when it is whole.
                trace: Any = None
                with contextlib.suppress(EOFError, ValueError, OSError):
                    trace = json.loads(gzip.decompress(path.read_bytes()))
                if trace is not None:
                    return kernel_shares(trace, PROFILED)
            time.sleep(0.1)
        raise RigError("profile", f"no trace in {folder}")


@dataclass(frozen=True)
class Interval:
    """What the engine logged of some decode steps."""

    step_ms: float
    graph: bool


def decode_lines(log: str, batch: int) -> list[Interval]:
    """The log's intervals whose steps all had ``batch`` requests: the first of them may have begun before."""
    found = [
        Interval(batch / float(speed) * 1000, graph == "True")
        for running, graph, speed in LINE.findall(log)
        if int(running) == batch and float(speed) > 0
    ]
    return found[1:]


# Words in the names of kernels that choose the top-k: the stock ones, and those of exact_topk.cu.
CHOOSE = re.compile(r"topk|resident_rows|filter_rows|finish_rows|stream_rows", re.IGNORECASE)


def whole_steps(kernels: Sequence[Mapping[str, Any]], steps: int) -> tuple[list[Mapping[str, Any]], int]:
    """The kernels of whole steps out of a trace of about ``steps`` of them, and how many steps these are.

    A trace begins and ends inside a step. A kernel that runs once a step tells where one begins.

    Raises:
        ValueError: no kernel runs about so many times.
    """
    counts = Counter(event["name"] for event in kernels)
    near = {name: count for name, count in counts.items() if abs(count - steps) <= 2}
    if not near:
        raise ValueError(f"no kernel runs once a step: {counts.most_common(5)}")
    (usual, _), *_ = Counter(near.values()).most_common(1)
    marker = min(name for name, count in near.items() if count == usual)
    begins = sorted(event["ts"] for event in kernels if event["name"] == marker)
    return [event for event in kernels if begins[0] <= event["ts"] < begins[-1]], len(begins) - 1


def kernel_shares(trace: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Sum a profiler's trace: microseconds a step of all kernels, of those that choose the top-k, and their names.

    Raises:
        ValueError: as ``whole_steps``.
    """
    kernels, whole = whole_steps([event for event in trace["traceEvents"] if event.get("cat") == "kernel"], steps)
    chosen = [one for one in kernels if CHOOSE.search(one["name"]) and "moe" not in one["name"].lower()]
    return {
        "profiled_steps": whole,
        "kernels_us": round(sum(event["dur"] for event in kernels) / whole, 1),
        "topk_us": round(sum(event["dur"] for event in chosen) / whole, 1),
        "topk_kernels": sorted({event["name"][:120] for event in chosen}),
    }


def begin(variant: Variant, trees: Mapping[str, Path], model: Path, port: int, home: Path) -> Running:
    """A variant's deployment, not yet started."""
    name = variant.name.replace(" ", "-")
    one = deployment.Deployment(deployment.new_folder(f"gpu-{name}"), [spec(variant, trees, model, port, home)])
    return Running(variant, one, port)


def launch(work: Sequence[Running], what: Callable[[Running], None], part: str = "") -> list[threading.Event]:
    """Begin ``what`` for every engine at once; each event is set when one has ended.

    An engine that fails keeps its error. Without the name of a ``part`` it is left out from then on; with it only that
    part is lost. The threads live on as long as this process: a keeper ends with the thread that started it, not with
    its process.
    """

    def one(running: Running, ended: threading.Event) -> None:
        try:
            what(running)
        # Whatever it is: the thread must live on, and the other parts with it.
        except Exception as error:
            tail = error.tail[-5:] if isinstance(error, RigError) else ()
            words = "; ".join([f"{type(error).__name__}: {error}", *tail])[:1500]
            if part:
                running.found.setdefault("parts_failed", {})[part] = words
            else:
                running.found["failed"] = words
        finally:
            ended.set()
        threading.Event().wait()

    waiting = []
    for running in work:
        if "failed" not in running.found:
            waiting.append(threading.Event())
            threading.Thread(target=one, args=(running, waiting[-1]), daemon=True).start()
    return waiting


def side_by_side(work: Sequence[Running], what: Callable[[Running], None], part: str = "") -> None:
    """Do ``what`` for every engine at once, as ``launch``, and wait for all of them."""
    for ended in launch(work, what, part):
        ended.wait()


def end(work: Sequence[Running]) -> None:
    """End engines, all at once."""
    started = [running.deployment for running in work if running.deployment.keeper is not None]
    threads = [threading.Thread(target=one.down) for one in started]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# Speculation verifies several rows at once, and bf16 sums of another batch shape differ in their last bits, so a near
# tie may go the other way: told, not demanded. The stock top-k's texts of long prompts are told too: they differ from
# themselves.
TOLD = (
    ("stock plain", "stock speculative"),
    ("exact plain", "exact speculative"),
    ("seed gate off", "seed gate on"),
    ("seed stock", "seed stock poisoned"),
    ("seed exact gate off", "seed exact gate on"),
)
# Prompts that the stock top-k takes whole or nearly so.
SHORT = 3


def entry(left: str, right: str, difference: Difference) -> dict[str, Any]:
    """What is told of a pair that was compared."""
    return {
        "left": left,
        "right": right,
        "requests": difference.requests,
        "same_texts": difference.same_texts,
        "first_difference": difference.first_token,
        "logprob": difference.logprob,
    }


def noisy(left: Variant, right: Variant) -> bool:
    """Whether the texts of two variants may differ by the stock top-k alone."""
    return left.tree == "stock" and not right.bitwise


def compared(work: Sequence[Running]) -> list[dict[str, Any]]:
    """One entry for each pair of variants that both answered; ``demanded`` tells how many texts must be the same."""
    answered = {running.variant.name: running for running in work if running.answers}
    pairs = [(running.variant.like, name, True) for name, running in answered.items() if running.variant.like]
    found = []
    for left, right, demanded in [*pairs, *((*pair, False) for pair in TOLD)]:
        if left in answered and right in answered:
            one, other = answered[left], answered[right]
            pair = entry(left, right, client.compare(one.answers, other.answers))
            least = SHORT if noisy(one.variant, other.variant) else pair["requests"]
            pair["demanded"] = least if demanded else 0
            pair["bitwise_demanded"] = demanded and other.variant.bitwise
            found.append(pair)
    return found


def compared_orders(work: Sequence[Running]) -> list[dict[str, Any]]:
    """The exact top-k against the reference, batch by batch in the same orders."""
    by_name = {running.variant.name: running for running in work}
    found = []
    for kind in ("plain", "speculative"):
        left, right = by_name.get(f"exact {kind}"), by_name.get(f"reference {kind}")
        for name in ("cached", "cold"):
            if left and right and name in left.ordered and name in right.ordered:
                difference = client.compare(left.ordered[name], right.ordered[name])
                found.append({"prompts": name, **entry(left.variant.name, right.variant.name, difference)})
    return found


def verdicts(work: Sequence[Running], report: Mapping[str, Any]) -> dict[str, bool | None]:
    """What must hold; None where it was not measured."""
    runs: Mapping[str, Mapping[str, Any]] = {running.variant.name: running.found for running in work}

    def accept(name: str) -> list[float] | None:
        run = runs.get(name, {})
        return None if any(run.get("errors", [1])) else list(run["accept"])

    def moved(left: str, right: str, must: bool) -> bool | None:
        one, other = accept(left), accept(right)
        return None if one is None or other is None else (one != other) is must

    def pair(right: str) -> bool | None:
        for entry in report["compared"]:
            if entry["right"] == right and entry["demanded"]:
                same: bool = entry["same_texts"] >= entry["demanded"]
                return same and (entry["logprob"] == 0 or not entry["bitwise_demanded"])
        return None

    def orders(kind: str) -> bool | None:
        entries = [entry for entry in report["orders"] if entry["right"] == f"reference {kind}"]
        return all(entry["same_texts"] == entry["requests"] for entry in entries) if len(entries) == 2 else None

    def repeated(name: str) -> bool | None:
        counted = runs.get(name, {}).get("repeated", {})
        return all(one["different_texts"] == 1 for one in counted.values()) if len(counted) == 2 else None

    def poisoned(name: str, must: bool) -> bool | None:
        seeds = runs.get(name, {}).get("seeds")
        return None if seeds is None else seeds["loops"] > 0 and (seeds["poisoned"] > 0) is must

    variants = {running.variant.name: running.variant for running in work}

    def words(variant: Variant) -> str:
        like = variants.get(variant.like)
        least = f": at least {SHORT} of {len(LENGTHS)} texts" if like and noisy(like, variant) else ""
        return f"{variant.name} as {variant.like}{least}"

    points = [point for variant in WIDES for point in runs.get(variant.name, {}).get("wide", [])]
    return {
        **{words(running.variant): pair(running.variant.name) for running in work if running.variant.like},
        **{f"exact {kind}: every order as the reference": orders(kind) for kind in ("plain", "speculative")},
        **{f"exact {kind}: one text in 20 runs": repeated(f"exact {kind}") for kind in ("plain", "speculative")},
        "seeds: stock takes them, and poison moves its acceptance": _both(
            poisoned("seed stock poisoned", True), moved("seed stock", "seed stock poisoned", True)
        ),
        "seeds: with the gate on there are none to poison, and acceptance stays": _both(
            poisoned("seed gate on poisoned", False), moved("seed gate on", "seed gate on poisoned", False)
        ),
        "every decode step was timed and profiled": None
        if not points
        else len(points) == 2 * len(CONTEXTS) * len(BATCHES)
        and all("step_ms" in point and "topk_us" in point for point in points),
    }


def _both(one: bool | None, other: bool | None) -> bool | None:
    return None if one is None or other is None else one and other


def write(report: dict[str, Any], work: Sequence[Running], out: Path) -> None:
    """Write what is known so far: a run that is cut off leaves that."""
    # Copies: engines that are starting write into theirs meanwhile.
    report["runs"] = {running.variant.name: dict(running.found) for running in work}
    report["compared"] = compared(work)
    report["orders"] = compared_orders(work)
    report["verdicts"] = verdicts(work, report)
    report["green"] = (
        all(running.answers or running.variant in WIDES for running in work)
        and not any("failed" in running.found or "parts_failed" in running.found for running in work)
        and len(work) == 1 + len(VARIANTS) + len(WIDES) + len(SEEDS)
        and all(report["verdicts"].values())
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")


class Run:
    """The whole run: its engines, its report, and the time that it has.

    Attributes:
        limit: seconds after which no further part is begun.
    """

    def __init__(self, pack: Path, out: Path, new: int, limit: float, save: Path | None) -> None:
        self.pack, self.out, self.new, self.limit, self.save = pack, out, new, limit, save
        self.began = time.monotonic()
        self.home = cache.root() / "gpu"
        self.report: dict[str, Any] = {"kind": "measured", "prompts": list(LENGTHS)}
        self.work: list[Running] = []

    def note(self, text: str) -> bool:
        """Write what is known, and tell whether there is time for more."""
        self.report["seconds"] = round(time.monotonic() - self.began, 1)
        print(f"[{self.report['seconds']:6.1f} s] {text}", flush=True)
        write(self.report, self.work, self.out)
        return bool(self.report["seconds"] < self.limit)

    def named(self, *names: str) -> list[Running]:
        """Engines by their names."""
        return [running for running in self.work if running.variant.name in names]

    def part(self, name: str, work: Sequence[Running], what: Callable[[Running], None], at_once: int = 99) -> None:
        """Do one part with some engines at a time, unless the time is over."""
        for first in range(0, len(work), at_once):
            some = [running for running in work[first : first + at_once] if "failed" not in running.found]
            if time.monotonic() - self.began < self.limit:
                side_by_side(some, what, name)
            else:
                for running in some:
                    running.found.setdefault("parts_failed", {})[name] = f"the {self.limit:.0f} s were over"
        self.note(name)

    def wait(self, starting: Sequence[threading.Event], kept: float) -> None:
        """Wait for engines, but leave ``kept`` seconds for the rest."""
        for ended in starting:
            ended.wait(max(0.0, self.began + self.limit - kept - time.monotonic()))

    def begin(self, variants: Sequence[Variant], trees: Mapping[str, Path], own: Path) -> list[Running]:
        """Make the deployments of ``variants``."""
        # All ports at once: an engine binds its own long after it was chosen.
        chosen = zip(variants, ports.free(len(variants)), strict=True)
        made = [begin(one, trees, models.ensure(one.model, cache.ensure), port, own) for one, port in chosen]
        self.work += made
        return made

    def go(self) -> None:
        """Start everything, ask everything.

        Raises:
            RigError: nothing can be started.
        """
        self.home.mkdir(parents=True, exist_ok=True)
        own = self.home / "home-first"
        trees = unpack(self.pack, self.home)
        shutil.rmtree(own, ignore_errors=True)
        shutil.rmtree(self.home / "traces", ignore_errors=True)
        own.mkdir()
        carried, patched = self.pack / KERNELS, self.pack / PATCHED
        self.report["carried_kernels"] = carried.is_file()
        if carried.is_file():
            with tarfile.open(carried, "r:xz") as source:
                source.extractall(own, filter="data")
        if patched.is_file():
            self.report["patched_sha256"] = content(patched)
        before = set(compiled(own))
        self.note("unpacked")
        first = self.begin([FIRST], trees, own)
        starting = launch(first, Running.boot)
        for name in ("torch", *LOADED):
            importlib.import_module(name)
        self.report |= provenance.of(__file__, models.get(MODEL).seed)
        self.wait(starting, AFTER_OTHERS)
        self.note(f"first engine ready: {first[0].found}")
        # What is compiled from now on it has compiled before the others, which are starting, come to it.
        others = self.begin((*VARIANTS, *WIDES), trees, own)
        starting = launch(others, Running.up)
        side_by_side(first, Running.first)
        self.part("asked", first, self.ask)
        self.report["compiled"] = [name for name in compiled(own) if name not in before]
        self.wait(starting, AFTER_OTHERS)
        self.note("all others are up")
        self.part("asked", [running for running in others if running.variant not in WIDES], self.ask, ASKED)
        end(self.named(*DONE))
        seeds = self.begin(SEEDS, trees, own)
        starting = launch(seeds, Running.up)
        self.part("orders", self.named(*ORDERED), lambda one: one.orders(self.new))
        repeated = self.named(*ORDERED[:3])
        self.part("repeated 5,000", repeated, lambda one: one.repeat(5_000, 20, self.new))
        self.part("repeated 60,000", repeated, lambda one: one.repeat(60_000, 20, self.new))
        end(self.named("reference plain", "reference speculative"))
        self.wait(starting, AFTER_SEEDS)
        self.note("the seeds' engines are up")
        self.part("asked", seeds, self.ask, ASKED)
        end(seeds)
        self.note("the seeds' engines ended")
        # One after another, and nothing else runs: these are times.
        for context, batch in itertools.product(CONTEXTS, BATCHES):

            def wide(running: Running, context: int = context, batch: int = batch) -> None:
                running.wide(context, batch, self.home / "traces")

            for running in self.named(*(variant.name for variant in WIDES)):
                self.part(f"{running.variant.name}: {batch} x {context}", [running], wide)
        for running in self.work:
            if running.variant.steps:
                self.part(f"{running.variant.name}: steps", [running], Running.time_steps)
        if self.save:
            pack_kernels(own, self.save / KERNELS)
            self.report["kernels_mb"] = round((self.save / KERNELS).stat().st_size / 1e6, 1)

    def ask(self, running: Running) -> None:
        """Ask one engine."""
        running.ask(self.new)


def main() -> int:
    """Entry point of ``make gpu-engine``: 0 when every engine ran and everything that must hold does."""
    parser = argparse.ArgumentParser(description="the real engine on one GPU, stock against patched")
    parser.add_argument("pack", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--limit", type=float, default=490.0, help="seconds after which no further part is begun")
    parser.add_argument("--save-kernels", type=Path, help=f"write {KERNELS} into this folder")
    arguments = parser.parse_args()
    run = Run(arguments.pack, arguments.out, arguments.new, arguments.limit, arguments.save_kernels)
    run.report["wide"] = {
        "prompts": "all requests of a batch share one prompt, cached but for its last token",
        "step_ms": f"median of the engine's own throughput over intervals of {INTERVAL} steps",
        "kernels": f"whole steps of a trace of {PROFILED}, behind the timed ones",
    }
    run.report["seeds"] = "the gate's condition --disaggregation-mode decode is left out; no other one is"
    try:
        run.go()
    except RigError as error:
        print(*error.tail, f"{error.kind}: {error}", sep="\n", file=sys.stderr)
        run.report["error"] = error.as_json()
    finally:
        run.note("asked everything")
        end(run.work)
    run.note("ended")
    for words, holds in run.report["verdicts"].items():
        print({True: "holds", False: "DOES NOT HOLD", None: "not measured"}[holds], words, sep=": ")
    for running in run.work:
        print(running.variant.name, {key: value for key, value in running.found.items() if key != "ids"})
    return 0 if run.report["green"] else 1


if __name__ == "__main__":
    sys.exit(main())
