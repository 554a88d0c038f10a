"""Draw what ``benchmarks/acceptance.py`` kept: ``python -m benchmarks.acceptance_plot FILE.json`` writes FILE.svg."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks import picture
from lab.load.accounting import Sent, Window
from lab.load.page import plots
from lab.load.stream import Failure


def draw(result: Path, path: Path) -> None:
    """Write the plots of the run's page: what was outstanding, and how long the first token took."""
    found = json.loads(result.read_text(encoding="utf-8"))
    sent = [
        Sent(**{**one, "failure": Failure(one["failure"]) if one["failure"] else None, "gaps": ()})
        for one in found["sent"]
    ]
    picture.begin(result.stem)
    figure = plots(sent, Window(**found["window"]))
    figure.set_layout_engine("none")
    picture.write(figure, path)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[1]).with_suffix(".svg"))
