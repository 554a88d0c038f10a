"""What must not share a process with Triton's interpreter: that leaves the language patched behind it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def compiled(code: str, kernel: Path, cache: Path) -> list[str]:
    """The lines that ``code``, which compiles the kernels of a file, prints; Triton's results go to ``cache``."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", code, str(kernel)],
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.splitlines()
