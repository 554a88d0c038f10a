"""The header of a patch: why it exists, for whom, and when it goes away."""

from __future__ import annotations

import re
from dataclasses import dataclass

from patchbundle.errors import BundleError, Reason

KEYS = ("Description", "Why", "Class", "Upstream", "Gate", "Risk", "Drop-When")
CLASSES = ("temporary", "environment-only", "incompatible-on-purpose")

_LINE = re.compile(r"([A-Z][A-Za-z-]*): (\S.*)")
_GATE = re.compile(r"(?:SGLANG_RESEARCH|SMG_PD)_[A-Z0-9_]+")
_DATE = re.compile(r"\b20[0-9]{2}-[0-9]{2}-[0-9]{2}\b")
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
        match = _GATE.match(self.gate)
        return match[0] if match else None

    @classmethod
    def parse(cls, message: tuple[str, ...], where: str) -> Header:
        """Read the lines before a diff. A continuation line begins with one space.

        Raises:
            BundleError: HEADER, naming the line or the key.
        """
        values: dict[str, str] = {}
        key = None
        lines = list(message)
        if lines and lines[-1] == "":
            lines.pop()
        for line_no, raw in enumerate(lines, 1):
            line = raw.encode("latin-1").decode("utf-8", "replace")
            if line.startswith(" ") and key is not None:
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
        if not _DATE.search(self.upstream):
            raise _refuse(where, "Upstream: with the date of the look-up (YYYY-MM-DD)", self.upstream)
        if self.gate_name is None and not re.fullmatch(r"none; \S.*", self.gate):
            raise _refuse(where, "Gate: SGLANG_RESEARCH_*, SMG_PD_* or 'none; reason'", self.gate)


def _refuse(where: str, expected: str, found: str) -> BundleError:
    return BundleError(Reason.HEADER, where, expected=expected, found=found)
