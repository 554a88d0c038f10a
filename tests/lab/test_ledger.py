"""The ledger of links upstream is complete, says what the headers say, and is young; each way to fail is seen."""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from lab.evidence import check, ledger
from lab.evidence.ledger import Link

ROOT = Path(__file__).parents[2]
LINKS, WRONG = ledger.read(ROOT)
PATCHES, UNREAD = ledger.series(ROOT)
TODAY = max(link.seen for link in LINKS)
BY_NUMBER = {link.number: link for link in LINKS}


def said(links: list[Link], today: datetime.date = TODAY) -> list[str]:
    return [str(problem) for problem in ledger.check(links, PATCHES, today)]


def changed(number: int, **fields: Any) -> list[Link]:
    """The ledger with one link another one."""
    return [dataclasses.replace(link, **fields) if link.number == number else link for link in LINKS]


def test_the_ledger_of_this_repository_holds() -> None:
    assert (WRONG, UNREAD, said(LINKS)) == ([], [], [])


def test_every_patch_and_every_link_is_on_the_page() -> None:
    page = (ROOT / check.UPSTREAM).read_text(encoding="utf-8")
    assert page == ledger.page(LINKS, PATCHES)
    assert all(f"| `{patch.id}` |" in page for patch in PATCHES)
    assert all(page.count(f"]({link.url})") == 1 + len(link.patches) for link in LINKS)


@pytest.mark.parametrize("link", LINKS, ids=lambda link: str(link.number))
def test_a_link_that_is_left_out_or_altered_is_seen(link: Link) -> None:
    assert any(link.url in problem for problem in said([other for other in LINKS if other is not link]))
    for status in set(ledger.STATUSES) - {link.status}:
        other = changed(link.number, status=status)
        assert said(other) or ledger.page(other, PATCHES) != ledger.page(LINKS, PATCHES)


@pytest.mark.parametrize(
    ("links", "words"),
    [
        (changed(31821, patches=("dsa-dcp", "nobody")), "names nobody, which is no patch of the series"),
        (changed(31821, patches=("dsa-dcp", "banner")), "names banner, whose header does not name it"),
        (changed(31821, patches=("exact-topk",)), "is not in evidence/upstream.toml under dsa-dcp"),
        (changed(39487, status="open"), "says merged of"),
        (changed(38144, status="merged"), "says not merged of"),
        (changed(31821, seen=datetime.date(2026, 11, 1)), "before the header's 2026-11-29"),
        (changed(31821, seen=TODAY + datetime.timedelta(1)), "after today"),
        (changed(31821, newest=TODAY + datetime.timedelta(1)), "before what was read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_agree_with_the_headers_is_named(links: list[Link], words: str) -> None:
    assert any(words in problem for problem in said(links)), said(links)


def test_a_status_that_nobody_could_look_up_contradicts_no_header() -> None:
    assert said(changed(38144, status="unknown")) == []


def test_what_was_looked_up_too_long_ago_is_named_link_by_link_and_patch_by_patch() -> None:
    later = TODAY + datetime.timedelta(ledger.MOST_DAYS)
    assert not any("look it up again" in problem and str(TODAY) in problem for problem in said(LINKS, later))
    much_later = said(LINKS, later + datetime.timedelta(1))
    assert sum("look it up again" in problem for problem in much_later) == len(LINKS)
    assert sum("look again" in problem for problem in much_later) == sum(not ledger.named(patch) for patch in PATCHES)


ENTRY: dict[str, Any] = {
    "url": "https://github.com/sgl-project/sglang/pull/1",
    "patches": ["banner"],
    "status": "open",
    "seen": datetime.date(2026, 11, 30),
    "how": "its text",
}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({key: value for key, value in ENTRY.items() if key != "how"}, "lacks how"),
        (ENTRY | {"more": 1}, "has more"),
        (ENTRY | {"url": "https://github.com/sgl-project/sglang"}, "a pull request or an issue"),
        (ENTRY | {"patches": []}, "a list of ids"),
        (ENTRY | {"status": "alive"}, "status 'alive'"),
        (ENTRY | {"how": ""}, "expected words"),
        (ENTRY | {"seen": "yesterday"}, "seen is no date"),
        (ENTRY | {"newest": 1}, "newest is no date"),
        (ENTRY | {"seen": datetime.datetime(2026, 11, 30)}, "seen is no date"),
        (ENTRY | {"newest": datetime.datetime(2026, 11, 30)}, "newest is no date"),
        (ENTRY | {"patches": ["banner", 1]}, "a list of ids"),
        (ENTRY | {"patches": "banner"}, "a list of ids"),
        (ENTRY | {"url": ["x"]}, "a pull request or an issue"),
        (ENTRY | {"status": "unknown", "newest": datetime.date(2026, 11, 1)}, "expected what was read"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_link_is_named(entry: dict[str, Any], words: str) -> None:
    assert words in "; ".join(ledger.faults(entry))
    assert list(ledger.faults(ENTRY)) == []


def test_a_link_that_is_there_twice_and_a_file_that_is_not_there_are_named(tmp_path: Path) -> None:
    assert "cannot be read" in str(ledger.read(tmp_path)[1][0])
    lines = "[[link]]\n" + "\n".join(
        f"{name} = {value if name == 'seen' else json.dumps(value)}" for name, value in ENTRY.items()
    )
    (tmp_path / "evidence").mkdir()
    (tmp_path / ledger.FILE).write_text(f"{lines}\n{lines}\n", encoding="utf-8")
    links, problems = ledger.read(tmp_path)
    assert len(links) == 1 and "is there twice" in str(problems[0])


def test_a_bundle_whose_series_cannot_be_read_is_a_problem_and_no_traceback(tmp_path: Path) -> None:
    assert ledger.series(tmp_path)[1]
