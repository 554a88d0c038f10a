"""Measure the attention -> MoE boundary: what its collectives, its norm and its layouts cost, each checked first.

One command starts all ranks on this machine: NCCL on GPUs, gloo on CPUs. The arms take turns within each round, the
slowest rank counts, and the layouts are compared in pairs of the same round. Bytes are counted by a ring of
point-to-point sends, beside the model's. NVLink multicast stays off.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException, start_processes

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.report import Row, show  # noqa: E402
from lab import provenance  # noqa: E402
from lab.boundary import Boundary, Mesh, Native, Ring, Sending, Toy, Weights, all_gather_single, norm  # noqa: E402
from lab.models.boundary import Layout, Shape, entry, exit_, sent  # noqa: E402

LAYOUTS = (Layout.ALL_REDUCE, Layout.INPUT_SP, Layout.PERSISTENT)
LAYERS = 2
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.1}
PATIENCE = timedelta(minutes=3)


@dataclass(frozen=True)
class Job:
    """All that a rank needs to know."""

    shape: Shape
    device: str
    dtype: str
    rounds: int
    calls: int
    piece: int
    seed: int
    check: bool
    fault: str | None
    store: str
    out: str


class ExitOverCp(Boundary):
    """The stock exit: it sums the partial sums of one CP group, half of them."""

    def leave(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: Weights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + self.transport.reduce_scatter(partial, self.mesh.cp)
        return norm(residual, weight.attention), residual


class NormBeforeSum(Boundary):
    """A sum crossed with a function that is not linear."""

    def enter(
        self, partial: torch.Tensor, residual: torch.Tensor, weight: Weights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().enter(norm(partial, weight.moe), residual, weight)


class WrongHalf(Boundary):
    """The residual's part is the neighbour's."""

    def _half(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.chunk(self.mesh.tp.size)[self.mesh.tp_rank - 1].clone()


FAULTS = {"exit-over-cp": ExitOverCp, "norm-before-sum": NormBeforeSum, "wrong-half": WrongHalf}


class Differs(Exception):
    """A layout's result is not the single process'."""


def gathered(value: Any) -> list[Any]:
    """Every rank's value, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check(mesh: Mesh, job: Job, device: torch.device) -> dict[str, Any]:
    """Each layout against one process, natively; and its bytes, counted by the ring. Small: 1/8 of the hidden size."""
    shape = Shape(job.shape.chunk, max(job.shape.hidden // 8, 8), job.shape.itemsize, job.shape.tp, job.shape.cp)
    toy = Toy.make(shape, LAYERS, job.seed, getattr(torch, job.dtype), device)
    rows = slice(mesh.cp_rank * shape.rows, (mesh.cp_rank + 1) * shape.rows)
    expected = [whole[rows] for whole in toy.single()]
    mesh.shape = shape
    kind = FAULTS.get(job.fault or "", Boundary)
    found: dict[str, Any] = {}
    first: list[torch.Tensor] = []
    for layout in LAYOUTS:
        made = toy.distributed(kind(layout, mesh, Native()))
        first = first or list(made)
        ring = Ring()
        Boundary(layout, mesh, ring).run(
            lambda layer, hidden: hidden,
            lambda layer, hidden: hidden,
            toy.weights,
            toy.hidden[rows],
            toy.residual[rows],
        )
        error = max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(made, expected, strict=True))
        scale = job.shape.hidden // shape.hidden
        found[layout.value] = {
            "error": max(gathered(error)),
            "bitwise_all_reduce": all(gathered(all(torch.equal(a, b) for a, b in zip(made, first, strict=True)))),
            "sent_bytes": [count * scale for count in gathered(ring.sent)],
            "model_bytes": LAYERS * (sent(entry(layout, job.shape)) + sent(exit_(layout, job.shape))),
        }
        if not found[layout.value]["error"] <= TOLERANCE[job.dtype]:
            raise Differs(
                f"{layout.value} differs from one process by {found[layout.value]['error']:.3g} of the largest value"
            )
    mesh.shape = job.shape
    return found


@dataclass(frozen=True)
class Arm:
    """One thing that is timed; ``payload``: bytes that a rank sends in it, None where it sends none."""

    name: str
    run: Callable[[], object]
    payload: int | None = None
    busiest: int | None = None


def arms(mesh: Mesh, job: Job, device: torch.device) -> list[Arm]:
    shape, native = job.shape, Native()
    dtype = getattr(torch, job.dtype)
    generator = torch.Generator(device).manual_seed(job.seed + dist.get_rank())

    def normal(rows: int) -> torch.Tensor:
        return torch.randn(rows, shape.hidden, generator=generator, device=device, dtype=dtype)

    shard, half, whole = normal(shape.rows), normal(shape.rows // shape.tp), normal(shape.chunk)
    residual, small = normal(shape.rows), normal(shape.rows // shape.tp)
    weights = [Weights(normal(1)[0], normal(1)[0]) for _ in range(LAYERS)]
    ledger = {call.name: call.sent for layout in LAYOUTS for call in (*entry(layout, shape), *exit_(layout, shape))}

    def both(together: bool) -> None:
        """The MoE's input and the residual, one after the other or at once."""
        full, rest = whole.new_empty(whole.shape), shard.new_empty(shard.shape)
        one = all_gather_single(full, half, group=mesh.world.handle, async_op=True)
        if not together:
            one.wait()
        two = all_gather_single(rest, small, group=mesh.tp.handle, async_op=True)
        if together:
            one.wait()
        two.wait()

    def boundary(layout: Layout) -> Callable[[], object]:
        """Fixed partial sums: what attention and MoE compute is left out of the time."""
        runner = Boundary(layout, mesh, native)
        # An all-reduce writes in place; a copy of its own for each layout would be timed in one arm alone.
        return lambda: runner.run(lambda _, __: shard, lambda _, __: whole, weights, residual, residual)

    listed = [
        Arm("TP all-reduce", lambda: native.all_reduce(shard, mesh.tp), ledger["TP all-reduce"]),
        Arm("TP reduce-scatter", lambda: native.reduce_scatter(shard, mesh.tp), ledger["TP reduce-scatter"]),
        Arm("CP all-gather", lambda: native.all_gather(residual, mesh.cp), ledger["CP all-gather"]),
        Arm("world all-gather", lambda: native.all_gather(half, mesh.world), ledger["world all-gather"]),
        Arm("world reduce-scatter", lambda: native.reduce_scatter(whole, mesh.world), ledger["world reduce-scatter"]),
        Arm("residual TP all-gather", lambda: native.all_gather(small, mesh.tp), ledger["residual TP all-gather"]),
        Arm("both gathers, one after the other", lambda: both(False)),
        Arm("both gathers, at once", lambda: both(True)),
        Arm("residual add and norm, S rows", lambda: norm(residual + shard, weights[0].moe)),
        Arm("residual add and norm, S / tp rows", lambda: norm(small + half, weights[0].moe)),
        Arm("clone of S / tp rows", small.clone),
    ]
    listed += [
        Arm(
            f"boundary of {LAYERS} layers: {layout.value}",
            boundary(layout),
            LAYERS * (sent(entry(layout, shape)) + sent(exit_(layout, shape))),
        )
        for layout in LAYOUTS
    ]
    if shape.world % 2 == 0:
        buffer = torch.zeros(job.piece, dtype=torch.uint8, device=device)
        for way in Sending.WAYS:
            sending = Sending(way, shape.world, 4 * shape.world, job.piece)
            listed.append(Arm(f"sends: {way}", functools.partial(sending.run, buffer), busiest=sending.busiest()))
    return listed


def timed(arm: Arm, calls: int, device: torch.device) -> float:
    """Microseconds of one call, the slowest rank's."""
    dist.barrier()
    if device.type == "cuda":
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        began.record()
        for _ in range(calls):
            arm.run()
        ended.record()
        torch.cuda.synchronize()
        mine = began.elapsed_time(ended) * 1e3 / calls
    else:
        start = time.perf_counter()
        for _ in range(calls):
            arm.run()
        mine = (time.perf_counter() - start) * 1e6 / calls
    slowest = torch.tensor([mine], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def interval(ratios: list[float], seed: int) -> tuple[float, float]:
    """The 95 % interval of the median by resampling."""
    chance = random.Random(seed)
    medians = sorted(statistics.median(chance.choices(ratios, k=len(ratios))) for _ in range(1000))
    return medians[25], medians[974]


def measure(listed: list[Arm], job: Job, device: torch.device) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = {arm.name: [] for arm in listed}
    for number in range(job.rounds + 1):
        # Every rank turns the list by the same places; the first round warms up and is not counted.
        at = number % len(listed)
        for arm in listed[at:] + listed[:at]:
            value = timed(arm, job.calls, device)
            if number:
                times[arm.name].append(value)
    rows: list[dict[str, Any]] = []
    for arm in listed:
        values = times[arm.name]
        median = statistics.median(values)
        row = asdict(Row(arm.name, median, "us")) | {"holds": None, "min_us": min(values), "max_us": max(values)}
        if arm.payload is not None:
            row |= {"sent_bytes": arm.payload, "gb_per_s": arm.payload / median / 1e3}
        if arm.busiest is not None:
            row |= {"busiest_bytes": arm.busiest}
        rows.append(row)
    prefix = f"boundary of {LAYERS} layers: "
    base = times[prefix + Layout.ALL_REDUCE.value]
    for layout in LAYOUTS[1:]:
        ratios = [other / one for one, other in zip(base, times[prefix + layout.value], strict=True)]
        low, high = interval(ratios, job.seed)
        name = f"{layout.value} / all-reduce, paired"
        rows.append(
            asdict(Row(name, statistics.median(ratios), "ratio"))
            | {"holds": None, "low": low, "high": high, "pairs": len(ratios)}
        )
    return rows


def work(rank: int, job: Job) -> None:
    """One rank from start to end."""
    device = torch.device("cuda", rank) if job.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{job.store}",
        rank=rank,
        world_size=job.shape.world,
        timeout=PATIENCE,
        device_id=device if device.type == "cuda" else None,
    )
    mesh = Mesh(job.shape)
    result: dict[str, Any] = {"checks": check(mesh, job, device)}
    if not job.check:
        result["rows"] = measure(arms(mesh, job, device), job, device)
    if rank == 0:
        Path(job.out).write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def where(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"{platform.machine()}, {os.cpu_count()} cores, gloo over loopback"


@click.command()
@click.option("--world", type=click.IntRange(1), help="Processes. Default: one a GPU, else 8.")
@click.option("--tp", type=click.IntRange(1), default=2, show_default=True, help="Attention-TP.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True)
@click.option("--dtype", type=click.Choice(sorted(TOLERANCE)), default="bfloat16", show_default=True)
@click.option("--chunk", type=click.IntRange(1), default=16_384, show_default=True, help="Tokens.")
@click.option("--hidden", type=click.IntRange(1), default=6_144, show_default=True)
@click.option("--rounds", type=click.IntRange(2), default=30, show_default=True)
@click.option("--calls", type=click.IntRange(1), default=5, show_default=True, help="Calls in one timing.")
@click.option("--piece", type=click.IntRange(1), default=48 << 20, show_default=True, help="Bytes of one send.")
@click.option("--seed", type=int, default=17, show_default=True)
@click.option("--check", is_flag=True, help="Only compare the layouts with one process.")
@click.option("--fault", type=click.Choice(sorted(FAULTS)), help="Plant a fault, to see the check find it.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the whole result here.")
@click.option("--json", "as_json", is_flag=True)
def main(world: int | None, tp: int, device: str, out: Path | None, as_json: bool, **chosen: Any) -> None:
    """Measure the boundary on the GPUs of this machine, or on its CPU."""
    cards = torch.cuda.device_count()
    device = ("cuda" if cards else "cpu") if device == "auto" else device
    world = world or (cards if device == "cuda" else 8)
    if device == "cuda" and world > cards:
        raise click.UsageError(f"--world {world}: this machine has {cards} GPUs; use --device cpu or fewer ranks")
    if world % tp:
        raise click.UsageError(
            f"--world {world}: {world} ranks have no attention-TP of {tp}; choose a divisor with --tp"
        )
    itemsize = getattr(torch, chosen["dtype"]).itemsize
    try:
        shape = Shape(chosen.pop("chunk"), chosen.pop("hidden"), itemsize, tp, world // tp)
        if world % 2 == 0:
            Sending(Sending.WAYS[0], world, 1, chosen["piece"])
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        job = Job(shape, device, store=f"{folder}/store", out=f"{folder}/out.json", **chosen)
        try:
            # A GPU is not shared with a parent that forked; without one, eight imports of torch are saved.
            method = "spawn" if device == "cuda" else "fork"
            start_processes(work, (job,), world, start_method=method)  # type: ignore[no-untyped-call]
        except ProcessRaisedException as error:
            # The last line of the rank's traceback says what differs.
            raise click.ClickException(str(error).strip().splitlines()[-1]) from error
        result = json.loads(Path(job.out).read_text())
    head = provenance.of(__file__, job.seed)
    result |= {
        **head,
        "device": where(device),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else None,  # type: ignore[no-untyped-call]
        "world": world,
        "shape": asdict(shape),
        "dtype": job.dtype,
        "rounds": job.rounds,
    }
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    rows = [Row(row["name"], row["value"], row["unit"]) for row in result.get("rows", [])]
    rows += [Row(f"check: {name}, error", found["error"], "of the largest") for name, found in result["checks"].items()]
    show(rows, as_json, head)


if __name__ == "__main__":
    main()
