#!/usr/bin/env python3
"""Plan, apply, revert, status, recover: see --help and docs/reference.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

try:
    from patchbundle.cli import main_apply
except ModuleNotFoundError as error:
    # A fresh node: nothing was looked at, so this is a matter of how the command was called.
    need = Path(__file__).resolve().parents[1] / "requirements" / "node.txt"
    sys.stderr.write(f"error: {error}\n  next: {sys.executable} -m pip install --require-hashes -r {need}\n")
    sys.exit(2)

if __name__ == "__main__":
    main_apply()
