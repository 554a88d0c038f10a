"""The modules of this repository as they land in an engine, importable without one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]


def install(root: Path) -> Any:
    """Lay our files out below ``root`` as the bundle does and give the module that calls the kernel."""
    package = root / "sglang" / "srt" / "research"
    shutil.copytree(REPOSITORY / "sources" / "kernels", package / "kernels")
    for name in ("__init__.py", "gates.py"):
        shutil.copy(REPOSITORY / "sources" / "shared" / name, package / name)
    shutil.copy(REPOSITORY / "sources" / "decode" / "exact_topk.py", package / "exact_topk.py")
    for parent in (root / "sglang", root / "sglang" / "srt"):
        (parent / "__init__.py").touch()
    sys.path.insert(0, str(root))
    import sglang.srt.research.kernels.exact_topk as kernel  # type: ignore[import-not-found,unused-ignore]

    return kernel
