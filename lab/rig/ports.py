"""Free ports on 127.0.0.1."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

from lab.rig.errors import RigError

HOST = "127.0.0.1"


# An engine binds its port a minute after it was chosen. Below the range from which the kernel gives ports to outgoing
# connections none of those can have taken it by then, as one had once: the engine's own sockets are dozens.
_LOWEST = 20_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def _candidates() -> range:
    """Ports that the kernel hands to nobody."""
    try:
        first = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    return range(_LOWEST, max(first, _LOWEST + 1000))


def free(count: int) -> list[int]:
    """Return ``count`` different ports that nothing listens on now.

    All of them are held while they are chosen, so that no two are the same. They are let go before the engine binds
    them; an engine that finds its port taken in between ends with its own error, which ends the run.

    Raises:
        RigError: kind ``port``; there are not that many.
    """
    candidates = _candidates()
    sockets: list[socket.socket] = []
    chosen: list[int] = []
    try:
        for port in random.SystemRandom().sample(candidates, len(candidates)):
            if len(chosen) == count:
                break
            held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sockets.append(held)
            try:
                held.bind((HOST, port))
            except OSError:
                continue
            chosen.append(port)
    finally:
        for held in sockets:
            held.close()
    if len(chosen) < count:
        raise RigError("port", f"{HOST} has no {count} free ports from {candidates.start} to {candidates.stop - 1}")
    return chosen


def need_free(port: int) -> None:
    """Refuse a port that something else holds.

    Raises:
        RigError: kind ``port``.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise RigError(
                "port", f"port {port} on {HOST} is taken ({error.strerror}); name another or none"
            ) from error
