"""Look for what must not be published: addresses, accounts, credentials, private paths, binaries."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from patchbundle import store
from patchbundle.errors import BundleError, Reason

# Made on the machine at the top of a checkout, or by an interpreter anywhere; never published.
_MADE = frozenset({".git", ".venv", "build", "dist", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"})
# A text of more than this is none that a person wrote.
_LARGEST = 16 << 20
_HEADS = {
    b"\x7fELF": "an ELF file",
    b"\xcf\xfa\xed\xfe": "a Mach-O file",
    b"\xce\xfa\xed\xfe": "a Mach-O file",
    b"\xca\xfe\xba\xbe": "a Mach-O or a Java file",
    b"MZ": "a Windows program",
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "a gzip archive",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ": "an xz archive",
    b"\x28\xb5\x2f\xfd": "a Zstandard archive",
    b"!<arch>": "a static library",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"%PDF": "a PDF file",
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
# Names that only some private network knows, with or without a URL around them.
_INTERNAL = re.compile(r"\b[\w-]+(?:\.[\w-]+)*\.(?:internal|intranet|corp|lan|local)\b(?![\w(])")
_REMOTE = re.compile(r"(?<![\w/.])[\w.-]+@[\w-]+(?:\.[\w-]+)*:[/~]")
_PATHS = re.compile(
    r"(?:(?<![\w./-])|(?<=file://))/(?:home|Users|root|data|mnt|nfs|scratch|srv|work|workspace)/[\w.-]+"
)
_SECRETS = {
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "an access token": re.compile(
        r"\b(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}"
        r"|xox[abprs]-[\w-]{10,}|pypi-[\w-]{16,}|npm_[A-Za-z0-9]{20,}|[Bb]earer [\w.~+/-]{16,}|AKIA[0-9A-Z]{16}"
        r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,})"
    ),
    "a credential": re.compile(
        r"(?i)\b(?:password|passwd|secret|api_?key|access_?key|token)\b\s*[:=]\s*['\"][^'\"\s$<{]{8,}['\"]"
    ),
    # As in a file of environment variables, or of settings: nothing stands around the value.
    "a bare credential": re.compile(
        r"^\s*(?:export\s+)?(?:[A-Z0-9]+_)*(?:PASSWORD|PASSWD|SECRET|API_?KEY|ACCESS_?KEY|TOKEN)\s*=\s*[\w.~+/-]{8,}\s*$"
        r"|(?i:^\s*(?:password|passwd|secret|api_key|access_key|token):\s+[\w.~+/-]{8,}\s*$)"
        r"|(?i:aws_secret_access_key\s*=\s*\S{16,})"
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
    return [finding for path in files(root) for finding in _scan_file(path, path.relative_to(root).as_posix())]


def _scan_file(path: Path, name: str) -> Iterator[Finding]:
    """The findings in one file, which may be anything: a pipe would never end, a huge one would not fit."""
    if not os.path.lexists(path):
        yield from scan_bytes(name, store.read(path))
        return
    status = path.lstat()
    if not (path.is_symlink() or stat.S_ISREG(status.st_mode)):
        yield Finding(name, 1, "binary", "a special file")
    elif status.st_size > _LARGEST:
        yield Finding(name, 1, "binary", f"{status.st_size} bytes")
    else:
        yield from scan_bytes(name, _read(path))


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
    """Every file that would be published: in a checkout what git does not ignore, else all but what is made there."""
    for path in _tracked(root) or _walk(root) if root.is_dir() else store.walk(root):
        if not (path.suffix == ".pyc" and path.parent.name == "__pycache__"):
            yield path


def _tracked(root: Path) -> list[Path]:
    if not (root / ".git").exists():
        return []
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    paths = [root / os.fsdecode(name) for name in sorted(set(listed.split(b"\0"))) if name]
    return [path for path in paths if os.path.lexists(path)]


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        top = Path(folder) == root
        folders[:] = sorted(name for name in folders if not (top and name in _MADE) and not name.endswith(".egg-info"))
        for name in sorted(names):
            if not (top and name in {".git", ".coverage"}):
                yield Path(folder, name)


def scan_bytes(path: str, data: bytes) -> Iterator[Finding]:
    """The findings in one file's bytes."""
    for head, what in _HEADS.items():
        if data.startswith(head):
            yield Finding(path, 1, "binary", what)
            return
    if b"\0" in data:
        yield Finding(path, data[: data.index(b"\0")].count(b"\n") + 1, "binary", "a NUL byte")
        return
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        # A diff may hold what its base holds, and the corpus is made to hold anything.
        if not path.endswith((".patch", ".diff")) and not path.startswith("tests/corpus/"):
            yield Finding(path, data[: error.start].count(b"\n") + 1, "binary", "bytes that are no UTF-8 text")
            return
    for number, what, text in _scan_text(data.decode("utf-8", "replace")):
        yield Finding(path, number, what, text)


