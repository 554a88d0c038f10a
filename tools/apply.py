#!/usr/bin/env python3
"""Plan, apply, revert, status, recover: see --help and docs/reference.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from patchbundle.cli import main_apply

if __name__ == "__main__":
    main_apply()
