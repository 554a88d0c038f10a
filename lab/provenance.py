"""What a result says of the run that made it: script, what it imports, their digests, machine, versions, seed, day."""

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
# Where what a measurement imports stands, and what of it cannot change a figure.
PARTS = ("benchmarks", "lab", "sources", "tests", "tools")
PRINTS = {Path(__file__).resolve(), ROOT / "benchmarks/report.py"}
# Named where they are installed.
PACKAGES = ("torch", "triton", "numpy", "simpy", "click", "sglang", "sglang-kernel")


def of(script: str, seed: int | None) -> dict[str, Any]:
    """The head of a result. ``script``: the caller's ``__file__``; ``seed``: None where nothing is drawn at random."""
    path = Path(script).resolve()
    return {
        "script": path.relative_to(ROOT).as_posix(),
        "script_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "modules": modules(path),
        "machine": machine(),
        "versions": versions(),
        "seed": seed,
        "date": datetime.date.today().isoformat(),
    }


def modules(script: Path) -> dict[str, str]:
    """Digests of the repository's modules that this process has loaded, but for the script and what prints a result."""
    found = {}
    for module in list(sys.modules.values()):
        path = Path(getattr(module, "__file__", None) or "/").resolve()
        if path.suffix != ".py" or path in {script, *PRINTS} or not path.is_relative_to(ROOT):
            continue
        name = path.relative_to(ROOT)
        if name.parts[0] in PARTS and path.stat().st_size:
            found[name.as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return dict(sorted(found.items()))


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
