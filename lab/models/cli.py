"""``tools/model.py``: each command prints a table, or with ``--json`` its rows. Everything printed is a model."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from lab.models.boundary import Layout, Shape, entry, exit_, sent
from lab.models.capacity import Budget, Keeping, Kv, Model, Reserve, owned, tokens
from lab.models.sweep import Axes, Line, draw, run
from lab.models.transfer import Packing, Way, by_pair, by_source

MIB, GIB = 1 << 20, 1 << 30


def show(title: str, lines: Iterable[Line], as_json: bool) -> None:
    """Print equal-keyed lines as a table below a title that says that it is a model."""
    listed = [dict(line) for line in lines]
    if as_json:
        click.echo(json.dumps({"kind": "model", "title": title, "rows": listed}, indent=1))
        return

    def text(value: str | int | float) -> str:
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    heads = list(listed[0])
    cells = [heads, *([text(line[head]) for head in heads] for line in listed)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    click.echo(f"{title} (model)")
    for row in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


class Amount(click.FloatRange):
    """A number that is not below nothing, and finite: no bound refuses "nan", for it compares with none."""

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number", param, ctx)
        return number


as_json = click.option("--json", "as_json", is_flag=True, help="Rows instead of a table.")


class Refusing(click.Group):
    """A formula that refuses its input is a usage error, not a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (ValueError, OverflowError) as error:
            raise click.UsageError(str(error)) from error


