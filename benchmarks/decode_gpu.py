"""Retraction on a GPU: round trips byte for byte, stock beside patched, and the bandwidth of saving and restoring.

``PYTHONPATH=tools:. python -m benchmarks.decode_gpu --pack DIR`` lays out the few files of both trees that are needed,
3 MB. On the machine with the GPU, which needs Torch, Triton and numpy, ``python -m benchmarks.decode_gpu DIR [--json]``
runs it; any folder with a ``stock`` and a ``patched`` tree will do. Pools, allocators and requests are the engine's own
(see ``tests/engine/decode/pair.py``); GLM's row of 656 bytes is among them. A part that fails is a row that does not
hold, and the others go on.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import hashlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.report import Row, show
from lab import provenance
from tests.engine.decode.pair import PAGE, Pair
from tests.engine.decode.world import ALWAYS, SCHEDULING, World

REPOSITORY = Path(__file__).parents[1]
WIDTHS = (512, 64)
KINDS = ("mla", "dsa", "dsa fp8")
GATES = ("dcp", "settle", "draft")


def pack(folder: Path) -> None:
    """Write ``stock`` and ``patched``, the modules that are run, below ``folder``."""
    from patchbundle import fetch, manifest, work
    from patchbundle.target import Target

    bundle = manifest.load(REPOSITORY)
    base = next(base for base in bundle.bases.values() if base.role == "decode")
    for name in ("stock", "patched"):
        with tempfile.TemporaryDirectory() as place:
            root = Path(place)
            fetch.unpack(fetch.fetch(base, fetch.default_archive(base)), root)
            if name == "patched":
                target = Target(root, (base,), base.version, None, None, ())
                work.execute(bundle, target, *work.make_plan(bundle, target, "apply", None))
            lay_out(root, folder / name)


def lay_out(tree: Path, target: Path) -> None:
    """Copy the modules that are run from a whole tree: what else they import is stood in for where it is not there."""
    wanted = [one if one.startswith("sglang.") else f"sglang.srt.{one}" for one in (*ALWAYS, *SCHEDULING)]
    paths = [tree / f"{one.replace('.', '/')}.py" for one in wanted]
    paths += [tree / one.replace(".", "/") / "__init__.py" for one in wanted]
    paths += (tree / "sglang/srt/research").glob("*.py")
    for path in filter(Path.is_file, paths):
        copy = target / path.relative_to(tree)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def digest(tree: Path) -> str:
    """SHA-256 of what :func:`lay_out` takes of a tree: a change to any of it makes a result one of another series."""
    with tempfile.TemporaryDirectory() as place:
        thin = Path(place)
        lay_out(tree, thin)
        found = hashlib.sha256()
        for path in sorted(filter(Path.is_file, thin.rglob("*"))):
            of_file = hashlib.sha256(path.read_bytes()).hexdigest()
            found.update(f"{path.relative_to(thin).as_posix()}\0{of_file}\n".encode())
    return found.hexdigest()


def load(folder: Path, name: str, device: str) -> World:
    """One tree, whole or thin; where there is a GPU its pools wait for it, as they do in the engine."""
    thin = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    atexit.register(shutil.rmtree, thin)
    lay_out(folder / name, thin)
    world = World(thin, GATES if name == "patched" else ())
    with world.entered():
        memory = world.module("mem_cache.memory_pool")
        if device == "cuda":
            memory.current_platform = SimpleNamespace(synchronize=torch.cuda.synchronize, is_cuda_alike=lambda: False)
    return world


def admit(world: World, pair: Pair) -> None:
    """What the engine does at its start with the draft's pool."""
    if (world.root / "sglang/srt/research/retract_draft.py").is_file():
        world.module("research.retract_draft").admit(pair.scheduler, pair.draft)


def round_trips(name: str, world: World, device: str) -> list[dict[str, Any]]:
    """Retract and resume at other pages while others write everywhere, on every rank of each group."""
    found = []
    groups = (1, 2, 4, 8) if device == "cuda" else (1, 2)
    for kind in KINDS:
        # Stock never gets far above its rows: it meets two ranks, and a pool whose lowest slots are rows too.
        for ranks in groups if name == "patched" else (1, 2):
            for tokens in (1, ranks * PAGE - 1, 2 * ranks * PAGE + 7):
                low = name == "stock" and ranks > 1
                before, after = ([1, 2, 3], [2, 3, 1]) if low else ([2, 6, 1], [5, 3, 4])
                back: dict[str, list[bool]] = {"target": [], "draft": []}
                told = ""
                for rank in range(ranks):
                    with world.entered(), Pair(
                        world, kind, ranks=ranks, rank=rank, tokens=tokens, widths=WIDTHS, device=device,
                        pages=8 if not low else 8 * ranks,
                    ) as pair:  # fmt: skip
                        admit(world, pair)
                        try:
                            trip = pair.trip(before, after)
                        except (RuntimeError, IndexError) as error:
                            told = str(error).splitlines()[0][:200]
                            break
                        for pool, buffers in trip.items():
                            back[pool] += buffers
                restored = {pool: bool(buffers) and all(buffers) for pool, buffers in back.items()}
                found.append({"tree": name, "kind": kind, "ranks": ranks, "tokens": tokens, **restored, "error": told})
    return found


