"""An output folder that is there whole, or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from patchbundle.errors import BundleError, Reason


@dataclass
class Making:
    """A folder to be filled. If it is not ``wanted`` in the end, it does not come to be."""

    path: Path
    wanted: bool = True


_STOPS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def _stopped_as_by_hand() -> Iterator[None]:
    """Who is told to stop clears up first, as after Ctrl-C. What was ignored, as by nohup, stays so."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in _STOPS:
            if signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def folder(place: Path) -> Iterator[Making]:
    """A folder beside ``place``; it gets that name when the block ends without an exception.

    Raises:
        BundleError: OUTPUT, if something stands at ``place`` already, or nothing above it.
    """
    place = place.absolute()
    if os.path.lexists(place):
        raise BundleError(Reason.OUTPUT, str(place), expected="nothing there yet", found="a file or folder")
    if not place.parent.is_dir():
        raise BundleError(Reason.OUTPUT, str(place), expected="a folder to make it in", found=f"no {place.parent}")
    with _stopped_as_by_hand():
        # Named before it is there: who is stopped right after it came to be must know what to remove.
        made = Making(place.parent / f".{place.name}.{secrets.token_hex(4)}.partial")
        try:
            made.path.mkdir(0o700)
            yield made
            if made.wanted:
                umask = os.umask(0)
                os.umask(umask)
                made.path.chmod(0o777 & ~umask)
                made.path.rename(place)
        finally:
            # Nothing is there any more if it went well.
            shutil.rmtree(made.path, ignore_errors=True)
