"""The header of a patch: why it exists, for whom, and when it goes away."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from datetime import date

from patchbundle.errors import BundleError, Reason

KEYS = ("Description", "Why", "Class", "Upstream", "Gate", "Risk", "Drop-When")
CLASSES = ("temporary", "environment-only", "incompatible-on-purpose")

_LINE = re.compile(r"([A-Z][A-Za-z-]*): (\S.*)")
# The name may be followed by a remark. A name with a lower-case tail is a slip, not a name and a remark.
_GATE = re.compile(r"((?:SGLANG_RESEARCH|SMG_PD)_[A-Z0-9_]+)(?:[,;]? .*)?")
_DATE = re.compile(r"\b(20[0-9]{2}-[0-9]{2}-[0-9]{2})\b")
# A second space would be an indent that means nothing; a line of spaces would be a paragraph that is none.
_MORE = re.compile(r" \S.*")
_LINK = re.compile(r"#[0-9]+|https://\S+")


@dataclass(frozen=True)
class Header:
    """The seven keys, each once, in the order of :data:`KEYS`."""

    description: str
    why: str
    patch_class: str
    upstream: str
    gate: str
    risk: str
    drop_when: str

    @property
    def gate_name(self) -> str | None:
        """The environment variable that switches the patch on; None if the patch has no gate."""
        match = _GATE.fullmatch(self.gate)
        return match[1] if match else None

    @classmethod
    def parse(cls, message: tuple[str, ...], where: str) -> Header:
        """Read the lines before a diff. A continuation line begins with one space; the last line is empty.

        Raises:
            BundleError: HEADER, naming the line or the key.
        """
        values: dict[str, str] = {}
        key = None
        if not message or message[-1] != "":
            raise _refuse(f"{where}:{len(message) + 1}", "an empty line between the header and the diff", "none")
        for line_no, raw in enumerate(message[:-1], 1):
            line = _text(raw, f"{where}:{line_no}")
            if _MORE.fullmatch(line) and key is not None:
                values[key] += " " + line.strip()
                continue
            match = _LINE.fullmatch(line)
            if match is None or match[1] not in KEYS:
                raise _refuse(f"{where}:{line_no}", f"one of {', '.join(KEYS)}", repr(line))
            key = match[1]
            if key in values:
                raise _refuse(f"{where}:{line_no}", f"{key} once", "a second one")
            values[key] = match[2].strip()
        if tuple(values) != KEYS:
            raise _refuse(where, f"the keys {', '.join(KEYS)}, in this order", ", ".join(values) or "none")
        header = cls(*values.values())
        header._check(where)
        return header

    def _check(self, where: str) -> None:
        kind = re.split(r"[,;]", self.patch_class)[0].strip()
        if kind not in CLASSES:
            raise _refuse(where, f"Class: one of {', '.join(CLASSES)}", self.patch_class)
        if kind == "temporary" and not _LINK.search(self.patch_class):
            raise _refuse(where, "Class: temporary, with the upstream link", self.patch_class)
        if not any(_is_date(match[1]) for match in _DATE.finditer(self.upstream)):
            raise _refuse(where, "Upstream: with the date of the look-up (YYYY-MM-DD)", self.upstream)
        if self.gate_name is None and not re.fullmatch(r"none; \S.*", self.gate):
            raise _refuse(where, "Gate: SGLANG_RESEARCH_*, SMG_PD_* or 'none; reason'", self.gate)


def _text(raw: str, where: str) -> str:
    """The line as people wrote it: UTF-8, without anything that a terminal would obey."""
    try:
        line = raw.encode("latin-1").decode("utf-8")
    except UnicodeDecodeError:
        raise _refuse(where, "UTF-8", repr(raw)) from None
    if any(unicodedata.category(char) in {"Cc", "Cf", "Zl", "Zp"} for char in line):
        raise _refuse(where, "no control character", repr(line))
    return line


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _refuse(where: str, expected: str, found: str) -> BundleError:
    return BundleError(Reason.HEADER, where, expected=expected, found=found)
