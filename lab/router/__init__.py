"""The router built from its pinned source, stock and patched, and the harness that runs both on 127.0.0.1."""

import sys
from pathlib import Path

# ``python -m lab.router.…`` starts in the repository; the library that reads the bundle lies one folder down.
_TOOLS = str(Path(__file__).resolve().parents[2] / "tools")
if _TOOLS not in sys.path:
    sys.path.append(_TOOLS)
