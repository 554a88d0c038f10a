"""What bounded packing does to one transfer, one thing changed at a time: CPU, TCP loopback, the rig's engines.

A pack buffer of 64 rows, and sends that fit it, that are one row over, and that are four times as large, from pools in
order and torn, with the gate off and on. Each pair is one new prompt, whose only chunk is one send to each rank of D,
in the order B A A B, and ends with P's token. In the cell "P hot" P has the prompt in its cache, whose pages it sends
at once, and D has nothing. What is told is inside of P: see ``lab/rig/pack_times.py``. Before the pairs some requests
of each cell are decoded: what D makes of the rows must be the same text.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.engines import Engines, Lost, digests, up  # noqa: E402
from benchmarks.report import Row, show  # noqa: E402
from lab import provenance  # noqa: E402
from lab.load.accounting import baab, paired, quantile  # noqa: E402
from lab.rig.client import Request, prompts  # noqa: E402
from lab.rig.deployment import Event  # noqa: E402

BOOT = "pack-times"
RANKS = 2
# Rows that the buffer of the boot holds. A row of each rank of D is a token of RANKS.
FIT = 64
SIZES = {"within": RANKS * FIT, "one row over": RANKS * (FIT + 1), "4x": RANKS * FIT * 4}
# Bytes of a row in all layers: three of 576 numbers of four bytes.
ROW = 3 * 576 * 4
# P looks a prompt up in pages of so many tokens, and never finds the last one.
PAGE = 16
# Tokens of the requests that are decoded, and how many of them an arm has.
DECODED, CHECKED = 6, 2
SEED = 41


@dataclass(frozen=True)
class Transfer:
    """What P did for one request. Microseconds, counts and bytes; sums over its chunks and the ranks of D.

    whole: from the moment a chunk was queued to the end of its last send. wait: until the first of them began. rest:
    neither waiting, gathering nor sending: rows planned, descriptors made. cpu: of P's process in a send.
    """

    whole: int
    wait: int
    gather: int
    send: int
    rest: int
    cpu: int
    batches: int
    descriptors: int
    bytes: int
    buffers: int


def transfer(queued: Sequence[Event], sent: Sequence[Event], ranks: int = RANKS) -> Transfer:
    """One request's transfer from P's lines. Raises Lost where they are not of one request, or one is missing."""
    rooms = {event.values["room"] for event in (*queued, *sent)}
    if len(rooms) != 1 or not sent or len(sent) != ranks * len(queued):
        raise Lost(f"{len(queued)} chunks and {len(sent)} sends of {len(rooms)} rooms are no transfer to {ranks} ranks")
    whole = wait = 0
    for number, chunk in enumerate(queued):
        own = sent[ranks * number : ranks * (number + 1)]
        whole += own[-1].number("ended") - chunk.number("at")
        wait += own[0].number("began") - chunk.number("at")
    total = {name: sum(event.number(name) for event in sent) for name in ("gather", "send", "cpu", "batches", "bytes")}
    return Transfer(
        whole=whole,
        wait=wait,
        gather=total["gather"],
        send=total["send"],
        rest=whole - wait - total["gather"] - total["send"],
        cpu=total["cpu"],
        batches=total["batches"],
        descriptors=sum(event.number("blocks") for event in sent),
        bytes=total["bytes"],
        buffers=sent[0].number("buffers"),
    )


@dataclass
class Cell:
    """One comparison: the same requests by two arms in pairs."""

    name: str
    length: int
    arms: Mapping[str, tuple[str, str]]  # P and D of the arms A and B
    hot: bool = False
    got: dict[str, list[Transfer]] = field(default_factory=lambda: {"A": [], "B": []})
    different_texts: int = 0


def cells() -> list[Cell]:
    made = []
    for layout, end in (("in order", ""), ("torn", "-torn")):
        arms = {"A": (f"P-off{end}", f"D{end}"), "B": (f"P-on{end}", f"D{end}")}
        made += [Cell(f"{size}, {layout}", length, arms) for size, length in SIZES.items()]
    stock = {"A": ("P-stock", "D"), "B": ("P-off", "D")}
    made.append(Cell("one row over, stock and gate off", SIZES["one row over"], stock))
    made.append(Cell("4x, in order, P hot", SIZES["4x"] + PAGE, made[2].arms, hot=True))
    return made


class Asker(Protocol):
    """Sends prompts to pairs."""

    def text(self, prefill: str, decode: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """What a request brings that is decoded and not measured; it fills P's cache too."""

    def ask(self, prefill: str, decode: str, prompt: tuple[int, ...]) -> Transfer:
        """What P says of a request."""


