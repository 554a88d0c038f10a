"""Measure on one GPU what the prefill patches launch there: the gather kernel, its first use, slices, halves of a norm.

The kernel's file is loaded alone from a prefill tree, since that release needs another Torch than most GPU machines
have. What is timed is checked first: the gather against index_select, byte for byte. Without a GPU the checks run in
Triton's interpreter and nothing is timed. A part that fails is a row that does not hold, and the others go on.

    python -m benchmarks.prefill_gpu TREE [--json]        TREE is the folder above sglang/
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.report import Row, show  # noqa: E402
from lab import provenance  # noqa: E402

KERNEL = "sglang/kernels/ops/kvcache/pd_dcp_gather.py"
LAYERS = 79
ITEM_BYTES = (656, 1152)
ROW_COUNTS = (1, 2, 15, 16, 17, 256, 4096, 8191, 8192, 16384)
PRELOADED = (1, 16, 17)  # as sources/prefill/gather_preload.py has them
HIDDEN = 6144
NORM_ROWS = (8, 1024, 4096)
REPEATS = 15
NORM_SEED = 3  # the gather's rows are drawn from their own width


@dataclass(frozen=True)
class Place:
    """Where and how large: everything on a GPU; in the interpreter a few rows of a few layers."""

    device: str
    layers: int
    pool_rows: int
    row_counts: tuple[int, ...]
    hidden: int

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"


GPU = Place("cuda", LAYERS, 65536, ROW_COUNTS, HIDDEN)
CPU = Place("cpu", 2, 64, (1, 2, 16, 17), 64)


def load(tree: Path) -> Any:
    """Load the gather's file alone.

    Raises:
        FileNotFoundError: ``tree`` holds no such file.
    """
    spec = importlib.util.spec_from_file_location("pd_dcp_gather", tree / KERNEL)
    if spec is None or spec.loader is None or not (tree / KERNEL).is_file():
        raise FileNotFoundError(tree / KERNEL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def microseconds(call: Callable[[], object]) -> float:
    """Median time of one call on the GPU, after one that is not counted."""
    call()
    found: list[float] = []
    event: Any = functools.partial(torch.cuda.Event, enable_timing=True)
    for _ in range(REPEATS):
        begin, end = event(), event()
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(found)


class Pools:
    """One layer's rows each, filled with random bytes, and a buffer for what is gathered from them."""

    def __init__(self, module: Any, place: Place, item: int, most_rows: int) -> None:
        self.module, self.place, self.item = module, place, item
        random = torch.Generator(place.device).manual_seed(item)
        shape = (place.layers, place.pool_rows, item)
        self.rows = torch.randint(0, 256, shape, dtype=torch.uint8, device=place.device, generator=random)
        self.pointers = [layer.data_ptr() for layer in self.rows]
        self.pack = torch.zeros(most_rows * place.layers * item, dtype=torch.uint8, device=place.device)
        self.order = torch.randperm(place.pool_rows, device=place.device, generator=random)

    def gather(self, first: int, count: int, at: int = 0) -> None:
        """Gather ``count`` rows, from the ``first`` one of a random order on, to byte ``at`` of the buffer."""
        size = count * self.place.layers * self.item
        indices = self.order[first : first + count].clone()
        lens = [self.item] * self.place.layers
        self.module.copy_mla_rows_into_pack(self.pointers, indices, self.pack.narrow(0, at, size), lens)

    def right(self, count: int) -> bool:
        """Whether the buffer holds what index_select gives for the first ``count`` rows of the order."""
        wanted = self.rows.index_select(1, self.order[:count])
        return bool(torch.equal(self.pack[: wanted.numel()].view_as(wanted), wanted))


def gathers(module: Any, place: Place) -> list[Row]:
    """Check and time the gather, beside a plain copy of as many bytes."""
    rows = []
    for item in ITEM_BYTES if place.gpu else (24,):
        pools = Pools(module, place, item, max(place.row_counts))
        for count in place.row_counts:
            pools.pack.zero_()
            pools.gather(0, count)
            name = f"gather {count} rows x {place.layers} layers x {item} B"
            rows.append(Row(f"{name}: equal to index_select", float(pools.right(count)), "yes = 1", "== 1"))
            if not place.gpu:
                continue
            size = count * place.layers * item
            flat, target = pools.rows.view(-1)[:size], pools.pack[:size]
            took = microseconds(functools.partial(pools.gather, 0, count))
            plain = microseconds(functools.partial(target.copy_, flat))
            rows.append(Row(f"{name}: time", took, "us"))
            rows.append(Row(f"{name}: read and written", 2 * size / took / 1e3, "GB/s"))
            rows.append(Row(f"copy of {size} B: time", plain, "us"))
            rows.append(Row(f"{name}: time of a copy / time", plain / took, ""))
        del pools
    return rows


def slices(module: Any, place: Place, total: int = 40960, step: int = 16384) -> list[Row]:
    """Time one gather of ``total`` rows against slices of ``step`` with a wait after each, as bounded packing does."""
    if not place.gpu:
        return []
    pools = Pools(module, place, 656, total)
    edges = [(low, min(low + step, total)) for low in range(0, total, step)]

    def sliced() -> None:
        for low, high in edges:
            pools.gather(low, high - low)
            torch.cuda.synchronize()

    one, many = microseconds(lambda: pools.gather(0, total)), microseconds(sliced)
    return [
        Row(f"{total} rows in one gather", one, "us"),
        Row(f"{total} rows in {len(edges)} slices, a wait after each", many, "us"),
        Row("slices / one gather", many / one, ""),
    ]


def variants(module: Any) -> int:
    """How many variants of the kernel are compiled and loaded in this process."""
    caches = module._copy_mla_rows_into_pack_kernel.device_caches
    return sum(len(entry[0]) for entry in caches.values())