def high_slots(world: World, device: str) -> str:
    """Save a request under DCP2 that lies above the rows of a rank; returns what came of it."""
    with world.entered(), Pair(world, "mla", ranks=2, rank=0, tokens=200, widths=WIDTHS, device=device) as pair:
        admit(world, pair)
        try:
            back = pair.trip([8, 7], [6, 8])
        except (RuntimeError, IndexError) as error:
            text = str(error)
            return "device-side assert" if "device-side assert" in text else f"{type(error).__name__}: {text}"
        return "exact" if all(back["target"]) and all(back["draft"]) else "wrong rows"


def median(what: Callable[[], object], device: str, times: int = 3) -> float:
    """Seconds of the median call, after one that does not count; the device is idle before and after each."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    took = []
    for _ in range(times + 1):
        wait()
        began = time.perf_counter()
        what()
        wait()
        took.append(time.perf_counter() - began)
    return statistics.median(took[1:])


def bandwidth(world: World, tokens: int, layers: int, device: str) -> dict[str, Any]:
    """Time saving and restoring one request, and the steps that they consist of, on the same bytes."""
    pages = -(-tokens // PAGE)
    with world.entered(), Pair(
        world, "dsa fp8", tokens=tokens, layers=layers, pages=2 * pages, widths=WIDTHS, device=device
    ) as pair:  # fmt: skip
        admit(world, pair)
        slots = pair.take(list(range(1, 2 * pages, 2))[:pages])
        buffers = [*pair.target.kv_buffer, *pair.draft.kv_buffer]
        index = [*pair.target.index_k_with_scale_buffer, *pair.draft.index_k_with_scale_buffer]
        size = sum(tokens * one[0].nbytes for one in buffers) + sum(pages * one[0].nbytes for one in index)
        saved: list[Any] = []

        def save() -> None:
            pair.offload()
            saved[:] = [pair.request.kv_cache_cpu]

        def restore() -> None:
            pair.request.kv_cache_cpu = saved[0]
            pair.load()

        seconds = {"save": median(save, device), "restore": median(restore, device)}
        rows = buffers[0].view(torch.uint8)
        chunk = slots[:8192]
        gathered = rows[chunk]
        part = gathered.nbytes / size
        seconds["gather"] = median(lambda: rows[chunk], device) / part
        seconds["scatter"] = median(lambda: rows.index_put_((chunk,), gathered), device) / part
        whole = torch.empty(size, dtype=torch.uint8, device=device)
        plain = torch.empty(size, dtype=torch.uint8)
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=device == "cuda")
        plain.fill_(1)
        pinned.fill_(1)
        seconds["pinned to host"] = median(lambda: pinned.copy_(whole, non_blocking=True), device)
        seconds["pinned to device"] = median(lambda: whole.copy_(pinned, non_blocking=True), device)
        seconds["pageable to host"] = median(lambda: plain.copy_(whole), device)
        seconds["pageable to device"] = median(lambda: whole.copy_(plain), device)
        seconds["fresh pageable to host"] = median(lambda: torch.empty(size, dtype=torch.uint8).copy_(whole), device)
    return {
        "tokens": tokens,
        "layers": layers + 1,
        "bytes": size,
        "seconds": {name: round(value, 6) for name, value in seconds.items()},
        "gb_per_s": {name: round(size / value / 1e9, 3) for name, value in seconds.items()},
        "save_of_pinned": round(seconds["pinned to host"] / seconds["save"], 4),
        "restore_of_pinned": round(seconds["pinned to device"] / seconds["restore"], 4),
        "save_limits": limits(
            seconds["save"],
            {
                "the link, as a pinned copy has it": seconds["pinned to host"],
                "memory that is not pinned": seconds["pageable to host"] - seconds["pinned to host"],
                "first touch of fresh host memory": seconds["fresh pageable to host"] - seconds["pageable to host"],
                "gathering rows on the device": seconds["gather"],
            },
        ),
        "restore_limits": limits(
            seconds["restore"],
            {
                "the link, as a pinned copy has it": seconds["pinned to device"],
                "memory that is not pinned": seconds["pageable to device"] - seconds["pinned to device"],
                "scattering rows on the device": seconds["scatter"],
            },
        ),
    }


def limits(total: float, parts: dict[str, float]) -> dict[str, float]:
    """Each part's time, measured by itself, over the whole's, the largest first; parts may overlap in the whole."""
    shares = {name: round(max(value, 0.0) / total, 3) for name, value in parts.items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def verdicts(trips: list[dict[str, Any]], high: dict[str, str], device: str) -> list[Row]:
    """What must come out, each with whether it did."""
    fails = "device-side assert" if device == "cuda" else "IndexError"

    def yes(name: str, of: list[dict[str, Any]], held: Callable[[dict[str, Any]], bool]) -> Row:
        """Trips of which it does not hold; none at all is no success."""
        return Row(name, sum(not held(one) for one in of) if of else -1, f"trips of {len(of)} not so", "== 0")

    ours = [trip for trip in trips if trip["tree"] == "patched"]
    alone = [trip for trip in trips if trip["tree"] == "stock" and trip["ranks"] == 1]
    more = [trip for trip in trips if trip["tree"] == "stock" and trip["ranks"] > 1]
    return [
        yes("patched: target and draft came back", ours, lambda trip: trip["target"] and trip["draft"]),
        yes(
            "patched, rows of 656 bytes", [one for one in ours if one["kind"] == "dsa fp8"], lambda trip: trip["target"]
        ),
        yes(
            "stock, one rank: the target came back, the draft did not", alone, lambda t: t["target"] and not t["draft"]
        ),
        yes("stock, more ranks: the draft did not", more, lambda trip: not trip["draft"]),
        Row(f"stock, slots above its rows: {fails}", float(high.get("stock", "").startswith(fails)), "yes = 1", "== 1"),
        Row("patched, the same slots: exact", float(high.get("patched") == "exact"), "yes = 1", "== 1"),
    ]


def figures(found: dict[str, Any]) -> list[Row]:
    """One length's bandwidths, and what its time consists of."""
    head = f"{found['tokens']} tokens, {found['layers']} layers"
    rows = [Row(f"{head}: {name}", value, "GB/s") for name, value in found["gb_per_s"].items()]
    for what in ("save", "restore"):
        rows.append(Row(f"{head}: {what} / a pinned copy of as many bytes", found[f"{what}_of_pinned"], "of its rate"))
        rows += [
            Row(f"{head}: {what}, {part}", share, "of its time") for part, share in found[f"{what}_limits"].items()
        ]
    return rows


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="See the head of this file.")
    parser.add_argument("trees", type=Path, help="the folder of the trees")
    parser.add_argument("--pack", action="store_true", help="only lay the trees out")
    parser.add_argument("--device", default="cuda", help="cpu checks everything but the figures")
    parser.add_argument("--tokens", default="8192,65536", help="lengths whose bandwidth is measured")
    parser.add_argument("--layers", default=78, type=int, help="layers of the target; the draft has one")
    parser.add_argument("--high-slots", help="only this step, for one tree: an assert ends the process's use of a GPU")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    return parser.parse_args()


