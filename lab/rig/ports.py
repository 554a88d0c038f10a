"""Free ports on 127.0.0.1."""

from __future__ import annotations

import errno
import socket

from lab.rig.errors import RigError

HOST = "127.0.0.1"


def free(count: int) -> list[int]:
    """Return ``count`` different ports that nothing listens on now.

    All of them are held while they are chosen, so that no two are the same. They are let go before the engine binds
    them; an engine that finds its port taken in between ends with its own error, which ends the run.
    """
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            sockets.append(held)
            held.bind((HOST, 0))
        return [held.getsockname()[1] for held in sockets]
    finally:
        for held in sockets:
            held.close()


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
