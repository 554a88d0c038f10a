"""GLM-DSA under decode context parallelism on two GPUs: ``dsa-dcp`` against tensor parallelism without it.

``python3 -m lab.rig.gpu.two PACK --out evidence/engine/NAME.json`` on a machine with two GPUs, where ``PACK`` is the
folder that ``lab.rig.gpu.pack`` wrote; ``python3 -m lab.rig.gpu.two --cpu --out FILE`` runs the same script here, with
gloo for NCCL, the rig's stand-ins for kernels, and fewer and shorter prompts.

All engines stand beside each other. The collectives that DCP adds are timed before they start and after they ended;
while they start, the attention kernels are checked by themselves (``lab.rig.gpu.dsa_parts``). NVLink multicast stays
off, so every engine runs without the custom and the fused all-reduces, which use it.

Two of the engines are the decode half of a pair with every recovery patch on: one is left alone, the other is forced to
retract. No transfer library is needed, since no prefill stands beside them: ``lab.rig.gpu.filled``.

Acceptance is compared once for each draft chain, over all prompts, those of the batches and as many again that share
nothing. Greedy texts of seeded weights part at ties, and what follows is another text with an acceptance of its own: so
the interval is of the mean over texts, wide enough for that, and one that is too wide to show anything counts as not
measured. Prompts that share their beginning are one observation, not many. Beside it, not judged: the same over the
prompts whose texts are the same on both sides, where the drafts alone can differ.

Log-probabilities are compared three ways. The largest difference is one value out of thousands. The mean over prompts
that share nothing is moved by the few of them in which a near tie inside the model goes the other way. Their median is
not: it sees what moves every prompt.

A part that fails keeps its error in the result and takes no other part with it; what is known is written after each
part, and what the limit of time left out is named.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import math
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lab import provenance
from lab.load.accounting import paired
from lab.rig import cache, client, deployment, environment, models, ports, trees
from lab.rig.client import Answer, Request, Route
from lab.rig.engine import HOOKS, LISTENS, READY, Engine, clean_environment, engine_spec
from lab.rig.errors import RigError
from lab.rig.gpu.engine import GHOSTS, SITE, entry, unpack
from lab.rig.gpu.pack import KERNELS, PATCHED, content
from lab.rig.member import Spec
from lab.rig.tree import REPOSITORY, find

# By whether it is for a decode half.
GPU_MODELS = {False: "glm-dsa-gpu", True: "glm-dsa-gpu-iteration"}
CPU_MODELS = {False: "glm-dsa-select", True: "glm-dsa-iteration"}
# Of both, each with a selection of its own; the draft adds another.
LAYERS = 2
DSA_DCP = {"SGLANG_RESEARCH_DSA_DCP": "1"}
CHECK = {"SGLANG_RESEARCH_DSA_DCP_CHECK": "1"}
RECOVER = {
    "SGLANG_RESEARCH_DCP_RETRACT": "1",
    "SGLANG_RESEARCH_SETTLE_BEFORE_RETRACT": "1",
    "SGLANG_RESEARCH_RETRACT_DRAFT_KV": "1",
    "SGLANG_RESEARCH_DRAFT_SEED_RECOMPUTE": "1",
}
# At these steps of the one batch that it gets; each takes the engine's own share of the batch.
RETRACT = {"PATCHBUNDLE_RIG_RETRACT": "3,6,9,12,15"}
FILLED = "lab.rig.gpu.filled"
HALF_HOOKS = (*HOOKS[:2], FILLED)
SELECTIONS = "lab.rig.gpu.selections"
# What other processes load: it decides a result as the modules of this process do, so it is loaded here and named.
LOADED = (*HALF_HOOKS, SELECTIONS, "lab.rig.gpu.collectives", "lab.rig.gpu.dsa_parts")
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
# Of the latent rows a rank holds half, of the index keys all: 788 bytes a token and layer against 460.
PREDICTED = 1.713
# Tokens of the two pools that are compared; the logged size has two decimals.
LARGE, SMALL = 2_097_152, 262_144
# Log-probabilities near 5 in float32 have steps of 5e-7, and their sums over ranks round some ten times.
ROUNDING = 1e-5
# Of bf16 sums in batches of another shape: log-probabilities of equal texts are that far apart. In float32 nothing is.
TIE = 0.1
# Tokens a step: an interval of acceptance that is wider to either side shows nothing.
NARROW = 0.1
# The same for the mean difference of log-probabilities: half of TIE.
FAR = 0.05
# By how much of TP1's median the median of DCP2's distance may be above it. DCP2 rounds each part of an attention to
# bf16 and their sum again, where TP2 rounds once: a source of noise of its own. One three quarters as large as TP1's
# would make a quarter (noise adds in squares).
ABOVE = 0.25
# Seconds of the limit that engines which do not come up leave to the others.
KEPT = 150.0
DIFFERS = "SelectionDiffers"
FORWARD = re.compile(r"(Decode|Prefill) batch.* graph: (True|False),")
# Seconds after an answer in which the other rank has told its count too.
SOON = 20.0

GRAPHS = "graph replay equal to eager"
ACCEPTANCE = {kind: f"acceptance {kind} equal within its interval" for kind in ("3/1/4", "5/1/6")}


def eagle(steps: int, drafts: int) -> tuple[str, ...]:
    """Flags of a draft chain."""
    return (
        "--speculative-algorithm=EAGLE",
        f"--speculative-num-steps={steps}",
        "--speculative-eagle-topk=1",
        f"--speculative-num-draft-tokens={drafts}",
    )


@dataclass(frozen=True)
class Variant:
    """One engine.

    Attributes:
        like: the variant that it is compared with.
        cpu: whether the form for a CPU has it.
        apart: whether it also gets the prompts that share nothing.
        timed: of engines with the same word the steps are timed, in turns; none if empty.
        half: whether it is the decode half of a pair, its pools filled in place of a prefill.
    """

    name: str
    ranks: int = 2
    dcp: bool = False
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    like: str = ""
    cpu: bool = False
    apart: bool = False
    timed: str = ""
    half: bool = False


VARIANTS = (
    Variant("tp2", cpu=True, apart=True, timed="plain"),
    Variant("tp1", ranks=1, like="tp2", cpu=True, apart=True),
    Variant("dcp2", dcp=True, like="tp2", cpu=True, apart=True, timed="plain"),
    Variant("dcp2 eager", dcp=True, flags=("--disable-cuda-graph",), like="dcp2"),
    Variant("dcp2 checked", dcp=True, env=CHECK, like="dcp2"),
    Variant("tp2 eagle 3/1/4", flags=eagle(3, 4), like="tp2", cpu=True, apart=True),
    Variant("dcp2 eagle 3/1/4", dcp=True, flags=eagle(3, 4), env=CHECK, like="tp2 eagle 3/1/4", cpu=True, apart=True),
    Variant("tp2 eagle 5/1/6", flags=eagle(5, 6), like="tp2", apart=True, timed="5/1/6"),
    Variant("dcp2 eagle 5/1/6", dcp=True, flags=eagle(5, 6), like="tp2 eagle 5/1/6", apart=True, timed="5/1/6"),
    Variant("dcp2 half", dcp=True, flags=eagle(5, 6), env=RECOVER, cpu=True, half=True),
    Variant(
        "dcp2 half retracted",
        dcp=True,
        flags=eagle(5, 6),
        env={**RECOVER, **RETRACT},
        like="dcp2 half",
        cpu=True,
        half=True,
    ),
)
CHECKED = tuple(one.name for one in VARIANTS if CHECK.items() <= one.env.items())


def added_hooks(variant: Variant) -> tuple[str, ...]:
    """What an engine loads for the sake of what is asked of it here."""
    return (FILLED,) if variant.half else (SELECTIONS,) if variant.name in CHECKED else ()


HALF = ("--disaggregation-mode=decode", "--disaggregation-transfer-backend=fake")


@dataclass(frozen=True)
class Size:
    """How much is asked.

    Attributes:
        lengths: tokens of the first prompt of a batch; each next one is a token longer.
        batches: requests at once, for each of the lengths; but for their ends they share one prompt.
        apart: prompts that share nothing, ``apart_length`` tokens each, as many at once as the largest batch.
        step_batches: requests whose steps are timed, behind ``step_length`` tokens each, ``rounds`` times.
        repeats: requests to the engine whose selections are compared across its ranks.
        halves: requests to each decode half, in one batch, behind ``half_length`` tokens and more.
        patience: seconds that an answer may take.
        unmeasured: verdicts that this size does not measure; every other one must be.
    """

    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    new: int
    apart: int
    apart_length: int
    apart_new: int
    step_batches: tuple[int, ...]
    step_length: int
    steps: int
    rounds: int
    repeats: int
    halves: int
    half_length: int
    half_new: int
    patience: float
    unmeasured: tuple[str, ...] = ()


GPU = Size((40, 5_000, 60_000), (1, 8, 32), 32, 256, 1_000, 64, (1, 8, 32), 2_500, 96, 5, 200, 8, 3_000, 96, 60.0)
# A CPU has no graphs to replay, and time for one draft chain.
CPU = Size((40, 140), (1, 2), 12, 4, 60, 12, (1,), 100, 4, 1, 4, 3, 150, 24, 400.0, (GRAPHS, ACCEPTANCE["5/1/6"]))
# Tokens at the end of a prompt that no other one of its batch has.
OWN = 24


class OnGpu:
    """Where the engines run: two GPUs, the archive's library and trees."""

    size = GPU
    backend, device = "nccl", "cuda"

    def __init__(self, pack: Path) -> None:
        home = cache.root() / "gpu"
        home.mkdir(parents=True, exist_ok=True)
        self.home = home
        self.trees = unpack(pack, home)
        # A half's draft shares its selection in a loop: that is what one of the recovery patches is for.
        self.models = {half: models.ensure(name, cache.ensure) for half, name in GPU_MODELS.items()}
        self.own = home / "home-two"
        shutil.rmtree(self.own, ignore_errors=True)
        self.own.mkdir()
        carried = (pack / KERNELS).is_file()
        if carried:
            shutil.unpack_archive(pack / KERNELS, self.own, "xztar", filter="data")
        self.made_of: dict[str, Any] = {
            "patched_sha256": content(pack / PATCHED),
            "carried_kernels": carried,
        }

    def environment(self) -> dict[str, str]:
        """Variables under which the library of the archive runs."""
        path = (self.trees["patched"], SITE, self.trees["stock"], REPOSITORY)
        return {
            **clean_environment(),
            **NO_MULTICAST,
            "HOME": str(self.own),
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "PATCHBUNDLE_RIG_GHOSTS": ",".join(GHOSTS),
            "HF_HUB_OFFLINE": "1",
            "NO_PROXY": ports.HOST,
            "CUDA_HOME": os.environ.get("CUDA_HOME", "/usr/local/cuda"),
            "FLASHINFER_USE_CUDA_NORM": "1",  # no CuTe DSL in the archive
            "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",  # short prompts by the sparse path too
            "PYTHONUNBUFFERED": "1",
            # The engines take memory from each other while they start.
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
            # Deterministic, and the same on every rank: what differs then is not the selection's own noise.
            "SGLANG_RESEARCH_EXACT_TOPK": "1",
        }

    def spec(self, variant: Variant, port: int) -> Spec:
        """The engine of ``variant``. All share one home: what one has compiled, the others find."""
        env = {**self.environment(), **(DSA_DCP if variant.dcp else {}), **variant.env}
        hooks = HALF_HOOKS if variant.half else added_hooks(variant)
        if hooks:
            env["PATCHBUNDLE_RIG_HOOKS"] = ",".join(hooks)
            env["PATCHBUNDLE_RIG_TREE"] = str(self.trees["patched"])
        model = self.models[variant.half]
        argv = [sys.executable, "-m", "sglang.launch_server", f"--model-path={model}", "--load-format=auto"]
        argv += ["--sampling-backend=pytorch", "--grammar-backend=none", f"--host={ports.HOST}", f"--port={port}"]
        argv += ["--skip-server-warmup", "--max-running-requests=32", "--random-seed=0"]
        argv += ["--cuda-graph-bs-decode", *map(str, GPU.step_batches)]
        argv += ["--sleep-on-idle", "--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"]
        # A share of what is free when it starts, but few tokens: all find room beside each other.
        tokens = LARGE if variant.name in ("tp2", "dcp2") else SMALL
        argv += ["--mem-fraction-static=0.5", f"--max-total-tokens={tokens // (2 if variant.dcp else 1)}"]
        argv += ["--context-length=131072", "--kv-cache-dtype=fp8_e4m3", f"--tp-size={variant.ranks}"]
        argv += ["--dsa-prefill-backend=flashmla_kv", "--dsa-decode-backend=flashmla_kv"]
        argv += ["--dcp-size=2"] if variant.dcp else []
        argv += [*variant.flags, *(HALF if variant.half else ())]
        return Spec("E", tuple(argv), env, (READY, LISTENS), "alone", port, tree=str(self.trees["patched"]))

    def waves(self) -> tuple[tuple[Variant, ...], ...]:
        """The engines of this form, those together that stand beside each other."""
        return (VARIANTS,)

    def parts(self) -> Any:
        """Check the kernels by themselves, in a process of their own."""
        program = (
            "import json, pathlib, sys; import sgl_kernel.flash_mla as f; from lab.rig.gpu import dsa_parts; "
            "print('PARTS', json.dumps(dsa_parts.run(f, pathlib.Path(sys.argv[1]))))"
        )
        argv = [sys.executable, "-c", program, str(self.trees["patched"])]
        done = subprocess.run(argv, env=self.environment(), capture_output=True, text=True, timeout=240, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith("PARTS ")]
        if done.returncode != 0 or not lines:
            return {"failed": done.stderr[-1500:]}
        return json.loads(lines[0].removeprefix("PARTS "))


