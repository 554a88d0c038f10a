"""The sweep: a run, and the recovery of a run, killed or failed at every call; the end is old or new, always.

A point is one run that is stopped at one call in one way, everything that follows (undoing, recoveries), and a look
at where it ends.
"""

from __future__ import annotations

import errno
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lab.faults.calls import LASTING, Count, Fail, Kill, answers, killed, visited
from lab.faults.scene import DIRECTIONS, Image, Scene
from patchbundle.errors import BundleError, Exit

KINDS = (
    "run killed",
    "run failed once",
    "run failed lastingly",
    "recovery killed",
    "recovery killed twice",
    "recovery failed once",
)


@dataclass(frozen=True)
class Point:
    """One way to be stopped. ``run`` does it all and returns the end: old or new."""

    kind: str
    place: str
    run: Callable[[], str]


@dataclass(frozen=True)
class Sweep:
    """The points of one scene.

    A recovery is taken from ``middles`` places in each direction (0: after every change of the run), spread evenly;
    after each that is killed, ``pairs`` second ones are killed, each at another change.
    """

    scene: Scene
    middles: int = 0
    pairs: int = 4
    every_read: bool = False

    def points(self) -> Iterator[Point]:
        for direction in DIRECTIONS:
            image = self.scene.images[direction]
            count = self._count(image, lambda way=direction: self.scene.change(way))  # type: ignore[misc]
            yield from self._kills(direction, count)
            yield from self._failures(direction, count)
            for place, middle in self._middles(direction, len(count.changes)):
                for back in (False, True):
                    yield from self._recoveries(f"{direction} {place}", direction, middle, back)

    def _count(self, image: Image, function: Callable[[], object]) -> Count:
        self.scene.lay(image)
        count = Count()
        with visited(count):
            function()
        return count

    # The run.

    def _kills(self, direction: str, count: Count) -> Iterator[Point]:
        for number, kind in enumerate(count.changes, 1):
            for half in (False, True)[: 2 if kind == "write" else 1]:
                for back in (False, True):

                    def run(number: int = number, half: bool = half, back: bool = back) -> str:
                        self.scene.lay(self.scene.images[direction])
                        killed(lambda: self.scene.change(direction), Kill(number, half=half))
                        return self.scene.end_of_recovery(direction, back)

                    place = f"{direction}, change {number} ({kind}{', half' if half else ''})"
                    yield Point("run killed", f"{place}{', then back' if back else ''}", run)

    def _failures(self, direction: str, count: Count) -> Iterator[Point]:
        for number in count.failing(self.every_read):
            kind = count.kinds[number - 1]
            ways = [(code, False) for code in answers(kind)]
            ways += [(code, True) for code in LASTING] if count.is_change[number - 1] else []
            for code, lasting in ways:

                def run(number: int = number, code: int = code, lasting: bool = lasting) -> str:
                    return self._failed(direction, Fail(number, code, lasting=lasting))

                place = f"{direction}, call {number} ({kind}): {errno.errorcode.get(code, 'half')}"
                yield Point(f"run failed {'lastingly' if lasting else 'once'}", place, run)

    def _failed(self, direction: str, fail: Fail) -> str:
        """A run that fails is undone at once, or says that recover must end it."""
        self.scene.lay(self.scene.images[direction])
        try:
            with visited(fail):
                self.scene.change(direction)
        except BundleError as error:
            if error.exit_code != Exit.RECOVERY_NEEDED:
                end = self.scene.end(direction)
                assert end == "old", f"refused with {error.code}, and the tree is {end}"
                return end
            return self.scene.end_of_recovery(direction)
        except OSError:
            # Before the first journal, as a verb reports it.
            end = self.scene.end(direction)
            assert end == "old", f"failed, and the tree is {end}"
            return end
        end = self.scene.end(direction)
        assert end == "new" or fail.left > 0, f"it says done, and the tree is {end}"
        return end

    # Its recovery.

    def _middles(self, direction: str, changes: int) -> Iterator[tuple[str, Image]]:
        wanted = min(self.middles or changes, changes)
        for part in range(wanted):
            number = 1 + part * (changes - 1) // max(wanted - 1, 1)
            self.scene.lay(self.scene.images[direction])
            killed(lambda: self.scene.change(direction), Kill(number))
            yield f"killed at change {number}", self.scene.seen()

    def _recoveries(self, place: str, direction: str, image: Image, back: bool) -> Iterator[Point]:
        try:
            count = self._count(image, lambda: self.scene.recover(back))
        except BundleError as error:
            assert back and error.exit_code == Exit.RECOVERY_NEEDED, str(error)
            return
        place += f", recover{' back' if back else ''}"
        for number in range(1, len(count.changes) + 1):

            def once(number: int = number) -> str:
                self.scene.lay(image)
                killed(lambda: self.scene.recover(back), Kill(number))
                return self.scene.end_of_recovery(direction)

            yield Point("recovery killed", f"{place}, change {number}", once)
            yield from self._killed_twice(place, direction, image, back, number)
        for number in count.failing(self.every_read):
            kind = count.kinds[number - 1]
            for code in answers(kind):

                def failed(number: int = number, code: int = code) -> str:
                    self.scene.lay(image)
                    try:
                        with visited(Fail(number, code)):
                            self.scene.recover(back)
                    except BundleError as error:
                        assert error.exit_code in (Exit.RECOVERY_NEEDED, Exit.BUSY), str(error)
                    return self.scene.end_of_recovery(direction)

                words = errno.errorcode.get(code, "half")
                yield Point("recovery failed once", f"{place}, call {number} ({kind}): {words}", failed)

    def _killed_twice(self, place: str, direction: str, image: Image, back: bool, first: int) -> Iterator[Point]:
        @functools.cache
        def second() -> Image:
            self.scene.lay(image)
            killed(lambda: self.scene.recover(back), Kill(first))
            return self.scene.seen()

        @functools.cache
        def changes(again: bool) -> int:
            try:
                return len(self._count(second(), lambda: self.scene.recover(again)).changes)
            except BundleError as error:
                assert again and error.exit_code == Exit.RECOVERY_NEEDED, str(error)
                return 0

        for pair in range(self.pairs):
            # A way back may be killed on its way back too; where that way is closed it goes on.
            again = bool((first + pair) % 2)

            def twice(again: bool = again, pair: int = pair) -> str:
                total = changes(again)
                self.scene.lay(second())
                if total:
                    number = 1 + (first * 7 + pair * 13) % total
                    killed(lambda: self.scene.recover(again), Kill(number))
                return self.scene.end_of_recovery(direction)

            words = f"{place}, change {first}, again{' back' if again else ''}, {pair}"
            yield Point("recovery killed twice", words, twice)


def swept(points: Iterator[Point], every: int = 1, seed: int = 0) -> Iterator[tuple[Point, str]]:
    """Each point with its end, or of ``every`` so many one at random.

    Raises:
        AssertionError: at the first that ends wrong, with its place.
    """
    chance = random.Random(seed)
    for point in points:
        if every == 1 or not chance.randrange(every):
            try:
                yield point, point.run()
            except Exception as error:
                raise AssertionError(f"{point.kind}: {point.place}: {error}") from error
