"""Run the real 0.5.17 engine on one GPU, stock and patched, plain and speculative, and compare them.

The stock top-k appends its picks in the order in which its threads come, so a long prompt's text differs from one run
to the next; ``--topk torch`` takes a top-k of the engine that does not, and stock and patched are then bitwise equal.

``python3 -m lab.rig.gpu.engine PACK --out evidence/engine/NAME.json`` on the GPU machine, where ``PACK`` is the folder
that ``lab.rig.gpu.pack`` wrote. Needs nothing beyond Python 3.12, Torch, numpy and CUDA's compiler, which are there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.rig import cache, client, deployment, models, ports
from lab.rig.client import Answer, Request, Route
from lab.rig.engine import LISTENS, READY, clean_environment
from lab.rig.errors import RigError
from lab.rig.gpu.pack import ENGINE, PATCHED
from lab.rig.member import Spec

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
LENGTHS = (40, 5_000, 60_000)


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


def spec(tree: Path, library: Path, model: Path, port: int, flags: Sequence[str]) -> Spec:
    """The engine that runs ``tree``; packages come from ``library``."""
    torch_topk = "--dsa-topk-backend=torch" in flags
    env = {
        **clean_environment(),
        "PYTHONPATH": os.pathsep.join(map(str, dict.fromkeys((tree, SITE, library)))),
        "PATCHBUNDLE_RIG_GHOSTS": ",".join(GHOSTS),
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": ports.HOST,
        "CUDA_HOME": os.environ.get("CUDA_HOME", "/usr/local/cuda"),
        "FLASHINFER_USE_CUDA_NORM": "1",  # no CuTe DSL in the archive
        "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",  # short prompts by the sparse path too: no FA3 there
        "PYTHONUNBUFFERED": "1",
        **({"SGLANG_DSA_FUSE_TOPK": "0", "SGLANG_OPT_USE_TOPK_V2": "0"} if torch_topk else {}),
    }
    argv = [sys.executable, "-m", "sglang.launch_server", f"--model-path={model}", "--load-format=auto"]
    argv += ["--sampling-backend=pytorch", "--grammar-backend=none", f"--host={ports.HOST}", f"--port={port}"]
    argv += ["--skip-server-warmup", "--mem-fraction-static=0.3", "--max-running-requests=8", "--random-seed=0"]
    argv += ["--kv-cache-dtype=fp8_e4m3", "--context-length=65536", *flags]
    return Spec("E", tuple(argv), env, (READY, LISTENS), "alone", port, tree=str(tree))


def compiled(home: Path) -> list[str]:
    """Libraries that were compiled at run time, below the caches of ``home``."""
    found = list(home.rglob("*.so")) + list(home.rglob("*.cubin"))
    return sorted(path.relative_to(home).as_posix() for path in found)


def run(tree: Path, library: Path, model: Path, flags: Sequence[str], new: int) -> dict[str, Any]:
    """Start one engine, send the prompts, end it; return its answers and seconds.

    Raises:
        RigError: kind ``crash``.
    """
    (port,) = ports.free(1)
    one = deployment.Deployment(deployment.new_folder("gpu"), [spec(tree, library, model, port, flags)], say=print)
    began = time.monotonic()
    try:
        one.up(500)
        ready = time.monotonic() - began
        requests = [Request(client.prompts(7, 1, length)[0], new, str(length)) for length in LENGTHS]
        first = client.send(Route(port), Request(requests[0].prompt, 1), timeout=400.0)
        first_token = time.monotonic() - began - ready
        answers = client.send_all(Route(port), requests, together=False, timeout=400.0)
        client.flush(port)
        again = client.send_all(Route(port), requests, together=False, timeout=400.0)
        one.check(wait=5.0 if any(answer.error for answer in answers) else 0.0)
    finally:
        one.down()
    return {
        "ready_s": round(ready, 1),
        "first_token_s": round(first_token, 1),
        "first": first,
        "answers": answers,
        "again": again,
    }


def told(result: dict[str, Any]) -> dict[str, Any]:
    """``result`` as JSON takes it."""
    answers: list[Answer] = result["answers"]
    return {
        "ready_s": result["ready_s"],
        "first_token_s": result["first_token_s"],
        "accept": [round(answer.accept_length, 3) for answer in answers],
        "seconds": [round(answer.seconds, 2) for answer in answers],
        "errors": [answer.error for answer in answers],
        # The same engine, the same prompts, its cache emptied in between: what differs here is the engine's own noise.
        "same_texts_again": client.compare(answers, result["again"]).same_texts,
        "first_difference_again": client.compare(answers, result["again"]).first_token,
        "ids": [list(answer.ids) for answer in answers],
    }


def machine() -> dict[str, str]:
    """What the numbers were measured on."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name(0),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "python": sys.version.split()[0],
    }


