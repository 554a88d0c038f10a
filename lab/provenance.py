"""What a result says of the run that made it: script and its digest, machine, versions, seed, day."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Named where they are installed.
PACKAGES = ("torch", "triton", "numpy", "simpy", "click", "sglang", "sglang-kernel")


def of(script: str, seed: int | None) -> dict[str, Any]:
    """The head of a result. ``script``: the caller's ``__file__``; ``seed``: None where nothing is drawn at random."""
    path = Path(script).resolve()
    return {
        "script": path.relative_to(ROOT).as_posix(),
        "script_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "machine": machine(),
        "versions": versions(),
        "seed": seed,
        "date": datetime.date.today().isoformat(),
    }


def machine() -> dict[str, Any]:
    """Processor, cores, and the GPUs that a torch in this process sees; nothing that names one machine among others."""
    found: dict[str, Any] = {"system": platform.system(), "architecture": platform.machine(), "cores": os.cpu_count()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        found["gpus"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return found


def versions() -> dict[str, str]:
    """Python, the packages that are installed, and CUDA as torch has it."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found
