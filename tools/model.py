#!/usr/bin/env python3
"""The arithmetic of the design space as tables and plots. Never part of what a node gets."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.models.cli import main

if __name__ == "__main__":
    main()
