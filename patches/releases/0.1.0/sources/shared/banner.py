"""One line at the start of an engine that runs with any gate set: which bundle, which level, which gates."""

import json
import logging
from pathlib import Path

from sglang.srt.research import gates

logger = logging.getLogger(__name__)


def show() -> None:
    """Log the line, if a gate is on; else nothing. Called once, by the process that starts the others."""
    active = gates.active()
    if active:
        logger.info("patch bundle: %s; gates: %s", _receipt(), ", ".join(active))


def _receipt() -> str:
    """The bundle's digest and the level, as the receipt beside this file names them."""
    try:
        table = json.loads(Path(__file__).with_name("receipt.json").read_bytes())
        patches = table["patches"]
        return f"{table['bundle']}, level {table['level']} ({patches[-1]}) of {table['base']}"
    except (OSError, ValueError, LookupError, TypeError) as error:
        # The engine runs all the same: the gates are what was asked for.
        return f"no receipt to read ({type(error).__name__})"