@click.group(cls=Refusing, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """The arithmetic of the design space. Byte counts and a simulation; nothing here was measured."""


@main.command()
@click.option("--chunk", type=click.IntRange(1), default=16_384, show_default=True, help="Tokens.")
@click.option("--hidden", type=click.IntRange(1), default=6_144, show_default=True)
@click.option("--itemsize", type=click.IntRange(1), default=2, show_default=True, help="Bytes of a number.")
@click.option("--tp", type=click.IntRange(1), default=2, show_default=True, help="Attention-TP.")
@click.option("--cp", type=click.IntRange(1), default=4, show_default=True)
@click.option("--projected", type=click.IntRange(1), help="Numbers a row behind the projection of gather-fused.")
@as_json
def collectives(chunk: int, hidden: int, itemsize: int, tp: int, cp: int, projected: int | None, as_json: bool) -> None:
    """The byte ledger of one layer: what each rank sends, and receives, in each layout."""
    shape = Shape(chunk, hidden, itemsize, tp, cp)
    lines = []
    for layout in Layout:
        ends = {"entry": entry(layout, shape), "exit": exit_(layout, shape, projected)}
        for end, calls in ends.items():
            for call in calls:
                lines.append(
                    {
                        "layout": layout.value,
                        "end": end,
                        "call": call.name,
                        "ranks": call.ranks,
                        "MiB": call.sent / MIB,
                        "S": call.sent / shape.shard,
                    }
                )
        whole = sum(sent(calls) for calls in ends.values())
        lines.append(
            {
                "layout": layout.value,
                "end": "both",
                "call": "all",
                "ranks": shape.world,
                "MiB": whole / MIB,
                "S": whole / shape.shard,
            }
        )
    show(f"bytes a rank sends in a layer, S = {shape.shard / MIB:.2f} MiB", lines, as_json)


@main.command()
@click.option("--gib", type=Amount(), default=6.33, show_default=True, help="A rank's budget for KV.")
@click.option("--layers", type=click.IntRange(1), default=78, show_default=True)
@click.option("--indexed", type=click.IntRange(0), help="Layers with an index of their own. Default: all.")
@click.option("--pack", type=Amount(), default=0.0, show_default=True, help="GiB of pack buffer.")
@click.option("--draft", type=Amount(), default=0.0, show_default=True, help="GiB of a draft's own KV.")
@click.option("--workspace", type=Amount(), default=0.0, show_default=True, help="GiB of other buffers.")
@click.option(
    "--gathered", type=click.IntRange(0), default=81_920, show_default=True, help="Tokens of the longest request."
)
@as_json
def capacity(
    gib: float,
    layers: int,
    indexed: int | None,
    pack: float,
    draft: float,
    workspace: float,
    gathered: int,
    as_json: bool,
) -> None:
    """Distinct tokens that a group of ranks holds, by who keeps what."""
    lines = []
    for kv, keeping, ranks in itertools.product(Kv, Keeping, (1, 2, 4, 8)):
        model = Model(layers, kv, indexed)
        reserve = Reserve(draft=int(draft * GIB), pack=int(pack * GIB), workspace=int(workspace * GIB))
        budget = Budget(int(gib * GIB), reserve)
        held = tokens(model, keeping, ranks, budget, gathered=gathered)
        lines.append(
            {
                "kv": kv.name.lower(),
                "keeping": keeping.value,
                "ranks": ranks,
                "bytes a token": model.token,
                "tokens": held,
                "times a copy": held / (tokens(model, Keeping.FULL, ranks, budget) or math.inf),
            }
        )
    show(f"tokens of a group whose ranks have {gib} GiB each", lines, as_json)


@main.command()
@click.option("--tokens", "count", type=click.IntRange(1), default=81_920, show_default=True)
@click.option("--layers", type=click.IntRange(1), default=78, show_default=True)
@click.option("--sources", type=click.IntRange(1), default=4, show_default=True)
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True, help="Decode ranks (DCP).")
@click.option("--row", type=click.IntRange(1), default=Kv.FP8.value, show_default=True, help="Bytes a token and layer.")
@click.option("--buffer", type=click.IntRange(1), default=1 << 30, show_default=True, help="Pack buffer, bytes.")
@click.option("--grid", type=click.IntRange(1), default=65_535, show_default=True, help="Rows of one gather launch.")
@as_json
def transfer(
    count: int, layers: int, sources: int, ranks: int, row: int, buffer: int, grid: int, as_json: bool
) -> None:
    """Bytes and slices of one request, by which source sends what to which decode rank."""
    own = owned(layers, sources)
    lines = []
    for way in Way:
        loads = by_source(way, own, count, row)
        busiest = max(loads)
        share = own[0] if way is Way.LAYER_OWNER else layers
        packing = Packing(buffer, (row,) * share, grid)
        lines.append(
            {
                "way": way.value,
                "MiB": sum(loads) / MIB,
                "busiest MiB": busiest / MIB,
                "sources": sum(1 for load in loads if load),
                "busiest rank MiB": max(map(sum, zip(*by_pair(way, own, count, row, ranks), strict=True))) / MIB,
                "pairs": sum(bool(size) for sizes in by_pair(way, own, count, row, ranks) for size in sizes),
                "slices of the busiest": len(packing.slices(busiest // (row * share))),
            }
        )
    show(f"{count} tokens to one decode worker", lines, as_json)


class Numbers(click.ParamType[tuple[int | float, ...]]):
    """Numbers with commas between them."""

    name = "NUMBERS"

    def __init__(self, kind: type[int] | type[float]) -> None:
        self.kind = kind

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int | float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(self.kind(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value} is no list of numbers with commas between them", param, ctx)
        if not all(map(math.isfinite, numbers)):
            self.fail(f"{value} holds what is no finite number", param, ctx)
        return numbers


class Picture(click.Path):
    """A file that a picture can be written to: found out before the sweep, not after it."""

    name = "FILE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(str(value))
        if path.suffix not in (".svg", ".png"):
            self.fail(f"{path} ends neither in .svg nor in .png", param, ctx)
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            self.fail(f"{path} cannot be written", param, ctx)
        return path


@main.command()
@click.option("--gib", type=Amount(), default=6.33, show_default=True, help="Every rank's budget, the same for all.")
@click.option("--prefixes", type=Numbers(int), default=Axes.prefixes, help="Independent prefixes.")
@click.option("--cold", type=Numbers(float), default=Axes.cold, help="Shares of prefixes that nobody shares.")
@click.option("--burst", type=Numbers(int), default=Axes.burst, help="Requests at once.")
@click.option("--slow", type=Numbers(float), default=Axes.slow, help="Factors on every send.")
@click.option("--rate", type=Amount(), default=3.4, show_default=True, help="Requests per second.")
@click.option("--requests", type=click.IntRange(1), default=400, show_default=True)
@click.option("--seed", type=int, default=17, show_default=True)
@click.option("--plot", type=Picture(), help="Draw the sweep here (SVG or PNG).")
@as_json
def sweep(
    gib: float,
    prefixes: tuple[int, ...],
    cold: tuple[float, ...],
    burst: tuple[int, ...],
    slow: tuple[float, ...],
    rate: float,
    requests: int,
    seed: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Simulate the four designs at equal memory over prefixes, cold share, bursts and slow decode."""
    axes = Axes(prefixes, cold, burst, slow)
    jobs = axes.jobs(gib=gib, rate=rate, requests=requests, seed=seed)
    with run(jobs) as done:
        with click.progressbar(done, length=len(jobs), label="simulating", file=sys.stderr) as bar:
            lines = list(bar)
    if plot is not None:
        draw(lines).savefig(plot, metadata={"Date": None} if plot.suffix == ".svg" else None)
    show(f"{len(lines)} points, {requests} requests each, {gib} GiB a rank", lines, as_json)