@dataclass
class Lines:
    """The asker that reads P's lines. A line of an earlier request may come late: its room is known by then."""

    engines: Engines
    known: set[str] = field(default_factory=set)

    def text(self, prefill: str, decode: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
        answer = self.engines.ask(prefill, decode, Request(prompt, DECODED))
        self.known |= {event.values["room"] for event in self.engines.events(prefill, "sent", self.known, bool)}
        return answer.ids

    def ask(self, prefill: str, decode: str, prompt: tuple[int, ...]) -> Transfer:
        self.engines.ask(prefill, decode, Request(prompt, 1))
        # Whole when every row has been told of.
        sent = self.engines.events(prefill, "sent", self.known, lambda told: moved(told) >= len(prompt) * ROW)
        queued = self.engines.events(prefill, "queued", self.known, lambda told: RANKS * len(told) >= len(sent))
        self.known |= {event.values["room"] for event in sent}
        if moved(sent) != len(prompt) * ROW:
            raise Lost(f"{prefill} sent {moved(sent)} bytes of {len(prompt)} rows of {ROW}")
        return transfer(queued, sent)


def moved(sent: Sequence[Event]) -> int:
    """Bytes of all sends."""
    return sum(event.number("bytes") for event in sent)


def measure(cell: Cell, pairs: int, asker: Asker, say: Callable[[str], None]) -> None:
    """Fill the cell. Raises Lost where a request failed, or P did not tell of it."""
    # Of its own: what another cell has sent, P would find in its cache.
    made = prompts(zlib.crc32(f"{SEED} {cell.name}".encode()), CHECKED + pairs, cell.length)
    for prompt in made[:CHECKED]:
        a, b = (asker.text(*cell.arms[arm], prompt) for arm in "AB")
        cell.different_texts += a != b
    for arm in baab(pairs):
        number = 0 if cell.hot else CHECKED + len(cell.got[arm])
        cell.got[arm].append(asker.ask(*cell.arms[arm], made[number]))
    say(f"{cell.name}: {pairs} pairs")


def verdict(low: float, high: float) -> str:
    """What the interval of B - A says."""
    return "B takes longer" if low > 0 else "B is faster" if high < 0 else "no difference shown"


def rows(cell: Cell) -> Iterator[Row]:
    """The figures of one cell, by arm, and the paired difference."""
    for arm, got in cell.got.items():
        name = f"{cell.name}, {cell.arms[arm][0].removesuffix('-torn')}"
        whole = [one.whole / 1e3 for one in got]
        yield Row(f"{name}: n", len(got), "requests")
        yield Row(f"{name}: transfer p50", quantile(whole, 0.5), "ms")
        yield Row(f"{name}: transfer p99", quantile(whole, 0.99), "ms")
        for part in ("wait", "gather", "send", "rest"):
            yield Row(f"{name}: {part}", quantile([getattr(one, part) / 1e3 for one in got], 0.5), "ms")
        yield Row(f"{name}: CPU", quantile([one.cpu / 1e3 for one in got], 0.5), "ms")
        for part, unit in (("batches", "calls"), ("descriptors", "descriptors"), ("bytes", "bytes")):
            yield Row(f"{name}: {part}", quantile([getattr(one, part) for one in got], 0.5), unit)
        yield Row(f"{name}: pack buffers a source", max(one.buffers for one in got), "bytes")
    a, b = ([one.whole / 1e3 for one in cell.got[arm]] for arm in "AB")
    difference = paired(cell.name, a, b)
    yield Row(f"{cell.name}: B - A", difference.mean, "ms")
    yield Row(f"{cell.name}: B - A, low", difference.low, "ms")
    yield Row(f"{cell.name}: B - A, high", difference.high, "ms")
    yield Row(f"{cell.name}: different texts", cell.different_texts, "requests", "<= 0")


def table(measured: Sequence[Cell]) -> list[str]:
    """The cells as a table of text: one line an arm, and the verdict of each pair."""
    heads = ("cell", "P", "n", "p50", "p99", "wait", "gather", "send", "rest", "CPU", "batches", "descr.", "bytes")
    lines: list[tuple[str, ...]] = [heads]
    for cell in measured:
        for arm in "AB":
            got = {row.name.rpartition(": ")[2]: row.value for row in rows(cell) if _of(row.name, cell, arm)}
            times = (got[key] for key in ("transfer p50", "transfer p99", "wait", "gather", "send", "rest", "CPU"))
            counts = (f"{got[key]:,.0f}" for key in ("batches", "descriptors", "bytes"))
            name, engine = (cell.name if arm == "A" else ""), cell.arms[arm][0].removesuffix("-torn")
            lines.append((name, engine, f"{got['n']:.0f}", *(f"{value:.2f}" for value in times), *counts))
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    text = ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    for cell in measured:
        mean, low, high = (row.value for row in rows(cell) if ": B - A" in row.name)
        text.append(f"{cell.name}: {mean:+.2f} ms ({low:+.2f} to {high:+.2f}): {verdict(low, high)}")
    return text


def _of(name: str, cell: Cell, arm: str) -> bool:
    return name.startswith(f"{cell.name}, {cell.arms[arm][0].removesuffix('-torn')}: ")


@click.command()
@click.option("--pairs", type=click.IntRange(2), default=30, show_default=True, help="Pairs of requests a cell.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the result here as JSON.")
@click.option("--json", "as_json", is_flag=True)
def main(pairs: int, out: Path | None, as_json: bool) -> None:
    """Measure every cell on engines of the rig. Exit code 1: a text differs, or the engines were lost."""

    def say(text: str) -> None:
        click.echo(text, err=True)

    measured: list[Cell] = []
    trouble = ""
    try:
        with up(BOOT) as engines:
            lines = Lines(engines)
            for cell in cells():
                measure(cell, pairs, lines, say)
                measured.append(cell)
    except Lost as error:
        trouble = str(error)
        say(f"lost: {error}")
    found = [row for cell in measured for row in rows(cell)]
    found.append(Row("cells that were not measured", len(cells()) - len(measured), "cells", "<= 0"))
    head: dict[str, Any] = {**provenance.of(__file__, SEED), "label": "CPU, TCP loopback", "pairs": pairs}
    head["modules"] |= digests("lab/rig/pack_times.py")
    head["boot_sha256"] = digests(f"lab/rig/boots/{BOOT}.toml")
    if out is not None:
        # Microseconds of every transfer, so that a reader can take other figures of them.
        raw = {cell.name: {arm: [one.whole for one in got] for arm, got in cell.got.items()} for cell in measured}
        result = {**head, "trouble": trouble, "transfers": raw}
        result["rows"] = [asdict(row) | {"holds": row.holds} for row in found]
        out.write_text(json.dumps(result, separators=(",", ":")) + "\n", encoding="utf-8")
    for line in table(measured) if measured else ():
        say(line)
    show(found, as_json, head)


if __name__ == "__main__":
    main()
