"""Engines of the rig for a measurement: started by ``tools/rig.py up``, asked beside the router, ended again."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.rig.client import Answer, Request, Route, send
from lab.rig.deployment import Deployment, Event
from lab.rig.keeper import SPEC
from lab.rig.member import Spec

RIG = Path(__file__).resolve().parents[1] / "tools" / "rig.py"
# Seconds that a line may take from an engine to its log.
LAG = 20.0
BOOTSTRAP = "--disaggregation-bootstrap-port="


class Lost(Exception):
    """The engines did not start, did not answer, or did not say what is measured."""


def verb(*words: str) -> dict[str, Any]:
    """What ``tools/rig.py`` brought. Raises Lost with what it said if it failed."""
    done = subprocess.run([sys.executable, str(RIG), *words, "--json"], capture_output=True, text=True, check=False)
    try:
        told = json.loads(done.stdout)
    except ValueError:
        told = {"error": {"message": done.stderr[-2000:]}}
    if done.returncode:
        raise Lost(f"tools/rig.py {' '.join(words)}: {json.dumps(told.get('error'))}")
    result: dict[str, Any] = told["result"]
    return result


@dataclass(frozen=True)
class Engines:
    """A boot that runs."""

    running: Deployment

    @property
    def specs(self) -> dict[str, Spec]:
        return {spec.name: spec for spec in self.running.specs}

    def route(self, prefill: str, decode: str) -> Route:
        """The way to a pair."""
        bootstrap = next(word for word in self.specs[prefill].argv if word.startswith(BOOTSTRAP))
        return Route(self.specs[decode].port, self.specs[prefill].port, int(bootstrap.removeprefix(BOOTSTRAP)))

    def ask(self, prefill: str, decode: str, request: Request, timeout: float = 120.0) -> Answer:
        """Send one request to a pair. Raises Lost if it fails: nothing of it could be measured."""
        self.running.mark()
        answer = send(self.route(prefill, decode), request, timeout)
        if answer.error:
            raise Lost(f"{prefill} to {decode}: {answer.error}")
        return answer

    def events(
        self, name: str, kind: str, known: Collection[str], whole: Callable[[Sequence[Event]], bool]
    ) -> list[Event]:
        """The engine's lines of one kind since the last request was sent, once they are whole; none of a known room."""
        until = time.monotonic() + LAG
        while True:
            lines = self.running.events(name)
            found = [line for line in lines if line.name == kind and line.values.get("room") not in known]
            if whole(found):
                return found
            if time.monotonic() > until:
                raise Lost(f"{name} told only {len(found)} lines of {kind!r} in {LAG:g} s")
            time.sleep(0.01)  # The log is a file that the keeper writes.


@contextmanager
def up(boot: str, *options: str) -> Iterator[Engines]:
    """Start the boot, and end it whatever happens. Raises Lost if it does not start."""
    run = verb("up", "--boot", boot, *options)
    try:
        folder = Path(run["logs"]).parent
        specs = [Spec.from_json(entry) for entry in json.loads((folder / SPEC).read_text(encoding="utf-8"))]
        yield Engines(Deployment(folder, specs, tied=False))
    finally:
        verb("down", run["run"])


def digests(*names: str) -> dict[str, str]:
    """Digests of files of the repository that run inside the engines and are not imported here."""
    root = RIG.parents[1]
    return {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in names}
