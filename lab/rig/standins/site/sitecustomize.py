"""Loaded by Python itself in every process that has this folder on PYTHONPATH: installs the stand-ins.

Python prints an ordinary exception of this module and goes on. An engine without its stand-ins must not go on,
so every error here ends the process.
"""

import os
import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[4])


def _start() -> None:
    if _ROOT not in sys.path:
        sys.path.append(_ROOT)
    from lab.rig.standins import start

    start.start()


try:
    _start()
except BaseException as error:
    sys.stderr.write(f"stand-ins: {type(error).__name__}: {error}\n")
    sys.stderr.flush()
    os._exit(70)
