"""A second process that takes a part of some work, where there is a second processor for it.

Both take the next piece from one queue. What the second one does not answer for, this one does: nothing is left out
however the other ends, and every refusal and every error comes from here.
"""

from __future__ import annotations

import marshal
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, BinaryIO, NoReturn, TypeVar

_T = TypeVar("_T")
# More pieces there are not: so many numbers fit into a pipe however small the system makes it.
PIECES = 1000
_NUMBER = 4


def _same(item: Any) -> Any:
    return item


def may_help() -> bool:
    """Whether a copy of this process can run beside it. One with threads has locks that no copy could let go of."""
    return len(os.sched_getaffinity(0)) > 1 and threading.active_count() == 1


@contextmanager
def shared(
    count: int,
    work: Callable[[int], _T],
    *,
    alone: bool = False,
    packed: Callable[[_T], Any] = _same,
    unpacked: Callable[[Any], _T] = _same,
) -> Iterator[Callable[[], dict[int, _T]]]:
    """Begin to do ``work`` for each number below ``count``, at most ``PIECES``, in a second process.

    What comes out of this is to be called: it helps until all is done, and gives the results. ``packed`` makes of one
    what :mod:`marshal` writes, ``unpacked`` takes it back. With ``alone`` it is all done here, when it is asked for.
    """
    with _begun(count, work, packed, unpacked) if not alone and may_help() else _nothing() as helped:

        @cache
        def finish() -> dict[int, _T]:
            done = helped()
            done.update((number, work(number)) for number in range(count) if number not in done)
            return done

        yield finish


@contextmanager
def _nothing() -> Iterator[Callable[[], dict[int, Any]]]:
    yield dict


@contextmanager
def _begun(
    count: int, work: Callable[[int], _T], packed: Callable[[_T], Any], unpacked: Callable[[Any], _T]
) -> Iterator[Callable[[], dict[int, _T]]]:
    out, into = os.pipe()
    with _queue(count) as take, open(out, "rb") as stream:
        try:
            child = os.fork()
        except OSError:
            # No room for another process.
            os.close(into)
            yield dict
            return
        if child == 0:
            _answer(into, lambda: {number: packed(work(number)) for number in iter(take, None)})
        os.close(into)
        try:
            yield lambda: {number: work(number) for number in iter(take, None)} | _read(stream, unpacked)
        finally:
            # It may be at work still, where nobody wants to know any more.
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


@contextmanager
def _queue(count: int) -> Iterator[Callable[[], int | None]]:
    """The numbers below ``count``, each given once, to this process or to one forked from it; then None."""
    assert count <= PIECES
    out, into = os.pipe()
    try:
        try:
            os.write(into, b"".join(number.to_bytes(_NUMBER, "big") for number in range(count)))
        finally:
            os.close(into)
        yield lambda: int.from_bytes(part, "big") if (part := os.read(out, _NUMBER)) else None
    finally:
        os.close(out)


def _read(stream: BinaryIO, unpacked: Callable[[Any], _T]) -> dict[int, _T]:
    try:
        answer = marshal.loads(stream.read())
    except (EOFError, ValueError, TypeError):
        # It came to its end before it had said all.
        return {}
    return {number: unpacked(item) for number, item in answer.items()}


def _answer(into: int, said: Callable[[], dict[int, Any]]) -> NoReturn:
    """Answer in the second process, and end it: nothing that the first one has to end may run here too."""
    try:
        with open(into, "wb") as stream:
            marshal.dump(said(), stream)
    finally:
        os._exit(0)
