"""GLM-DSA under decode context parallelism on two GPUs: ``dsa-dcp`` against tensor parallelism without it.

``python3 -m lab.rig.gpu.two PACK --out evidence/engine/NAME.json`` on a machine with two GPUs, where ``PACK`` is the
folder that ``lab.rig.gpu.pack`` wrote; ``python3 -m lab.rig.gpu.two --cpu --out FILE`` runs the same script here, with
gloo for NCCL, the rig's stand-ins for kernels, and fewer and shorter prompts.

All engines stand beside each other. While they start, the GPUs are free: the attention kernels are checked by
themselves (``lab.rig.gpu.dsa_parts``), then the collectives that DCP adds are timed. NVLink multicast stays off, so
every engine runs without the custom and the fused all-reduces, which use it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab import provenance
from lab.rig import cache, client, deployment, environment, models, ports, trees
from lab.rig.client import Answer, Request, Route
from lab.rig.engine import LISTENS, READY, Engine, clean_environment, engine_spec
from lab.rig.errors import RigError
from lab.rig.gpu.engine import GHOSTS, SITE, unpack
from lab.rig.member import Spec
from lab.rig.tree import REPOSITORY, find, recognise

# What a GPU machine compiled before, if it lies beside the archives.
KERNELS = "kernels-0.5.17-gpu.tar.xz"
DSA_DCP = {"SGLANG_RESEARCH_DSA_DCP": "1"}
CHECK = {"SGLANG_RESEARCH_DSA_DCP_CHECK": "1"}
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
# Of the latent rows a rank holds half, of the index keys all: 788 bytes a token and layer against 460.
PREDICTED = 1.713
# Tokens of the two pools that are compared; the logged size has two decimals.
LARGE, SMALL = 2_097_152, 262_144
# Log-probabilities near 5 in float32 have steps of 5e-7, and their sums over ranks round some ten times.
ROUNDING = 1e-5
COMPARED = re.compile(r"(\d+) rows compared across the ranks")


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
        timed: whether its steps are timed.
    """

    name: str
    ranks: int = 2
    dcp: bool = False
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    like: str = ""
    cpu: bool = False
    timed: bool = False


VARIANTS = (
    Variant("tp2", cpu=True, timed=True),
    Variant("tp1", ranks=1, like="tp2", cpu=True),
    Variant("dcp2", dcp=True, like="tp2", cpu=True, timed=True),
    Variant("dcp2 eager", dcp=True, flags=("--disable-cuda-graph",), like="dcp2"),
    Variant("dcp2 checked", dcp=True, env=CHECK, like="dcp2"),
    Variant("tp2 eagle 3/1/4", flags=eagle(3, 4), like="tp2", cpu=True, timed=True),
    Variant("dcp2 eagle 3/1/4", dcp=True, flags=eagle(3, 4), env=CHECK, like="tp2 eagle 3/1/4", cpu=True),
    Variant("tp2 eagle 5/1/6", flags=eagle(5, 6), like="tp2"),
    Variant("dcp2 eagle 5/1/6", dcp=True, flags=eagle(5, 6), like="tp2 eagle 5/1/6", timed=True),
)


@dataclass(frozen=True)
class Size:
    """How much is asked.

    Attributes:
        lengths: prompts that are sent one after another.
        batches: (requests, length of the first, tokens longer each) that are sent together.
        step_batches: requests whose steps are timed, behind ``step_length`` tokens each.
        repeats: requests to the engine whose selections are compared across its ranks.
    """

    lengths: tuple[int, ...]
    batches: tuple[tuple[int, int, int], ...]
    new: int
    step_batches: tuple[int, ...]
    step_length: int
    steps: int
    repeats: int


GPU = Size((40, 5_000, 60_000), ((8, 2_500, 7), (32, 600, 3)), 32, (1, 8, 32), 2_500, 96, 200)
CPU = Size((40, 140), ((2, 130, 7),), 12, (1,), 100, 4, 4)