class OnCpu:
    """Where the engines run: the rig on this machine."""

    size = CPU
    backend, device = "gloo", "cpu"

    def __init__(self) -> None:
        self.python = environment.ensure("0.5.17", print)
        self.tree = find("decode", trees.patched("decode", print))
        trees.recognise(self.tree, False)
        self.models = {half: models.ensure(name, cache.ensure) for half, name in CPU_MODELS.items()}
        self.folder = deployment.new_folder("two-cpu")
        self.made_of: dict[str, Any] = {}

    def spec(self, variant: Variant, port: int) -> Spec:
        """The engine of ``variant``; for the exact top-k, which needs a GPU, the engine's own broadcast."""
        folder = self.folder / variant.name.replace(" ", "-").replace("/", "-")
        (folder / "tmp").mkdir(parents=True)
        env = {**(DSA_DCP if variant.dcp else {}), **variant.env, "SGLANG_DSA_TOPK_BROADCAST": "1"}
        flags = (*(("--dcp-size=2",) if variant.dcp else ()), *variant.flags, *(HALF if variant.half else ()))
        model, (bootstrap,) = self.models[variant.half], ports.free(1)
        mode = "decode" if variant.half else "alone"
        one = Engine("E", "decode", mode, self.tree, self.python, model, port, bootstrap, flags, env, tp=variant.ranks)
        return engine_spec(one, folder, (*HOOKS, *added_hooks(variant)))

    def waves(self) -> tuple[tuple[Variant, ...], ...]:
        """The engines of this form, those together that find room beside each other."""
        return tuple(tuple(one for one in VARIANTS if one.cpu and one.half is half) for half in (False, True))

    def parts(self) -> Any:
        """Check the stand-ins of the kernels the same way, with fewer slots."""
        os.environ["TRITON_INTERPRET"] = "1"
        attention = importlib.import_module("lab.rig.standins.attention")
        dsa_parts = importlib.import_module("lab.rig.gpu.dsa_parts")
        kernel = dsa_parts.Kernel(attention, True, 4, 64, 6, 64)
        correct = dsa_parts.file(self.tree.root / "sglang/kernels/ops/attention/dcp_kernels.py").correct_attn_out
        localise = dsa_parts.file(self.tree.root / "sglang/srt/research/kernels/dcp_localise.py").localise
        return [dsa_parts.case(kernel, ranks, 1024, correct, localise, "cpu") for ranks in (2, 4)]


