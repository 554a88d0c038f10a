"""What the patches' headers point to upstream, and what was last known of each link: ``evidence/upstream.toml``.

The ledger is complete when every link of every header is in it under the ids of the patches that name it, and nothing
besides. A look-up grows old: after :data:`MOST_DAYS` the link is to be looked up again.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.evidence.claims import Entry, Problem, entries
from patchbundle import manifest
from patchbundle.errors import BundleError
from patchbundle.manifest import Patch

FILE = "evidence/upstream.toml"
MOST_DAYS = 180
STATUSES = ("open", "merged", "closed", "unknown")
NEEDED = {"url", "patches", "status", "seen", "how"}
_LINK = re.compile(rf"({re.escape('https://github.com/')}[\w.-]+/[\w.-]+/(?:pull|issues)/[0-9]+)")
_DATE = re.compile(r"\b20[0-9]{2}-[0-9]{2}-[0-9]{2}\b")


@dataclass(frozen=True)
class Link:
    """One thread upstream. ``newest``: the youngest date in what was read of it; None where nothing was."""

    url: str
    patches: tuple[str, ...]
    status: str
    seen: datetime.date
    how: str
    newest: datetime.date | None = None

    @property
    def number(self) -> int:
        return int(self.url.rpartition("/")[2])


def read(root: Path) -> tuple[list[Link], list[Problem]]:
    """The links that are well formed, and what is wrong with the others."""
    listed, problems = entries(root, FILE, "link", "url", faults)
    return [Link(**entry | {"patches": tuple(entry["patches"])}) for entry in listed], problems


def faults(entry: Entry) -> Iterator[str]:
    """What keeps an entry from being a link of the ledger."""
    missing, unknown = NEEDED - entry.keys(), entry.keys() - NEEDED - {"newest"}
    if missing or unknown:
        yield "; ".join(
            [f"lacks {name}" for name in sorted(missing)]
            + [f"has {name}, which no link has" for name in sorted(unknown)]
        )
        return
    if not (isinstance(entry["url"], str) and _LINK.fullmatch(entry["url"])):
        yield "url: expected a pull request or an issue"
    patches = entry["patches"]
    if not (isinstance(patches, list) and patches and all(isinstance(name, str) for name in patches)):
        yield "patches: expected a list of ids"
    if entry["status"] not in STATUSES:
        yield f"status {entry['status']!r}: expected {', '.join(STATUSES)}"
    if entry["status"] == "unknown" and "newest" in entry:
        yield "status 'unknown': expected what was read on its newest date"
    if not (isinstance(entry["how"], str) and entry["how"].strip()):
        yield "how: expected words"
    for name in ("seen", "newest"):
        # A date with a time is a date to Python, and not to be compared with one.
        if type(entry.get(name, datetime.date.min)) is not datetime.date:
            yield f"{name} is no date"


def series(root: Path) -> tuple[tuple[Patch, ...], list[Problem]]:
    """The patches of the bundle at ``root``, in the order of the series."""
    try:
        return manifest.load_unlocked(root).patches, []
    except BundleError as error:
        return (), [Problem(error.where, error.reason.value)]


def named(patch: Patch) -> dict[str, str]:
    """The links of a patch's header, and what the header says of each: the text up to the next link."""
    parts = _LINK.split(f"{patch.header.patch_class}; {patch.header.upstream}")
    said: dict[str, str] = {}
    for url, after in zip(parts[1::2], parts[2::2], strict=True):
        said[url] = said.get(url, "") + after
    return said


def check(links: Sequence[Link], patches: Sequence[Patch], today: datetime.date) -> Iterator[Problem]:
    """Links that are missing, unused, old, younger than today, or that a header speaks of otherwise."""
    known = {link.url: link for link in links}
    headers = {patch.id: named(patch) for patch in patches}
    for patch in patches:
        where = f"patches/{patch.file}"
        looked = max((datetime.date.fromisoformat(day) for day in _DATE.findall(patch.header.upstream)), default=None)
        if not headers[patch.id] and looked and (today - looked).days > MOST_DAYS:
            yield Problem(where, f"found nothing upstream on {looked}, more than {MOST_DAYS} days ago: look again")
        for url, said in headers[patch.id].items():
            link = known.get(url)
            if link is None or patch.id not in link.patches:
                yield Problem(where, f"{url} is not in {FILE} under {patch.id}")
                continue
            for no, status in re.findall(r"\b(not )?(open|merged|closed)\b", said):
                if link.status != "unknown" and (link.status == status) == bool(no):
                    yield Problem(where, f"says {no}{status} of {url}, {FILE} says {link.status}")
            if link.newest and looked and link.seen < looked:
                yield Problem(f"{FILE}: {url}", f"was seen {link.seen}, before the header's {looked}")
    for link in links:
        where = f"{FILE}: {link.url}"
        for patch_id in link.patches:
            if patch_id not in headers:
                yield Problem(where, f"names {patch_id}, which is no patch of the series")
            elif link.url not in headers[patch_id]:
                yield Problem(where, f"names {patch_id}, whose header does not name it")
        if link.seen > today or (link.newest or link.seen) > link.seen:
            yield Problem(where, f"was seen {link.seen}, which is before what was read or after today")
        if (today - link.seen).days > MOST_DAYS:
            yield Problem(where, f"was seen {link.seen}, more than {MOST_DAYS} days ago: look it up again")


def page(links: Sequence[Link], patches: Sequence[Patch]) -> str:
    """The page that lists every patch with its class, its links and when it may go."""
    lines = [
        "# Upstream",
        "",
        "Written by `make claims` from the headers of the patches and `evidence/upstream.toml`. Checked by",
        "`tools/check_sources.py --evidence`: every link of a header is here and none besides, and each was looked up",
        f"in the last {MOST_DAYS} days. A status is as old as the copy that was read; *newest* is its youngest date.",
        "",
        "## Patches",
        "",
        "| patch | class | links | drop when |",
        "|---|---|---|---|",
    ]
    known = {link.url: link for link in links}
    for patch in patches:
        kind = re.split(r"[,;]", patch.header.patch_class)[0]
        numbers = sorted((link for url in named(patch) if (link := known.get(url))), key=lambda link: link.number)
        shown = ", ".join(f"[{link.number}]({link.url}) {link.status}" for link in numbers) or "none found"
        lines.append(f"| `{patch.id}` | {kind} | {shown} | {patch.header.drop_when} |")
    lines += ["", "## Links", "", "| link | status | seen | newest | how |", "|---|---|---|---|---|"]
    for link in sorted(links, key=lambda link: link.number):
        newest = link.newest or "nothing read"
        lines.append(f"| [{link.number}]({link.url}) | {link.status} | {link.seen} | {newest} | {link.how} |")
    return "\n".join(lines) + "\n"