class OnGpu:
    """Where the engines run: two GPUs, the archive's library and trees."""

    size = GPU
    backend, device = "nccl", "cuda"

    def __init__(self, pack: Path) -> None:
        home = cache.root() / "gpu"
        home.mkdir(parents=True, exist_ok=True)
        self.home = home
        self.trees = unpack(pack, home)
        self.model = models.ensure("glm-dsa-gpu", cache.ensure)
        self.own = home / "home-two"
        shutil.rmtree(self.own, ignore_errors=True)
        self.own.mkdir()
        if (pack / KERNELS).is_file():
            shutil.unpack_archive(pack / KERNELS, self.own, "xztar", filter="data")

    def environment(self) -> dict[str, str]:
        """Variables under which the library of the archive runs."""
        path = (self.trees["patched"], SITE, self.trees["stock"])
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
        argv = [sys.executable, "-m", "sglang.launch_server", f"--model-path={self.model}", "--load-format=auto"]
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
        argv += variant.flags
        return Spec("E", tuple(argv), env, (READY, LISTENS), "alone", port, tree=str(self.trees["patched"]))

    def variants(self) -> tuple[Variant, ...]:
        """The engines of this form."""
        return VARIANTS

    def parts(self) -> Any:
        """Check the kernels by themselves, in a process of their own."""
        program = (
            "import json, pathlib, sys; import sgl_kernel.flash_mla as f; from lab.rig.gpu import dsa_parts; "
            "print('PARTS', json.dumps(dsa_parts.run(f, pathlib.Path(sys.argv[1]))))"
        )
        env = self.environment()
        env["PYTHONPATH"] += os.pathsep + str(REPOSITORY)
        argv = [sys.executable, "-c", program, str(self.trees["patched"])]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240, check=False)
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
        recognise(self.tree, False)
        self.model = models.ensure("glm-dsa-select", cache.ensure)
        self.folder = deployment.new_folder("two-cpu")

    def spec(self, variant: Variant, port: int) -> Spec:
        """The engine of ``variant``; for the exact top-k, which needs a GPU, the engine's own broadcast."""
        folder = self.folder / variant.name.replace(" ", "-").replace("/", "-")
        (folder / "tmp").mkdir(parents=True)
        env = {**(DSA_DCP if variant.dcp else {}), **variant.env, "SGLANG_DSA_TOPK_BROADCAST": "1"}
        flags = (*(("--dcp-size=2",) if variant.dcp else ()), *variant.flags, "--sleep-on-idle")
        one = Engine("E", "decode", "alone", self.tree, self.python, self.model, port, 0, flags, env, tp=variant.ranks)
        return engine_spec(one, folder)

    def variants(self) -> tuple[Variant, ...]:
        """The engines of this form."""
        return tuple(variant for variant in VARIANTS if variant.cpu)

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
    """A variant whose engine runs, and what it brought."""

    variant: Variant
    deployment: deployment.Deployment
    port: int
    found: dict[str, Any] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)
    patience: float = 500.0
    is_up: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Begin to start it. The thread that does so lives until `down`: the kernel ends an engine with it."""

        def live() -> None:
            side_by_side([self], Running.up)
            self.is_up.set()
            self.may_end.wait()

        threading.Thread(target=live, daemon=True).start()

    def down(self) -> None:
        """End it."""
        self.deployment.down()
        self.may_end.set()

    def up(self) -> None:
        """Start it and bring the first token.

        Raises:
            RigError: kind ``crash``.
        """
        began = time.monotonic()
        self.deployment.up(self.patience)
        self.found["ready_s"] = round(time.monotonic() - began, 1)
        first = client.send(Route(self.port), Request(client.prompts(7, 1, 40)[0], 2), timeout=400.0)
        self.found["first_token_s"] = round(time.monotonic() - began, 1)
        if first.error:
            raise RigError("crash", first.error)

    def ask(self, size: Size) -> None:
        """Send all prompts: one after another, then each batch together."""
        client.flush(self.port)
        alone = [Request(client.prompts(7, 1, length)[0], size.new, str(length)) for length in size.lengths]
        self.answers = client.send_all(Route(self.port), alone, together=False, timeout=400.0)
        for count, length, vary in size.batches:
            prompts = client.prompts(8, count, length, vary)
            batch = [Request(prompt, size.new, f"{count}:{number}") for number, prompt in enumerate(prompts)]
            self.answers += client.send_all(Route(self.port), batch, together=True, timeout=400.0)
        verified = [answer.accept_length for answer in self.answers if answer.verify_steps]
        self.found |= {
            "errors": sorted({answer.error for answer in self.answers if answer.error}),
            "accept": round(sum(verified) / len(verified), 3) if verified else None,
            "verify_steps": sum(answer.verify_steps for answer in self.answers),
        }

    def repeat(self, size: Size) -> None:
        """Send one prompt over and over, all but its end cached, and count its different texts."""
        request = Request(client.prompts(7, 1, size.lengths[1])[0], 8)
        texts = set()
        for _ in range(size.repeats):
            answer = client.send(Route(self.port), request, timeout=400.0)
            if answer.error:
                raise RigError("crash", answer.error)
            texts.add(answer.ids)
        rows = [int(number) for number in COMPARED.findall(self.deployment.log("E"))]
        self.found["repeated"] = {"times": size.repeats, "different_texts": len(texts)}
        self.found["selections_compared"] = max(rows, default=0)

    def time_steps(self, size: Size) -> None:
        """Time decode steps (with speculation: tokens) of several requests at once."""
        self.found["step_ms"] = {str(count): self._step_ms(count, size) for count in size.step_batches}

    def _step_ms(self, count: int, size: Size) -> float:
        prompts = client.prompts(9, count, size.step_length)

        def seconds(new: int) -> float:
            began = time.monotonic()
            answers = client.send_all(Route(self.port), [Request(prompt, new) for prompt in prompts], True, 400.0)
            if any(answer.error for answer in answers):
                raise RigError("crash", next(answer.error for answer in answers if answer.error))
            return time.monotonic() - began

        seconds(1 + size.steps)
        short = sorted(seconds(1) for _ in range(3))[1]
        long = sorted(seconds(1 + size.steps) for _ in range(3))[1]
        return round((long - short) / size.steps * 1000, 3)

    def capacity(self) -> None:
        """Read what the engine says of its pool: tokens of the group, and the bytes of one rank's target pool."""
        info = client.get(self.port, "/get_server_info", timeout=60.0)
        tokens = int(info.get("max_total_num_tokens") or 0) * (2 if self.variant.dcp else 1)
        sizes = [float(number) for number in re.findall(r"KV size: ([\d.]+) GB", self.deployment.log("E"))]
        self.found["pool"] = {"tokens": tokens, "gb_as_logged": sizes[0] if sizes else None}