def compiles(module: Any, place: Place) -> list[Row]:
    """Count the variants that row counts after a preload still compile."""
    if not place.gpu:
        return []
    pools = Pools(module, Place("cuda", 2, place.pool_rows, (), 0), 656, max(place.row_counts))
    for count in PRELOADED:
        pools.gather(0, count)
    before = variants(module)
    for count in place.row_counts:
        pools.gather(0, count)
    torch.cuda.synchronize()
    later = f"variants compiled after it, rows {', '.join(map(str, place.row_counts))}"
    return [
        Row("variants after the preload", before, "", "== 3"),
        Row(later, variants(module) - before, "", "== 0"),
    ]


def first_use(tree: Path, preloaded: bool) -> float:
    """Milliseconds until the first gather of 8,192 rows has ended, in a process that has done nothing else there."""
    module = load(tree)
    pools = Pools(module, Place("cuda", LAYERS, 16384, (), 0), 656, 8192)
    for count in PRELOADED if preloaded else ():
        pools.gather(0, count)
    torch.cuda.synchronize()
    start = time.perf_counter()
    pools.gather(0, 8192)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def first_uses(tree: Path, place: Place) -> list[Row]:
    """Time the first use: nothing compiled yet, compiled on the disk, and preloaded; a new process each."""
    if not place.gpu:
        return []
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, word in (("nothing compiled", "0"), ("compiled on the disk", "0"), ("preloaded", "1")):
            command = [sys.executable, "-m", "benchmarks.prefill_gpu", str(tree), "--first-use", word]
            environment = {**os.environ, "TRITON_CACHE_DIR": folder}
            run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
            if run.returncode != 0:
                raise RuntimeError(f"{name}: {run.stderr[-500:]}")
            rows.append(Row(f"first gather of 8192 rows, {name}", float(run.stdout), "ms"))
    return rows


def norm(hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add and norm in place where the engine's fused kernel is installed, else with Torch's own norm."""
    try:
        fused_add_rmsnorm = importlib.import_module("sgl_kernel").fused_add_rmsnorm
    except ImportError:
        residual += hidden
        return torch.nn.functional.rms_norm(residual, (residual.shape[-1],), weight, 1e-5), residual
    fused_add_rmsnorm(hidden, residual, weight, 1e-5)
    return hidden, residual


def which_norm() -> str:
    return "sgl_kernel's fused norm" if importlib.util.find_spec("sgl_kernel") else "Torch's norm (sgl_kernel missing)"


def norms(place: Place) -> list[Row]:
    """Compare a norm on half of the rows with the same rows of a norm on all, bit by bit; time both, and the copy."""
    rows = []
    random = torch.Generator(place.device).manual_seed(NORM_SEED)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=place.device, generator=random).bfloat16()

    for count in NORM_ROWS if place.gpu else (8,):
        hidden, residual, weight = draw(count, place.hidden), draw(count, place.hidden), draw(place.hidden)
        whole = norm(hidden.clone(), residual.clone(), weight)
        same = True
        for lane in range(2):
            # A half of a longer tensor, as the residual is before its copy.
            half = norm(hidden.chunk(2)[lane].clone(), residual.clone().chunk(2)[lane], weight)
            same &= all(torch.equal(mine, all_.chunk(2)[lane]) for mine, all_ in zip(half, whole, strict=True))
        name = f"{which_norm()}, {count} rows x {place.hidden}"
        rows.append(Row(f"{name}: each half equal bit by bit", float(same), "yes = 1", "== 1"))
        if place.gpu:
            part = hidden.chunk(2)[0].clone(), residual.chunk(2)[0].clone()
            full = microseconds(functools.partial(norm, hidden, residual, weight))
            half_time = microseconds(functools.partial(norm, part[0], part[1], weight))
            copy = microseconds(residual.chunk(2)[0].clone)
            rows.append(Row(f"{name}: all rows", full, "us"))
            rows.append(Row(f"{name}: half of the rows", half_time, "us"))
            rows.append(Row(f"copy of half of the residual, {count} rows x {place.hidden}", copy, "us"))
    return rows


@click.command()
@click.argument("tree", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
@click.option("--first-use", type=click.Choice(["0", "1"]), hidden=True)
def main(tree: Path, as_json: bool, first_use: str | None) -> None:
    """Check and measure; TREE is the folder above sglang/ of a prefill tree."""
    if first_use is not None:
        click.echo(globals()["first_use"](tree, first_use == "1"))
        return
    place = GPU if torch.cuda.is_available() else CPU
    if not place.gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    module = load(tree)
    rows: list[Row] = []
    parts: dict[str, Callable[[], list[Row]]] = {
        "variants": lambda: compiles(module, place),
        "gathers": lambda: gathers(module, place),
        "slices": lambda: slices(module, place),
        "first uses": lambda: first_uses(tree, place),
        "norms": lambda: norms(place),
    }
    for name, part in parts.items():
        try:
            rows += part()
        except (RuntimeError, AttributeError, LookupError, TypeError, ValueError) as error:
            rows.append(Row(f"{name}: {type(error).__name__}: {str(error)[-500:]}", 1, "failed", "== 0"))
    if place.gpu:
        machine = f"{torch.cuda.get_device_name()}, Torch {torch.__version__}"
        click.echo(f"{machine}; the kernel's file alone, not the engine", err=True)
    else:
        click.echo("no GPU: checks in Triton's interpreter, nothing is timed", err=True)
    kernel = hashlib.sha256((tree / KERNEL).read_bytes()).hexdigest()
    show(rows, as_json, {**provenance.of(__file__, NORM_SEED), "kernel": KERNEL, "kernel_sha256": kernel})


if __name__ == "__main__":
    main()
