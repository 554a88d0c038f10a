"""Runs inside an engine's environment, its patched tree first on the path: all that a wheel is asked.

python -m tests.rig.wheel_inside ROLE CASES OUT        the gates of config/ set
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from tests.rig import launch_inside, pools_inside


def main() -> None:
    role, cases, out = sys.argv[1:]
    found = {
        "version": importlib.import_module("sglang").__version__,
        "tree": str(Path(importlib.import_module("sglang.srt.mem_cache.memory_pool").__file__ or "").parents[3]),
        "pools": pools_inside.found(),
        "launches": launch_inside.found(role, json.loads(Path(cases).read_text(encoding="utf-8"))),
    }
    Path(out).write_text(json.dumps(found, default=int), encoding="utf-8")


if __name__ == "__main__":
    main()