def side_by_side(work: Sequence[Running], what: Callable[[Running], None]) -> None:
    """Do ``what`` for every engine at once; one that fails keeps its error and is left out from then on."""
    work = [running for running in work if "failed" not in running.found]

    def one(running: Running) -> None:
        try:
            what(running)
        except (RigError, OSError, KeyError, ValueError) as error:
            tail = error.tail[-30:] if isinstance(error, RigError) else ()
            running.found["failed"] = "\n".join([f"{type(error).__name__}: {error}", *tail])[-4000:]

    if len(work) == 1:
        return one(work[0])
    threads = [threading.Thread(target=one, args=(running,)) for running in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


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
    outputs = [rank.communicate(timeout=180) for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise RigError("collectives", outputs[0][1][-1500:] or outputs[1][1][-1500:])
    found: list[dict[str, Any]] = json.loads(outputs[0][0].splitlines()[-1])
    return found


def compared(work: Sequence[Running]) -> list[dict[str, Any]]:
    """One entry for each variant and the one that it is like."""
    answered = {running.variant.name: running.answers for running in work if running.answers}
    found = []
    for running in work:
        left, right = running.variant.name, running.variant.like
        if left in answered and right in answered:
            difference = client.compare(answered[left], answered[right])
            found.append(
                {
                    "left": left,
                    "right": right,
                    "requests": difference.requests,
                    "same_texts": difference.same_texts,
                    "first_difference": difference.first_token,
                    "logprob": difference.logprob,
                    "errors": difference.errors,
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
    return {"predicted": PREDICTED, "measured": round(tokens_a_gb[1] / tokens_a_gb[0], 3)}


def verdicts(report: Mapping[str, Any]) -> dict[str, bool | None]:
    """What must hold, each True, False, or None where it was not measured."""
    pairs = {(entry["left"], entry["right"]): entry for entry in report["compared"]}
    runs = report["runs"]

    def logprob(left: str, right: str) -> float | None:
        entry = pairs.get((left, right))
        return None if entry is None or entry["errors"] else entry["logprob"]

    noise, ours = logprob("tp1", "tp2"), logprob("dcp2", "tp2")
    graph = pairs.get(("dcp2 eager", "dcp2"))
    checked = runs.get("dcp2 checked") or runs.get("dcp2 eagle 3/1/4") or {}
    parts = report.get("kernels")

    def accept(kind: str) -> bool | None:
        left, right = (runs.get(f"{name} eagle {kind}", {}).get("accept") for name in ("dcp2", "tp2"))
        return None if left is None or right is None else abs(left - right) <= 0.1

    return {
        "every engine answered everything": answered(runs.values()),
        "logprob DCP2-TP2 no larger than TP1-TP2": None
        if noise is None or ours is None
        else ours <= max(noise, ROUNDING),
        "graph replay equal to eager": None if graph is None else graph["same_texts"] == graph["requests"],
        "acceptance 3/1/4 within 0.1": accept("3/1/4"),
        "acceptance 5/1/6 within 0.1": accept("5/1/6"),
        "selections the same on both ranks": None
        if "repeated" not in checked
        else checked["selections_compared"] > 0 and not checked.get("failed"),
        "merged parts are the whole": None if not isinstance(parts, list) else all(case["holds"] for case in parts),
    }


def main() -> int:
    """Entry point of ``make gpu-engine GPUS=2``: 0 when everything that was measured holds."""
    parser = argparse.ArgumentParser(description="GLM-DSA under DCP2 against TP2, on two GPUs or on a CPU")
    parser.add_argument("pack", type=Path, nargs="?")
    parser.add_argument("--cpu", action="store_true", help="gloo and the rig's stand-ins in place of two GPUs")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="names of engines, comma separated; all if not given")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which nothing new is begun")
    arguments = parser.parse_args()
    if arguments.cpu == (arguments.pack is not None):
        parser.error("either PACK or --cpu")
    began = time.monotonic()
    where: OnGpu | OnCpu = OnCpu() if arguments.cpu else OnGpu(arguments.pack)
    report: dict[str, Any] = {
        "kind": "measured",
        **provenance.of(__file__, models.get("glm-dsa-select" if arguments.cpu else "glm-dsa-gpu").seed),
        "collectives_by": where.backend,
    }
    work: list[Running] = []

    def note(text: str) -> bool:
        """Write what is known so far, and tell whether there is time for more."""
        report["seconds"] = round(time.monotonic() - began, 1)
        report["runs"] = {running.variant.name: running.found for running in work}
        report["compared"] = compared(work)
        report["capacity"] = capacity(report["runs"])
        report["verdicts"] = verdicts(report)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        print(f"[{report['seconds']:6.1f} s] {text}", flush=True)
        return bool(report["seconds"] < arguments.limit)

    try:
        only = arguments.only.split(",") if arguments.only else []
        variants = [one for one in where.variants() if not only or one.name in only]
        for variant, port in zip(variants, ports.free(len(variants)), strict=True):
            name = variant.name.replace(" ", "-").replace("/", "-")
            one = deployment.Deployment(deployment.new_folder(f"two-{name}"), [where.spec(variant, port)])
            # One that does not come up must not take the others' time.
            work.append(Running(variant, one, port, patience=min(500.0, arguments.limit * 0.6)))
        if where.device == "cuda":
            # Before the engines are there: these are times.
            report["collectives_us"] = collectives(where.backend, where.device, 100)
        note("made")
        for running in work:
            running.start()
        report["kernels"] = where.parts()
        note("kernels checked by themselves")
        for running in work:
            running.is_up.wait()
        more = note("all are up")
        # One after another: kernels of two engines that wait for their other GPU take turns slowly.
        for running in work:
            if more:
                side_by_side([running], lambda one: one.ask(where.size))
                side_by_side([running], Running.capacity)
                more = note(f"{running.variant.name} asked")
        checked = [running for running in work if CHECK.items() <= running.variant.env.items()]
        if more:
            side_by_side(checked, lambda running: running.repeat(where.size))
            more = note("selections compared")
        # One after another: these are times.
        for running in [running for running in work if running.variant.timed]:
            if more:
                side_by_side([running], lambda one: one.time_steps(where.size))
                more = note(f"{running.variant.name} timed")
        if more and where.device == "cpu":
            report["collectives_us"] = collectives(where.backend, where.device, 5)
    except RigError as error:
        report["error"] = {"kind": error.kind, "words": str(error)}
    finally:
        for running in work:
            running.down()
    note("ended")
    for words, holds in report["verdicts"].items():
        print({True: "holds", False: "DOES NOT HOLD", None: "not measured"}[holds], words, sep=": ")
    for entry in report["compared"]:
        print(
            f"{entry['left']} / {entry['right']}: {entry['same_texts']} of {entry['requests']}, {entry['logprob']:.4g}"
        )
    for running in work:
        print(running.variant.name, running.found)
    return 0 if "error" not in report and all(holds is not False for holds in report["verdicts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
