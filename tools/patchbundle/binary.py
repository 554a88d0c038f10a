"""What a compiled router was built from: its binary carries a mark that names the series by digest and level."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from patchbundle.bases import Base
from patchbundle.errors import BundleError, Reason
from patchbundle.manifest import Bundle

_MARK = re.compile(rb"\[patchbundle-router-series sha256=([0-9a-f]{64}) level=([0-9]{1,4})\]")
_ELF = b"\x7fELF"
# What Python looks up when it imports the router's extension module.
_ENTRY = b"PyInit_sglang_router_rs"


@dataclass(frozen=True)
class Built:
    """What a binary says of itself: ``series`` is a digest in hexadecimal, empty (at level 0) for a stock build."""

    series: str
    level: int


def base_of(bundle: Bundle) -> Base:
    """The base of ``bundle`` that is compiled.

    Raises:
        BundleError: NO_TARGET, if there is none.
    """
    for base in bundle.bases.values():
        if base.is_crate:
            return base
    raise BundleError(Reason.NO_TARGET, str(bundle.root), expected="a bundle with a base that is compiled")


def series_digest(bundle: Bundle, base: Base, level: int) -> str:
    """SHA-256 that names what a build at ``level`` is made of: base, patches, and the identity of all that they touch.

    It changes with the bytes that are compiled and with nothing else: not with another role's patches, not with words
    in a header.
    """
    pins = bundle.pins(base)
    touched = {path: str(identity) for path, identity in pins.at(level).items()}
    parts = [base.id, base.archives[0].sha256, list(pins.levels[:level]), touched]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("ascii")).hexdigest()


def mark(bundle: Bundle, base: Base, level: int) -> str:
    """The text that a build at ``level`` carries in its binary; empty for a stock build."""
    return f"[patchbundle-router-series sha256={series_digest(bundle, base, level)} level={level}]" if level else ""


def read(path: Path) -> Built:
    """What the binary, or the one binary in the wheel, at ``path`` was built from.

    Raises:
        BundleError: NO_BINARY, if it is no router's binary and no wheel with one, or names two series.
    """
    data = path.read_bytes() if not zipfile.is_zipfile(path) else _unzipped(path)
    if not data.startswith(_ELF) or _ENTRY not in data:
        raise _refuse(path, "another file")
    found = set(_MARK.findall(data))
    if len(found) > 1:
        raise _refuse(path, "the marks of two series")
    for series, level in found:
        return Built(series.decode("ascii"), int(level))
    return Built("", 0)


def _unzipped(path: Path) -> bytes:
    try:
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".so")]
            if len(names) != 1:
                raise _refuse(path, f"a wheel with {len(names)} binaries")
            return wheel.read(names[0])
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise _refuse(path, str(error)) from None


def name_of(bundle: Bundle, base: Base, built: Built) -> str | None:
    """The id of the patch at whose level of this bundle the binary was built, ``base``, or None: not of this bundle."""
    pins = bundle.pins(base)
    if built.level > len(pins.levels):
        return None
    fits = built.level == 0 or built.series == series_digest(bundle, base, built.level)
    return pins.name_of(built.level) if fits else None


def _refuse(path: Path, found: str) -> BundleError:
    return BundleError(
        Reason.NO_BINARY, str(path), expected="the router's extension module, or a wheel with one", found=found
    )
