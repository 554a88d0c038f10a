"""What single changes do, one at a time, where counts can say it: CPU, TCP loopback, scenarios of the rig.

Retraction, the layer split and the sources of KV are read from ``tools/rig.py compare``: counts and bytes, which a busy
machine does not change.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import tomllib

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.engines import Lost, digests  # noqa: E402
from benchmarks.report import Row, show  # noqa: E402
from lab import provenance  # noqa: E402

Answers = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class Brought:
    """What scenarios brought.

    Attributes:
        measures: by scenario and line.
        answers: by scenario and send.
        red: what does not hold, by scenario: none of its figures is one.
    """

    measures: dict[str, dict[str, float]]
    answers: dict[str, Answers]
    red: dict[str, str] = field(default_factory=dict)

    def measure(self, scenario: str, text: str) -> float:
        """The number of the scenario's line that begins so. Raises Lost if there is none, or the scenario is red."""
        self._green(scenario)
        for line, value in self.measures.get(scenario, {}).items():
            if line.startswith(text + " "):
                return value
        raise Lost(f"scenario {scenario} measured no {text}")

    def sum(self, scenario: str, send: str, key: str) -> int:
        """A count of all requests of a send. Raises Lost as ``measure``, and if a request of it failed."""
        self._green(scenario)
        found = self.answers.get(scenario, {}).get(send, ())
        if not found or any(one["error"] for one in found):
            raise Lost(f"scenario {scenario}: {send} brought {len(found)} answers, or an error")
        return sum(int(one[key]) for one in found)

    def _green(self, scenario: str) -> None:
        if scenario in self.red:
            raise Lost(self.red[scenario])


def brought(result: Mapping[str, Any]) -> Brought:
    """Read what ``compare`` has written."""
    made = Brought({}, {}, {})
    for boot in result["boots"]:
        made.answers.update(boot["answers"])
        for line in boot["lines"]:
            name, hold, measured = line["scenario"], line["hold"], line["measured"]
            if not line["holds"]:
                made.red.setdefault(name, f"{name}: {hold} does not hold, measured {measured} {line['note']}".rstrip())
            made.measures.setdefault(name, {})[hold] = measured
    return made


def compare(*scenarios: str) -> Brought:
    """Run scenarios of the rig. Raises Lost if there is no result."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, str(ROOT / "tools" / "rig.py"), "compare", *scenarios, "--out", str(out)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if not out.is_file():
            raise Lost(f"tools/rig.py compare {' '.join(scenarios)} ended with {done.returncode} and no result")
        return brought(json.loads(out.read_text(encoding="utf-8")))


def retraction(found: Brought) -> Iterator[Row]:
    """Steps and tokens that a retraction costs, stock and patched, of the same requests."""
    sides = (("stock", "mla-retract", "forced"), ("patched", "mla-retract-patched", "cured"))
    for name, scenario, send in sides:
        retracted = found.sum(scenario, send, "retractions")
        more = found.sum(scenario, send, "verify_steps") - found.sum(scenario, "calm", "verify_steps")
        if not retracted:
            raise Lost(f"{scenario}: nothing was retracted")
        yield Row(f"{name}: retractions", retracted, "retractions")
        yield Row(f"{name}: steps more than without retraction", more, "steps")
        yield Row(f"{name}: steps more a retraction", more / retracted, "steps")
        yield Row(f"{name}: accepted tokens thrown away", found.measure(scenario, f"lost({send})"), "tokens")
        same = found.measure(scenario, f"same_texts(calm, {send})")
        yield Row(f"{name}: texts that are those without retraction", same, "requests")


def layer_split(found: Brought) -> Iterator[Row]:
    """What a rank holds and sends with the cache whole and split by layers, in as many bytes."""
    for name in ("whole", "split"):
        yield Row(f"{name}: bytes of a rank's pool", found.measure("equal-memory", f"pool_bytes({name}-pool)"), "bytes")
        yield Row(
            f"{name}: tokens found again", found.measure("equal-memory", f"prefill_cached({name}-again)"), "tokens"
        )
        yield Row(f"{name}: tokens evicted", found.measure("equal-memory", f"prefill_evicted({name}-again)"), "tokens")
        yield Row(f"{name}: ranks that send", found.measure("equal-memory", f"sources({name})"), "ranks")
        yield Row(f"{name}: share of the busiest", found.measure("equal-memory", f"busiest({name})"), "×")
        yield Row(f"{name}: KV sent", found.measure("equal-memory", f"bytes({name})"), "bytes")
    yield Row("texts that are equal", found.measure("equal-memory", "same_texts(whole, split)"), "requests", "== 6")


def sources(found: Brought) -> Iterator[Row]:
    """Full copies, sent by rank 0 alone and by a rank for each room."""
    for name, send in (("rank 0", "first"), ("rotated", "rotated")):
        yield Row(f"{name}: ranks that send", found.measure("cp-sources", f"sources({send})"), "ranks")
        yield Row(f"{name}: share of the busiest", found.measure("cp-sources", f"busiest({send})"), "×")
        yield Row(f"{name}: KV sent", found.measure("cp-sources", f"bytes({send})"), "bytes")
    yield Row("texts that are equal", found.measure("cp-sources", "same_texts(first, rotated)"), "requests", "== 8")


@dataclass(frozen=True)
class Item:
    """One attribution: how its rows are made of what its scenarios brought."""

    rows: Callable[[Brought], Iterator[Row]]
    scenarios: tuple[str, ...]


ITEMS = {
    "retraction": Item(retraction, ("mla-retract", "mla-retract-patched")),
    "layer split": Item(layer_split, ("equal-memory",)),
    "sources": Item(sources, ("cp-sources",)),
}


def ran(scenarios: Sequence[str]) -> dict[str, str]:
    """Digests of what ran and counted in other processes."""
    files = [f"lab/rig/{name}.py" for name in ("runner", "measure", "observe", "levers")]
    files += [f"lab/rig/scenarios/{name}.toml" for name in scenarios]
    boots = sorted(
        {tomllib.loads((ROOT / "lab/rig/scenarios" / f"{name}.toml").read_text())["boot"] for name in scenarios}
    )
    return digests(*files, *(f"lab/rig/boots/{boot}.toml" for boot in boots))


@click.command()
@click.argument("items", type=click.Choice(sorted(ITEMS)), nargs=-1)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the result here as JSON.")
@click.option("--json", "as_json", is_flag=True)
def main(items: tuple[str, ...], out: Path | None, as_json: bool) -> None:
    """Measure ITEMS, all if none is named. Exit code 1: one could not be measured, or a text differs."""
    scenarios = [name for item in items or ITEMS for name in ITEMS[item].scenarios]
    rows: list[Row] = []
    troubles: list[str] = []
    try:
        found = compare(*scenarios)
    except Lost as error:
        raise click.ClickException(str(error)) from error
    for item in items or ITEMS:
        try:
            rows += [replace(row, name=f"{item}, {row.name}") for row in ITEMS[item].rows(found)]
        except Lost as error:
            # The others are kept.
            troubles.append(f"{item}: {error}")
    rows.append(Row("items that were not measured", len(troubles), "items", "<= 0"))
    head = {**provenance.of(__file__, None), "label": "CPU, TCP loopback", "troubles": troubles, "ran": ran(scenarios)}
    if out is not None:
        result = {**head, "rows": [asdict(row) | {"holds": row.holds} for row in rows]}
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for trouble in troubles:
        click.echo(trouble, err=True)
    show(rows, as_json, head)


if __name__ == "__main__":
    main()