def add(found: list[dict[str, Any]], run: Callable[..., list[dict[str, Any]]], *given: Any) -> None:
    found.extend(run(*given))


def asserted(given: argparse.Namespace, name: str) -> str:
    """What came of the slots above a rank's rows, in a process of its own."""
    argv = [sys.executable, "-m", "benchmarks.decode_gpu", str(given.trees), f"--device={given.device}"]
    argv.append(f"--high-slots={name}")
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=120)
    lines = [line for line in done.stdout.splitlines() if line.startswith("outcome: ")]
    # The message of an assert stands in what the card's runtime printed, not always in Python's.
    said = "device-side assert" if "device-side assert" in done.stderr else done.stderr[-300:]
    return lines[-1].removeprefix("outcome: ") if lines else said


def measured(given: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """All parts; one that fails is a row that does not hold."""
    trips: list[dict[str, Any]] = []
    high: dict[str, str] = {}
    rates: list[dict[str, Any]] = []
    failed: list[Row] = []

    def part(name: str, run: Callable[[], object]) -> None:
        try:
            run()
        except (RuntimeError, OSError, AssertionError, LookupError, TypeError, AttributeError, ValueError) as error:
            failed.append(Row(f"{name}: {type(error).__name__}: {str(error)[:300]}", 1, "failed", "== 0"))
        except subprocess.TimeoutExpired:
            failed.append(Row(f"{name}: not done in time", 1, "failed", "== 0"))

    # Stock comes last: what its rows do to the card's context would fail everything behind it.
    for name in ("patched", "stock"):
        part(f"high slots, {name}", functools.partial(lambda tree: high.update({tree: asserted(given, tree)}), name))
        world = load(given.trees, name, given.device)
        part(f"round trips, {name}", functools.partial(add, trips, round_trips, name, world, given.device))
        for count in map(int, given.tokens.split(",")) if name == "patched" else ():
            one = functools.partial(bandwidth, world, count, given.layers, given.device)
            part(f"{count} tokens", functools.partial(add, rates, lambda run=one: [run()]))
    rows = [*failed, *verdicts(trips, high, given.device), *(row for rate in rates for row in figures(rate))]
    trees = {name: digest(given.trees / name) for name in ("stock", "patched")}
    return rows, {"trees": trees, "round_trips": trips, "high_slots": high, "bandwidth": rates}


def main() -> None:
    """Pack, or measure and judge."""
    given = arguments()
    if given.pack:
        pack(given.trees)
        return
    if given.device == "cpu":
        torch.cuda.synchronize = lambda *args: None  # a DSA pool waits for the GPU by its full name
    if given.high_slots is not None:
        print(f"outcome: {high_slots(load(given.trees, given.high_slots, given.device), given.device)}")
        return
    rows, whole = measured(given)
    show(rows, given.json, {**provenance.of(__file__, 0), "device": given.device, **whole})


if __name__ == "__main__":
    main()