@dataclass
class Running:
    """A variant whose engine runs, and what it brought.

    Attributes:
        answers: to the batches, or to a decode half's one batch.
        apart: answers to the prompts that share nothing.
        patience: seconds in which it must be there.
    """

    variant: Variant
    deployment: deployment.Deployment
    port: int
    found: dict[str, Any] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    apart: list[Answer] = field(default_factory=list)
    patience: float = 500.0
    is_up: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)

    def start(self, size: Size) -> None:
        """Begin to start it. The thread that does so lives until `down`: the kernel ends an engine with it."""

        def live() -> None:
            side_by_side([self], lambda one: one.up(size))
            self.is_up.set()
            self.may_end.wait()

        threading.Thread(target=live, daemon=True).start()

    def down(self) -> None:
        """End it."""
        if not self.may_end.is_set():
            self.deployment.down()
            self.may_end.set()

    def up(self, size: Size) -> None:
        """Start it and bring the first token.

        Raises:
            RigError: kind ``crash``.
        """
        began = time.monotonic()
        self.deployment.up(self.patience)
        self.found["ready_s"] = round(time.monotonic() - began, 1)
        left = max(size.patience, self.patience - self.found["ready_s"])
        first = client.send(Route(self.port), Request(client.prompts(7, 1, 40)[0], 2), timeout=left)
        self.found["first_token_s"] = round(time.monotonic() - began, 1)
        if first.error:
            raise RigError("crash", first.error)

    def send(self, requests: Sequence[Request], patience: float) -> list[Answer]:
        """Send requests as one body, so that no engine's batches depend on when a request came.

        Raises:
            RigError: kind ``crash``; they were not all answered.
        """
        try:
            return client.send_batch(self.port, requests, patience)
        except (OSError, ValueError, KeyError) as error:
            raise RigError("crash", str(error) or repr(error)) from error

    def ask(self, size: Size) -> None:
        """Send every batch of every length and the prompts that share nothing, or to a decode half its one batch.

        Raises:
            RigError: kind ``crash``; the first batch that is not answered is the last one, and no answer is kept.
        """
        if self.variant.half:
            return self._ask_half(size)
        client.flush(self.port, size.patience)
        answers, accepted = [], []
        for length in size.lengths:
            # Every prompt is sent once: pairs of one prompt would count its noise as often as it was sent.
            left = iter(client.prompts(7 + length, sum(size.batches), length, 1, max(length - OWN, 0)))
            for count in size.batches:
                batch = [Request(next(left), size.new, f"{length} x {count}:{number}") for number in range(count)]
                answers += self.send(batch, size.patience)
            # They share their beginning: one observation.
            own = [answer.accept_length for answer in answers[-sum(size.batches) :]]
            accepted.append(sum(own) / len(own))
        if self.variant.apart:
            alone = [
                Request(prompt, size.apart_new, f"apart:{number}")
                for number, prompt in enumerate(client.prompts(13, size.apart, size.apart_length))
            ]
            at_once = max(size.batches)
            for first in range(0, len(alone), at_once):
                self.apart += self.send(alone[first : first + at_once], size.patience)
        self.answers = answers
        self.found["errors"] = []
        self.found["verify_steps"] = sum(answer.verify_steps for answer in answers)
        seen = FORWARD.findall(self.deployment.log("E"))
        for name, kind in (("logged_steps", "Decode"), ("logged_prefills", "Prefill")):
            self.found[name] = {"graph": seen.count((kind, "True")), "eager": seen.count((kind, "False"))}
        if self.found["verify_steps"]:
            accepted += [answer.accept_length for answer in self.apart]
            self.found |= {
                "accept": round(sum(answer.accept_length for answer in answers) / len(answers), 3),
                "accept_each": [round(length, 4) for length in accepted],
            }

    def _ask_half(self, size: Size) -> None:
        prompts = client.prompts(11, size.halves, size.half_length, 37)
        # One body, so that they come in their order and take the same slots in every run: rows are drawn by slot.
        # Gathered: it starts none of them before all are there.
        batch = [
            Request(prompt, size.half_new, str(number), f"half.{number:02d}of{size.halves:02d}")
            for number, prompt in enumerate(prompts, 1)
        ]
        answers = send_named(self.port, batch, size.patience)
        seen = [(event.name, event.values) for event in deployment.parse_events(self.deployment.log("E"))]
        self.found |= {
            "errors": [],
            "retractions": sum(answer.retractions for answer in answers),
            "lost": sum(int(values["tokens"]) for name, values in seen if name == "lost"),
            "rows_behind": max(
                (abs(int(values["committed"]) - int(values["rows"])) for name, values in seen if name == "offload"),
                default=0,
            ),
            "verify_steps": sum(answer.verify_steps for answer in answers),
            # Rows that all are alike would bring one text whatever a retraction did to them.
            "different_texts": len({answer.ids for answer in answers}),
        }
        self.answers = answers

    def repeat(self, size: Size) -> None:
        """Send one prompt over and over, all but its end cached: its different texts, and what each rank compared.

        Raises:
            RigError: kind ``crash``.
        """
        length = size.lengths[1]
        request = Request(client.prompts(7 + length, 1, length, 1, max(length - OWN, 0))[0], 8)
        before = self.rows_compared(size)
        texts = []
        for _ in range(size.repeats):
            (answer,) = self.send([request], size.patience)
            texts.append(answer.ids)
        self.found |= {
            "repeated": {"times": len(texts), "different_texts": len(set(texts))},
            "selections_compared": {
                "before": before,
                "after": self.rows_compared(size),
                # In each layer a row for each token of a text: what it is chosen from.
                "at_least": LAYERS * sum(map(len, texts)),
            },
        }

    def rows_compared(self, size: Size) -> list[int]:
        """Have every rank tell how many rows it has compared so far.

        Raises:
            RigError: kind ``crash``; one did not, or it has seen rows that differed.
        """

        def lines() -> list[deployment.Event]:
            events = deployment.parse_events(self.deployment.log("E"))
            # One that is being written is no line yet.
            return [event for event in events if event.name == "compared" and "differed" in event.values]

        ranks, old, until = range(self.variant.ranks), len(lines()), time.monotonic() + SOON
        client.flush(self.port, size.patience)
        # All ranks do the same steps: each tells as often as the first one, which had told when the answer came.
        while True:
            told = [[line for line in lines()[old:] if line.number("rank") == rank] for rank in ranks]
            if told[0] and all(len(one) == len(told[0]) for one in told):
                break
            if time.monotonic() > until:
                raise RigError("crash", f"{[len(one) for one in told]} lines of the ranks tell what they compared")
            time.sleep(0.05)
        if differed := max(one[-1].number("differed") for one in told):
            raise RigError("crash", f"{DIFFERS}: {differed} rows")
        return [one[-1].number("rows") for one in told]

    def step(self, count: int, size: Size) -> float:
        """Milliseconds of a decode step (with speculation: of a token) of several requests at once, once.

        Raises:
            RigError: kind ``crash``.
        """
        prompts = client.prompts(9, count, size.step_length)

        def seconds(new: int) -> float:
            began = time.monotonic()
            self.send([Request(prompt, new) for prompt in prompts], size.patience)
            return time.monotonic() - began

        short = seconds(1)
        return (seconds(1 + size.steps) - short) / size.steps * 1000

    def keep_steps(self, count: int, times: Sequence[float]) -> None:
        """Keep the median of step times and how far they lie apart."""
        ordered = [round(one, 3) for one in sorted(times)]
        self.found.setdefault("step_ms", {})[str(count)] = ordered[len(ordered) // 2]
        self.found.setdefault("step_ms_range", {})[str(count)] = [ordered[0], ordered[-1]]

    def ask_and_empty(self, size: Size) -> None:
        """Ask everything, and have the engine give back what its longest prompts took: eleven share a GPU's memory."""
        self.ask(size)
        if not self.variant.half:
            client.flush(self.port)

    def capacity(self) -> None:
        """Read what the engine says of its pool: tokens of the group, and the bytes of one rank's target pool."""
        info = client.get(self.port, "/get_server_info", timeout=60.0)
        tokens = int(info.get("max_total_num_tokens") or 0) * (2 if self.variant.dcp else 1)
        sizes = [float(number) for number in re.findall(r"KV size: ([\d.]+) GB", self.deployment.log("E"))]
        self.found["pool"] = {"tokens": tokens, "gb_as_logged": sizes[0] if sizes else None}


def send_named(port: int, requests: Sequence[Request], timeout: float) -> list[Answer]:
    """As ``client.send_batch``, but under the requests' own names, and how often each was retracted is told.

    Raises:
        RigError: kind ``crash``; they were not all answered.
    """
    body = {
        "input_ids": [list(request.prompt) for request in requests],
        "sampling_params": [{"temperature": 0, "max_new_tokens": one.new, "ignore_eos": True} for one in requests],
        "return_logprob": True,
        "rid": [request.rid for request in requests],
    }
    try:
        found = client.post(port, "/generate", body, timeout)
        return [
            Answer(
                ids=tuple(answer["output_ids"]),
                logprobs=tuple(entry[0] for entry in answer["meta_info"]["output_token_logprobs"]),
                retractions=int(answer["meta_info"].get("num_retractions") or 0),
                verify_steps=int(answer["meta_info"].get("spec_verify_ct") or 0),
                tag=request.tag,
                rid=request.rid,
            )
            for request, answer in zip(requests, found, strict=True)
        ]
    except (OSError, ValueError, KeyError) as error:
        raise RigError("crash", str(error) or repr(error)) from error


def side_by_side(work: Sequence[Running], what: Callable[[Running], None]) -> None:
    """Do ``what`` for every engine at once; one that fails keeps its error and is left out from then on."""
    work = [running for running in work if "failed" not in running.found]

    def one(running: Running) -> None:
        try:
            what(running)
        # Whatever it is: the others go on.
        except Exception as error:
            log = ""
            with contextlib.suppress(OSError):
                log = running.deployment.log("E")
            running.found["failed"] = "\n".join([f"{type(error).__name__}: {error}"[:1000], log[-3000:]])
            if DIFFERS in f"{error}{log}":
                running.found["selections_differ"] = True

    if len(work) == 1:
        return one(work[0])
    threads = [threading.Thread(target=one, args=(running,)) for running in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def time_in_turns(work: Sequence[Running], count: int, size: Size) -> None:
    """Time the steps of engines that are compared, in turns, so that a drift of the machine falls on all of them."""
    times: dict[str, list[float]] = {running.variant.name: [] for running in work}
    for turn in range(1 + size.rounds):
        for running in work if turn % 2 else reversed(work):
            side_by_side([running], lambda one: times[one.variant.name].append(one.step(count, size)))
    for running in work:
        # The first brought the prompts into the cache.
        if "failed" not in running.found:
            running.keep_steps(count, times[running.variant.name][1:])


def collectives(backend: str, device: str, times: int) -> list[dict[str, Any]]:
    """Time what DCP adds to a layer, in two processes, for a model of 64 heads: microseconds, the median call.

    Raises:
        RigError: kind ``collectives``; a process ended with an error.
    """
    (port,) = ports.free(1)
    env = {**clean_environment(), **NO_MULTICAST, "MASTER_ADDR": ports.HOST, "MASTER_PORT": str(port)}
    argv = [sys.executable, "-m", "lab.rig.gpu.collectives", backend, device, str(times)]
    ranks = [
        subprocess.Popen([*argv, str(rank)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=180) for rank in ranks]
    except subprocess.TimeoutExpired as error:
        raise RigError("collectives", f"no end in {error.timeout:.0f} s") from error
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    if any(rank.returncode for rank in ranks):
        raise RigError("collectives", outputs[0][1][-1500:] or outputs[1][1][-1500:])
    found: list[dict[str, Any]] = json.loads(outputs[0][0].splitlines()[-1])
    return found


def parted(left: Sequence[Answer], right: Sequence[Answer]) -> list[tuple[float, float]]:
    """Log-probabilities of the two tokens at which each pair of texts parts."""
    found = []
    for one, other in zip(left, right, strict=True):
        for (token, logprob), (choice, beside) in zip(
            zip(one.ids, one.logprobs, strict=True), zip(other.ids, other.logprobs, strict=True), strict=False
        ):
            if token != choice:
                found.append((round(logprob, 4), round(beside, 4)))
                break
    return found


def cells(left: Sequence[Answer], right: Sequence[Answer]) -> list[dict[str, Any]]:
    """For each length and batch the largest and the mean difference of a log-probability before the texts part."""
    batches: dict[str, list[tuple[Answer, Answer]]] = {}
    for one, other in zip(left, right, strict=True):
        batches.setdefault(one.tag.partition(":")[0], []).append((one, other))
    found = []
    for name, pairs in batches.items():
        away = []
        for one, other in pairs:
            for token, choice, here, there in zip(one.ids, other.ids, one.logprobs, other.logprobs, strict=False):
                if token != choice:
                    break
                away.append(abs(here - there))
        found.append(
            {
                "batch": name,
                "requests": len(pairs),
                "same_texts": sum(one.ids == other.ids for one, other in pairs),
                "tokens": len(away),
                "logprob": round(max(away, default=0.0), 6),
                "mean": round(statistics.mean(away), 6) if away else None,
            }
        )
    return found


def is_tie(one: float, other: float) -> bool:
    """Whether two choices may be one tie: each took a token as likely as the other's, and none likelier than half."""
    return abs(one - other) <= TIE and max(one, other) <= math.log(0.5) + TIE


# Every note writes all intervals, and each is a second of resampling.
_paired = functools.cache(paired)


def interval(name: str, left: Sequence[float], right: Sequence[float]) -> dict[str, Any] | None:
    """The mean of ``left - right``, request by request, with its 95 % interval; None for less than two."""
    if len(left) != len(right) or len(left) < 2:
        return None
    found = _paired(name, tuple(right), tuple(left))
    # Finer than ROUNDING.
    return {"mean": round(found.mean, 7), "low": round(found.low, 7), "high": round(found.high, 7), "n": found.n}


@functools.cache
def _median(differences: tuple[float, ...]) -> tuple[float, float]:
    """Where the median lies in nineteen of twenty resamplings."""
    chance = random.Random(17)
    found = sorted(statistics.median(chance.choices(differences, k=len(differences))) for _ in range(2000))
    return found[50], found[1949]


def compared(work: Sequence[Running]) -> list[dict[str, Any]]:
    """One entry for each variant and the one that it is like."""
    by_name = {running.variant.name: running for running in work if running.answers}
    found = []
    for left in by_name.values():
        right = by_name.get(left.variant.like)
        if right is None:
            continue
        name, difference = left.variant.name, client.compare(left.answers, right.answers)
        both = left.variant.apart and right.variant.apart
        alone = list(zip(left.apart, right.apart, strict=True)) if both else []
        same = [pair for pair in alone if pair[0].ids == pair[1].ids and pair[0].verify_steps and pair[1].verify_steps]
        accepted = [run.found.get("accept_each", []) for run in (left, right)]
        found.append(
            {
                **entry(name, right.variant.name, difference),
                "errors": difference.errors,
                "parted": parted(left.answers, right.answers),
                "cells": cells(left.answers, right.answers),
                "steps_more": [
                    [one.verify_steps - other.verify_steps, one.retractions]
                    for one, other in zip(left.answers, right.answers, strict=True)
                    if left.variant.half and one.ids == other.ids
                ],
                "accept": interval(name, *accepted),
                "accept_same_texts": interval(name, *([pair[at].accept_length for pair in same] for at in (0, 1))),
                "apart_same_texts": sum(one.ids == other.ids for one, other in alone),
                "apart_logprob_each": [round(client.compare([one], [other]).logprob, 6) for one, other in alone],
            }
        )
    return found


def answered(runs: Iterable[Mapping[str, Any]]) -> bool | None:
    """Whether all did; None where none failed and one was not asked."""
    held = list(runs)
    if any(run.get("failed") or run.get("errors") for run in held):
        return False
    return True if held and all("errors" in run for run in held) else None


def capacity(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """How many times as many tokens DCP2 holds in the memory of a rank, from the pools that the engines logged."""
    pools = [runs.get(name, {}).get("pool") or {} for name in ("tp2", "dcp2")]
    if not all(pool.get("tokens") and pool.get("gb_as_logged") for pool in pools):
        return None
    tokens_a_gb = [pool["tokens"] / pool["gb_as_logged"] for pool in pools]
    # The logged sizes have two decimals.
    large, small = (pool["gb_as_logged"] for pool in pools)
    ends = [(large - 0.005) / (small + 0.005), (large + 0.005) / (small - 0.005)]
    scale = pools[1]["tokens"] / pools[0]["tokens"]
    return {
        "predicted": PREDICTED,
        "measured": round(tokens_a_gb[1] / tokens_a_gb[0], 3),
        "between": [round(scale * one, 3) for one in ends],
        "tokens_a_gb": {name: round(tokens) for name, tokens in zip(("tp2", "dcp2"), tokens_a_gb, strict=True)},
    }


def farther(compared: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """By how much DCP2 is farther from TP2 than TP1 is: the largest difference of each prompt that shares nothing."""
    pairs = {
        pair["left"]: pair
        for pair in compared
        if pair["right"] == "tp2" and not pair["errors"] and "apart_logprob_each" in pair
    }
    each = {name: pairs.get(name, {}).get("apart_logprob_each", []) for name in ("tp1", "dcp2")}
    mean = interval("logprob", each["dcp2"], each["tp1"])
    if mean is None:
        return None
    away = tuple(ours - noise for ours, noise in zip(each["dcp2"], each["tp1"], strict=True))
    low, high = _median(away)
    return {
        **mean,
        "median": round(statistics.median(away), 7),
        "median_low": round(low, 7),
        "median_high": round(high, 7),
        "farther": sum(one > 0 for one in away),
        "nearer": sum(one < 0 for one in away),
        "means": {name: round(statistics.mean(values), 7) for name, values in each.items()},
        "medians": {name: round(statistics.median(values), 7) for name, values in each.items()},
        "same_texts": {name: pairs[name]["apart_same_texts"] for name in each},
    }


def verdicts(report: Mapping[str, Any]) -> dict[str, bool | None]:
    """What must hold, each True, False, or None where it was not measured."""
    pairs = {(entry["left"], entry["right"]): entry for entry in report["compared"]}
    runs = report["runs"]

    def logprob(left: str, right: str) -> float | None:
        entry = pairs.get((left, right))
        return None if entry is None or entry["errors"] else entry["logprob"]

    noise, ours = logprob("tp1", "tp2"), logprob("dcp2", "tp2")
    away = report.get("logprob_farther")
    checked = [run for name, run in runs.items() if name in CHECKED]
    parts = report.get("kernels")

    def accept(left: str, right: str) -> bool | None:
        pair = pairs.get((left, right))
        if pair is None or pair["errors"] or pair["accept"] is None:
            return None
        found = pair["accept"]
        if found["high"] - found["low"] > 2 * NARROW:
            return None
        holds: bool = found["low"] <= 0 <= found["high"]
        return holds

    def mean() -> bool | None:
        if away is None or away["high"] - away["low"] > 2 * FAR:
            return None
        holds: bool = away["low"] <= ROUNDING
        return holds

    def median() -> bool | None:
        if away is None:
            return None
        holds: bool = away["median_high"] <= max(ABOVE * away["medians"]["tp1"], ROUNDING)
        return holds

    def replayed() -> bool | None:
        pair = pairs.get(("dcp2 eager", "dcp2"))
        if pair is None or pair["errors"]:
            return None
        eager, graph = (runs[name]["logged_steps"] for name in (pair["left"], pair["right"]))
        real = graph["graph"] > 0 and graph["eager"] == 0 and eager["eager"] > 0 and eager["graph"] == 0
        return bool(real and pair["same_texts"] == pair["requests"] and pair["logprob"] == 0)

    def retracted() -> bool | None:
        pair = pairs.get(("dcp2 half retracted", "dcp2 half"))
        run, calm = (runs.get(name, {}) for name in ("dcp2 half retracted", "dcp2 half"))
        if pair is None or pair["errors"]:
            return None
        forced = run["retractions"] > 0 and calm["retractions"] == 0
        kept = not run["lost"] and not run["rows_behind"]
        # What a step had drafted when it was retracted is lost, so it may take one more. A text that parts has others.
        drafted = pair["steps_more"] and all(0 <= more <= times for more, times in pair["steps_more"])
        texts = run["different_texts"] > 1 and all(is_tie(*choices) for choices in pair["parted"])
        return bool(forced and kept and drafted and texts)

    def selected() -> bool | None:
        if any(run.get("selections_differ") for run in checked):
            return False
        if not checked or not all("repeated" in run for run in checked):
            return None

        def proven(run: Mapping[str, Any]) -> bool:
            rows, repeated = run["selections_compared"], run["repeated"]
            added = [after - before for before, after in zip(rows["before"], rows["after"], strict=True)]
            compared = min(added) == max(added) >= rows["at_least"] > 0
            return bool(compared and repeated == {"times": report["size"]["repeats"], "different_texts": 1})

        return all(proven(run) and not run.get("failed") for run in checked)

    return {
        "every engine answered everything": answered(runs.values()),
        "logprob DCP2-TP2 no larger than TP1-TP2": None
        if noise is None or ours is None
        else ours <= max(noise, ROUNDING),
        "mean logprob difference DCP2-TP2 no larger than TP1-TP2's within its interval": mean(),
        "median logprob difference DCP2-TP2 at most a quarter above TP1-TP2's": median(),
        GRAPHS: replayed(),
        **{words: accept(f"dcp2 eagle {kind}", f"tp2 eagle {kind}") for kind, words in ACCEPTANCE.items()},
        "retracted: nothing lost, texts as without or parted at a tie": retracted(),
        "selections the same on both ranks": selected(),
        "merged parts are the whole": None if not isinstance(parts, list) else all(case["holds"] for case in parts),
    }


class Run:
    """The whole run: its engines, its report, and the time that it has.

    Attributes:
        limit: seconds after which nothing new is begun.
        before: seconds that the command had taken when this began.
    """

    def __init__(
        self,
        where: OnGpu | OnCpu,
        report: dict[str, Any],
        out: Path,
        limit: float,
        began: float,
        before: float = 0.0,
    ) -> None:
        self.where, self.report, self.out, self.limit, self.began = where, report, out, limit, began
        self.before = before
        self.work: list[Running] = []
        self.report |= {"cut": [], "parts_failed": {}, "parts_seconds": {"before": round(before, 1)}}

    def passed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    def note(self, text: str) -> None:
        """Write what is known so far."""
        self.report["seconds"] = round(self.passed(), 1)
        self.report["command_seconds"] = round(self.before + self.passed(), 1)
        # Copies: engines that are starting write into theirs meanwhile.
        self.report["runs"] = {running.variant.name: dict(running.found) for running in self.work}
        self.report["compared"] = compared(self.work)
        self.report["logprob_farther"] = farther(self.report["compared"])
        self.report["capacity"] = capacity(self.report["runs"])
        self.report["verdicts"] = verdicts(self.report)
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(self.report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(f"[{self.report['seconds']:6.1f} s] {text}", flush=True)

    def part(self, name: str, what: Callable[[], object]) -> None:
        """Do one part, unless the time is over; whatever it raises takes nothing from the others."""
        if self.passed() >= self.limit:
            self.report["cut"].append(name)
            return
        began = self.passed()
        try:
            what()
        except Exception as error:
            self.report["parts_failed"][name] = f"{type(error).__name__}: {error}"[:2000]
        self.report["parts_seconds"][name] = round(self.passed() - began, 1)
        self.note(name)

    def each(self, words: str, work: Sequence[Running], what: Callable[[Running], None]) -> None:
        """Do a part with one engine after another; one that fails is ended, so that it holds no GPU from the others.

        Not beside each other: kernels of two engines that wait for their other GPU take turns slowly.
        """
        for running in work:
            if "failed" not in running.found:
                self.part(f"{running.variant.name} {words}", functools.partial(side_by_side, [running], what))
                if "failed" in running.found:
                    running.down()

    def end(self, work: Sequence[Running]) -> None:
        """End engines, all at once."""
        threads = [threading.Thread(target=running.down) for running in work]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def start(self, variants: Sequence[Variant]) -> list[Running]:
        """Begin to start engines."""
        made = []
        # All at once: an engine binds its port long after it was chosen.
        for variant, port in zip(variants, ports.free(len(variants)), strict=True):
            name = variant.name.replace(" ", "-").replace("/", "-")
            one = deployment.Deployment(deployment.new_folder(f"two-{name}"), [self.where.spec(variant, port)])
            # One that does not come up must not take the others' time.
            made.append(Running(variant, one, port, patience=min(500.0, max(60.0, self.limit - KEPT - self.passed()))))
        self.work += made
        for running in made:
            running.start(self.where.size)
        return made

    def wait(self, work: Sequence[Running]) -> None:
        """Wait until engines are there, or it is too late for them."""
        for running in work:
            if not running.is_up.wait(max(0.0, self.limit - KEPT - self.passed())):
                running.found["failed"] = f"not there after {self.passed():.0f} s"
        self.end([running for running in work if "failed" in running.found])
        self.note(f"{sum('failed' not in running.found for running in work)} of {len(work)} engines are up")

    def wave(self, variants: Sequence[Variant], first: bool) -> None:
        """Start engines, ask them everything, end them."""
        size, began = self.where.size, self.passed()
        work = self.start(variants)
        if first:
            self.part("kernels by themselves", lambda: self.report.update(kernels=self.where.parts()))
        self.wait(work)
        self.report["parts_seconds"][f"start of {len(work)} engines"] = round(self.passed() - began, 1)
        for half in (False, True):
            some = [running for running in work if running.variant.half is half]
            self.each("asked", some, functools.partial(Running.ask_and_empty, size=size))
            self.each("pool", some, Running.capacity)
            checked = [running for running in some if running.variant.name in CHECKED]
            self.each("selections compared", checked, lambda one: one.repeat(size))
        # Nothing stands beside what takes times.
        self.end([running for running in work if not running.variant.timed])
        for kind in sorted({running.variant.timed for running in work} - {""}):
            timed = [running for running in work if running.variant.timed == kind]
            for count in size.step_batches:
                words = f"steps of {count}: {', '.join(running.variant.name for running in timed)}"
                self.part(words, functools.partial(time_in_turns, timed, count, size))
        self.end(work)

    def collectives(self, name: str) -> None:
        """Time the collectives that DCP adds."""
        times = 100 if self.where.device == "cuda" else 5
        self.report[name] = collectives(self.where.backend, self.where.device, times)

    def go(self, only: Sequence[str]) -> None:
        """Do everything."""
        waves = [[one for one in wave if not only or one.name in only] for wave in self.where.waves()]
        # Before the engines are there and after them: these are times, and what the two differ by is their noise.
        self.part("collectives", lambda: self.collectives("collectives_us"))
        for number, wave in enumerate(waves):
            self.wave(wave, number == 0)
        self.part("collectives again", lambda: self.collectives("collectives_us_again"))


def main() -> int:
    """Entry point of ``make gpu-engine GPUS=2``: 0 when everything was measured that is to be, and it holds."""
    parser = argparse.ArgumentParser(description="GLM-DSA under DCP2 against TP2, on two GPUs or on a CPU")
    parser.add_argument("pack", type=Path, nargs="?")
    parser.add_argument("--cpu", action="store_true", help="gloo and the rig's stand-ins in place of two GPUs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="names of engines, comma separated; all if not given")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which nothing new is begun")
    parser.add_argument("--since", type=float, help="when the whole command began, in seconds since the epoch")
    arguments = parser.parse_args()
    before = 0.0 if arguments.since is None else max(0.0, time.time() - arguments.since)
    if arguments.cpu == (arguments.pack is not None):
        parser.error("either PACK or --cpu")
    began = time.monotonic()
    for name in ("torch", *LOADED):
        importlib.import_module(name)
    try:
        where: OnGpu | OnCpu = OnCpu() if arguments.cpu else OnGpu(arguments.pack)
    except RigError as error:
        print(*error.tail, f"{error.kind}: {error}", sep="\n", file=sys.stderr)
        return 1
    report: dict[str, Any] = {
        "kind": "measured",
        **provenance.of(__file__, models.get((CPU_MODELS if arguments.cpu else GPU_MODELS)[False]).seed),
        "collectives_by": where.backend,
        "size": asdict(where.size),
        **where.made_of,
    }
    run = Run(where, report, arguments.out, arguments.limit, began, before)
    try:
        run.go(arguments.only.split(",") if arguments.only else [])
    except RigError as error:
        report["error"] = error.as_json()
    finally:
        run.end(run.work)
    run.note("ended")
    for words, holds in report["verdicts"].items():
        print({True: "holds", False: "DOES NOT HOLD", None: "not measured"}[holds], words, sep=": ")
    for pair in report["compared"]:
        print(f"{pair['left']} / {pair['right']}: {pair['same_texts']} of {pair['requests']}, {pair['logprob']:.4g}")
    for running in run.work:
        print(running.variant.name, {name: value for name, value in running.found.items() if name != "accept_each"})
    for name in report["cut"]:
        print("no time for", name)
    for name, words in report["parts_failed"].items():
        print(name, words, sep=": ")
    return 0 if whole(report) else 1


def whole(report: Mapping[str, Any]) -> bool:
    """Whether nothing failed or was cut, and everything holds but for what this size does not measure."""
    left_out = report["size"]["unmeasured"]
    held = all(holds or (holds is None and words in left_out) for words, holds in report["verdicts"].items())
    return held and not ("error" in report or report["cut"] or report["parts_failed"])


if __name__ == "__main__":
    sys.exit(main())