def _hidden(_: re.Match[str]) -> str:
    # Not the text itself: the report of a leak must not be one.
    return "(not shown)"


def _whole(match: re.Match[str]) -> str:
    return match[0]


def _address(match: re.Match[str]) -> str | None:
    return match[0] if _is_private_or_real(match[0]) else None


def _account(match: re.Match[str]) -> str | None:
    return None if match[0].endswith((".example", "@example.com", "@example.org", ".invalid")) else match[0]


def _host(match: re.Match[str]) -> str | None:
    rank = re.fullmatch(r".+:(?:[0-9]+|port)@", match[1] or "")
    return None if rank or _HOSTS.fullmatch(match[2]) else match[2]


# What a match is called, and what of it is shown; None where it is none after all.
_RULES: tuple[tuple[str, re.Pattern[str], Callable[[re.Match[str]], str | None]], ...] = (
    *((what, pattern, _hidden) for what, pattern in _SECRETS.items()),
    ("an address", _IPV4, _address),
    ("an address", _IPV6, _address),
    ("an account", _MAIL, _account),
    ("a host", _URL, _host),
    ("a host", _INTERNAL, _whole),
    ("an account", _REMOTE, _whole),
    ("a private path", _PATHS, _whole),
)


# What every match of a pattern holds. It begins with a letter of its own, so that it is quick to look for.
_CORE = {
    _SECRETS["a credential in a URL"]: r"://[^\s/:@]+:[^\s/@]+@",
    _IPV4: r"\.[0-9]{1,3}\.[0-9]{1,3}\.",
    _IPV6: ":[0-9a-fA-F]{0,4}:",
    _MAIL: r"@(?<=[\w.+-]@)(?:[\w-]+\.)+[a-z]{2}",
    _URL: "://",
    _INTERNAL: r"\.(?:internal|intranet|corp|lan|local)\b",
    _REMOTE: r"@(?<=[\w.-]@)[\w.-]+:[/~]",
    _PATHS: r"/(?:home|Users|root|data|mnt|nfs|scratch|srv|work|workspace)/",
}
# Where no such core is quick to find: one of these is in each match, in letters of either case.
_WORDS = {
    _SECRETS["an access token"]: (
        *("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "hf_", "sk-", "xox", "pypi-", "npm_"),
        *("bearer ", "akia", "eyj"),
    ),
    _SECRETS["a credential"]: ("passw", "secret", "key", "token"),
    _SECRETS["a bare credential"]: ("passw", "secret", "key", "token"),
}


def _scan_text(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, name and words of every finding."""
    # Most texts hold next to nothing: one look at all of one tells which rules are worth a look at each line. What
    # matches in a line matches in the whole, for "^" and "$" stand for a line's ends there too.
    folded = text.casefold()
    rules = [
        rule
        for rule in _RULES
        if any(word in folded for word in _WORDS.get(rule[1], ("",)))
        and re.search(_CORE.get(rule[1], rule[1].pattern), text, rule[1].flags | re.MULTILINE)
    ]
    for number, line in enumerate(text.split("\n") if rules else (), 1):
        for what, pattern, shown in rules:
            for match in pattern.finditer(line):
                found = shown(match)
                if found is not None:
                    yield number, what, found
                if shown is _hidden:
                    break


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
