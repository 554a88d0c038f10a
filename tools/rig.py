#!/usr/bin/env python3
"""Run the whole deployment without a GPU: see --help and docs/rig.md."""

import importlib.util
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("click", "numpy")


def refused(version: tuple, missing: list) -> str:  # type: ignore[type-arg]
    """Why the rig cannot run in this Python; empty if it can. Before any import that an older one would not survive."""
    if version < (3, 11):
        return "the rig needs Python 3.11, this is " + ".".join(map(str, version))
    if missing:
        return sys.executable + " has no " + " and no ".join(missing) + "; `make rig-env` makes .venv, which has"
    return ""


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    why = refused(sys.version_info[:2], [name for name in NEEDED if importlib.util.find_spec(name) is None])
    if why:
        sys.stderr.write("python: " + why + "\n")
        if "--json" in sys.argv:
            error = {"error": "python", "message": why, "tail": []}
            told = {"schema": 1, "verb": sys.argv[1], "exit": 1, "result": {}, "error": error}
            sys.stdout.write(json.dumps(told) + "\n")
        sys.exit(1)

    from lab.rig.cli import main

    main(prog_name="rig.py")