# Left, right, and whether their texts must be the same. Speculation verifies several rows at once, and bf16 sums of
# another batch shape differ in their last bits, so a near tie may go the other way: told, not demanded.
PAIRS = (
    ("stock plain", "patched plain", True),
    ("stock speculative", "patched speculative", True),
    ("stock plain", "stock speculative", False),
)


def compared(results: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each pair of runs that both took place."""
    found = []
    for left, right, demanded in PAIRS:
        if left in results and right in results:
            difference = client.compare(results[left]["answers"], results[right]["answers"])
            found.append(
                {
                    "left": left,
                    "right": right,
                    "demanded": demanded,
                    "requests": difference.requests,
                    "same_texts": difference.same_texts,
                    "first_difference": difference.first_token,
                    "logprob": difference.logprob,
                }
            )
    return found


def write(report: dict[str, Any], results: Mapping[str, dict[str, Any]], out: Path) -> None:
    """Write what is known so far: a run that is cut off leaves the runs before it."""
    report["runs"] = {name: told(result) for name, result in results.items()}
    report["compared"] = compared(results)
    report["green"] = len(report["compared"]) == len(PAIRS) and all(
        entry["same_texts"] == entry["requests"] for entry in report["compared"] if entry["demanded"]
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main() -> int:
    """Entry point of ``make gpu-engine``: 0 when patched texts are those of stock."""
    parser = argparse.ArgumentParser(description="the real engine on one GPU, stock against patched")
    parser.add_argument("pack", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--topk", choices=["sgl-kernel", "torch"], default="sgl-kernel", help="the DSA top-k to run")
    arguments = parser.parse_args()
    home = cache.root() / "gpu"
    home.mkdir(parents=True, exist_ok=True)
    caches = Path.home() / ".cache"
    before = set(compiled(caches)) if caches.is_dir() else set()
    results: dict[str, dict[str, Any]] = {}
    report: dict[str, Any] = {"script": "lab/rig/gpu/engine.py", "prompts": list(LENGTHS), "machine": machine()}
    report["topk"] = arguments.topk
    try:
        trees = unpack(arguments.pack, home)
        model = models.ensure(MODEL, cache.ensure)
        for name, flags in (("plain", ()), ("speculative", SPECULATION)):
            for kind, tree in trees.items():
                print(f"{kind} {name}", flush=True)
                more = (*flags, f"--dsa-topk-backend={arguments.topk}")
                results[f"{kind} {name}"] = run(tree, trees["stock"], model, more, arguments.new)
                write(report, results, arguments.out)
    except RigError as error:
        print(*error.tail, f"{error.kind}: {error}", sep="\n", file=sys.stderr)
        report["error"] = error.as_json()
    report["compiled"] = [name for name in compiled(caches) if name not in before] if caches.is_dir() else []
    write(report, results, arguments.out)
    for entry in report["compared"]:
        print(f"{entry['left']} / {entry['right']}: {entry['same_texts']} of {entry['requests']} texts are the same")
    return 0 if report["green"] else 1


if __name__ == "__main__":
    sys.exit(main())
