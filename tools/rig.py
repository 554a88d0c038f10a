#!/usr/bin/env python3
"""Run the whole deployment without a GPU: see --help and docs/rig.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.rig.cli import main

if __name__ == "__main__":
    main(prog_name="rig.py")
