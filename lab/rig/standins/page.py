"""The page of the docs that shows the table of stand-ins, and what comparing them with the kernels gave."""

from __future__ import annotations

import json
from pathlib import Path

from lab.rig.standins import table

__all__ = ["RESULT", "text"]

RESULT = "evidence/engine/standins.json"
_HEAD = """# Stand-ins of the rig

What does not run on a machine without a GPU, and what runs in its place; all else that an engine imports is its own.
See [the rig](rig.md). `make claims` writes this page from `lab/rig/standins/table.py` and, if it is there,
`evidence/engine/standins.json`: what `lab/rig/gpu/standins.py` found when it computed each on the CPU and with 0.5.17's
own kernel on a GPU, from equal inputs. A pair of numbers is the largest difference and the most that is allowed; its
measure stands in that file. Nothing of 0.5.19 was compared.

"""


def compared(root: Path) -> dict[str, str]:
    """By target, what the result says; nothing where there is none."""
    try:
        content = json.loads((root / RESULT).read_text(encoding="utf-8"))
        found = {entry["stand_in"]: f"not compared: {entry['reason']}" for entry in content["missing"]}
        for row in content["rows"]:
            value = "an error" if row["value"] is None else f"{row['value']:.3g}"
            words = f"{'agrees' if row['holds'] else '**differs**'}: {value}, {row['must'].removeprefix('<= ')}"
            for target in row["stand_ins"]:
                found[target] = f"{found[target]}; {words}" if target in found else words
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # What is wrong with a result is told where all results are read; here the page must not look measured.
        return {entry.target: f"{RESULT} cannot be read: {type(error).__name__}" for entry in table.TABLE}
    return found


def text(root: Path) -> str:
    """The whole page."""
    return _HEAD + table.markdown(compared(root))
