"""What a path is: the identity that a pin fixes and a look at the tree finds."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

PLAIN = "100644"
EXECUTABLE = "100755"
MODES = frozenset({PLAIN, EXECUTABLE})

_ATTRIBUTES = re.compile(r"([0-7]{4}) (0|[1-9][0-9]{0,9}) (0|[1-9][0-9]{0,9})")
_PIN = re.compile(r"(100644|100755) ([0-9a-f]{64}) (0|[1-9][0-9]*)")


class Identity(NamedTuple):
    """Kind, mode, SHA-256 and size of a path. A tuple, for a look at a release makes thousands of them.

    Modes are git's two: what a pin fixes is whether the file is executable. The other permission bits
    differ between installers and umasks; they are kept exactly, never compared.
    The plain constructor does not validate; :meth:`parse` does.
    """

    kind: str
    mode: str = ""
    sha256: str = ""
    size: int = 0

    @classmethod
    def of(cls, data: bytes, mode: str = PLAIN) -> Identity:
        """The identity of a plain file that holds ``data``."""
        return cls("file", mode, hashlib.sha256(data).hexdigest(), len(data))

    @classmethod
    def parse(cls, text: str) -> Identity:
        """Read what :meth:`__str__` wrote.

        Raises:
            ValueError: the text is not the canonical form of a pin.
        """
        if text == "absent":
            return ABSENT
        match = _PIN.fullmatch(text)
        if match is None:
            raise ValueError(f"not a pin: {text!r}")
        return cls("file", match[1], match[2], int(match[3]))

    @property
    def is_file(self) -> bool:
        return self.kind == "file"

    def __str__(self) -> str:
        return f"{self.mode} {self.sha256} {self.size}" if self.is_file else self.kind

    def brief(self) -> str:
        """Short form for messages."""
        if self.is_file and not self.sha256:
            return f"larger than what may be there, {self.size} bytes, mode {self.mode}"
        return f"sha256 {self.sha256[:12]}…, {self.size} bytes, mode {self.mode}" if self.is_file else self.kind


ABSENT = Identity("absent")


class Attributes(NamedTuple):
    """What no pin fixes of a file, and what goes with it when it is removed: permission bits, owner and group."""

    bits: int
    owner: int
    group: int

    @classmethod
    def parse(cls, text: str) -> Attributes:
        """Read what :meth:`__str__` wrote.

        Raises:
            ValueError: the text is of another form.
        """
        match = _ATTRIBUTES.fullmatch(text)
        if match is None:
            raise ValueError(f"no permission bits, owner and group: {text!r}")
        return cls(int(match[1], 8), int(match[2]), int(match[3]))

    def __str__(self) -> str:
        return f"{self.bits:04o} {self.owner} {self.group}"


@dataclass(frozen=True)
class File:
    """A plain file held in memory."""

    data: bytes
    mode: str = PLAIN

    @cached_property
    def identity(self) -> Identity:
        # Once: a plan looks at every file at every level.
        return Identity.of(self.data, self.mode)


def identity_of(file: File | None) -> Identity:
    """The identity of a file that may be absent."""
    return ABSENT if file is None else file.identity
