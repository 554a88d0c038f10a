"""Look for what must not be published: addresses, accounts, credentials, private paths, binaries."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from patchbundle.errors import BundleError, Reason

# Folders that are made on the machine and never published.
_SKIP = frozenset(
    {
        ".git",
        ".venv",
        "build",
        "dist",
        "__pycache__",
        "target",
        ".mypy_cache",
        ".ruff_cache",
        ".pytest_cache",
        ".hypothesis",
    }
)
_HEADS = {
    b"\x7fELF": "an ELF file",
    b"\xcf\xfa\xed\xfe": "a Mach-O file",
    b"MZ": "a Windows program",
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "a gzip archive",
    b"!<arch>": "a static library",
}
# Not after "==": versions of packages may have four parts.
_IPV4 = re.compile(r"(?<![\w.])(?<!==)(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![\w.])")
# Whole, or short with "::" after a long first group: x[1::2] is a slice.
_IPV6 = re.compile(
    r"(?<![\w:.])(?=[0-9a-fA-F:]*[0-9])(?:(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{1,4}"
    r"|[0-9a-fA-F]{3,4}:(?:[0-9a-fA-F]{1,4}:){0,5}(?::[0-9a-fA-F]{1,4}){1,6})(?![\w:])"
)
_MAIL = re.compile(r"[\w.+-]+@(?:[\w-]+\.)+[a-z]{2,}\b")
_URL = re.compile(r"\b(?:https?|ssh|git|ftp|s3|gs)://([^\s/@'\"]+@)?(\[[^\]]*\]|[A-Za-z0-9._-]+)")
# Public places that the texts may point to. Anything else is somebody's host.
_HOSTS = re.compile(
    r"(?:[\w-]+\.)*(?:github\.com|apache\.org|python\.org|keepachangelog\.com|semver\.org|in-toto\.io|cyclonedx\.org"
    r"|json-schema\.org|localhost|example\.(?:com|org|invalid)|[\w-]+\.example|invalid)"
    r"|127(?:\.[0-9]+){3}|0\.0\.0\.[0-9]+|\[::1?\]|[0-9]+|[a-z]|host|worker|prefill|decode|router|server"
)
_PATHS = re.compile(r"(?<![\w./-])/(?:home|Users|root|data|mnt|nfs|scratch|workspace)/[\w.-]+")
_SECRETS = {
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "an access token": re.compile(
        r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}"
        r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,})"
    ),
    "a credential": re.compile(
        r"(?i)\b(?:password|passwd|secret|api_?key|access_?key|token)\b\s*[:=]\s*['\"][^'\"\s$<{]{8,}['\"]"
    ),
    # host:port@rank is how the router names a worker's data-parallel rank, not a user with a password.
    "a credential in a URL": re.compile(r"\b\w+://[^\s/:@'\"\[]+:(?!(?:[0-9]+|port)@)[^\s/@'\"]+@"),
}


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}: {self.text}"


def scan(root: Path) -> list[Finding]:
    """Every finding in every file of the bundle at ``root``."""
    return [finding for path in files(root) for finding in scan_bytes(path.relative_to(root).as_posix(), _read(path))]


def check(root: Path) -> int:
    """Scan the bundle; returns the number of files read.

    Raises:
        BundleError: SCAN, naming every finding.
    """
    findings = scan(root)
    if findings:
        raise BundleError(
            Reason.SCAN,
            "; ".join(str(finding) for finding in findings[:10]),
            expected="no address, host, account, token, key, private path or binary",
            found=f"{len(findings)} finding(s)",
            next_step="take it out; history that holds a credential needs the credential revoked",
        )
    return sum(1 for _ in files(root))


def files(root: Path) -> Iterator[Path]:
    """Every file of the bundle, made folders left out."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIP and not name.endswith(".egg-info"))
        for name in sorted(names):
            path = Path(folder, name)
            # A worktree's .git is a file.
            if name not in {".git", ".coverage"}:
                yield path


def scan_bytes(path: str, data: bytes) -> Iterator[Finding]:
    """The findings in one file's bytes."""
    for head, what in _HEADS.items():
        if data.startswith(head):
            yield Finding(path, 1, "binary", what)
            return
    if b"\0" in data:
        yield Finding(path, data[: data.index(b"\0")].count(b"\n") + 1, "binary", "a NUL byte")
        return
    for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
        for what, text in _scan_line(line):
            yield Finding(path, number, what, text)


def _scan_line(line: str) -> Iterator[tuple[str, str]]:
    for what, pattern in _SECRETS.items():
        if pattern.search(line):
            # Not the text itself: the report of a leak must not be one.
            yield what, "(not shown)"
    for pattern in (_IPV4, _IPV6):
        for match in pattern.finditer(line):
            if _is_private_or_real(match[0]):
                yield "an address", match[0]
    for match in _MAIL.finditer(line):
        if not match[0].endswith((".example", "@example.com", "@example.org", ".invalid")):
            yield "an account", match[0]
    for match in _URL.finditer(line):
        rank = re.fullmatch(r".+:(?:[0-9]+|port)@", match[1] or "")
        if not rank and not _HOSTS.fullmatch(match[2]):
            yield "a host", match[2]
    for match in _PATHS.finditer(line):
        yield "a private path", match[0]


def _is_private_or_real(text: str) -> bool:
    """Whether it is an address of some machine: not loopback, not unspecified, not kept for documentation."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    documentation = ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32")
    networks = [ipaddress.ip_network(item) for item in documentation]
    return not (
        address.is_loopback
        or address.is_unspecified
        or (address.version == 4 and address in ipaddress.ip_network("0.0.0.0/8"))
        or any(address.version == network.version and address in network for network in networks)
    )


def _read(path: Path) -> bytes:
    return os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
