"""The report is one file, of what the repository holds, and opens without a network in a real browser."""

from __future__ import annotations

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from lab.evidence import browser, claims, report
from lab.html import document, table
from lab.models.sweep import Axes, run
from patchbundle import manifest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def page() -> str:
    with run(Axes(prefixes=(1, 8), cold=(0.0,), burst=(1,), slow=(1.0,)).jobs(requests=20)) as lines:
        return report.page(ROOT, list(lines))


class Places(HTMLParser):
    """Every attribute that could make a browser load something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "iframe", "object", "embed", "img")
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            if name in ("src", "href", "xlink:href", "data", "srcset", "action", "poster"):
                self.found.append(value or "")


def test_it_names_nothing_outside_of_itself_and_every_reference_is_in_it(page: str) -> None:
    places = Places()
    places.feed(page)
    assert places.found
    assert all(place.startswith("#") and place[1:] in places.ids for place in places.found)
    assert not re.search(r"url\((?!#)|@import", page)


def test_it_holds_every_patch_every_archive_every_claim_by_kind_chart_and_sweep(page: str) -> None:
    bundle = manifest.load(ROOT)
    assert all(f"<td>{patch.id}</td>" in page for patch in bundle.patches)
    assert all(archive.sha256 in page for base in bundle.bases.values() for archive in base.archives)
    assert all(str(chain[-1].sha256) in page for pins in bundle.lock.bases.values() for chain in pins.paths.values())
    assert bundle.lock.digest in page
    known, _ = claims.read(ROOT)
    for kind in claims.Kind:
        count = sum(claim.kind is kind for claim in known)
        assert f"<summary>{kind.value}: {count}</summary>" in page or not count
    assert page.count("<svg") == 2
    assert "Model, not a measurement" in page and "<summary>8 points</summary>" in page


def test_text_of_a_table_and_a_title_is_text() -> None:
    page = document("<b>", table([{"<i>": "<script>"}]))
    assert "<b>" not in page and "<i>" not in page and "<script>" not in page
    assert table([]) == "<p>none</p>"
    assert "<td>a <code>b&lt;</code> c` d</td>" in table([{"a": "a `b<` c` d"}])


BAD = {
    "an error": ("<script>nothing.at(all)</script>", "exception: "),
    "a message": ("<script>console.log('here')</script>", "console: log"),
    "a request": ("<img src='https://example.org/picture.png'>", "request: https://example.org"),
    "a rule that it breaks": (
        "<meta http-equiv='Content-Security-Policy' content=\"script-src 'none'\"><script>1</script>",
        "log: ",
    ),
    "an empty picture": ("<svg width='10' height='10'></svg>", "1 pictures show nothing"),
    "too wide": ("<div style='width:3000px'>wide</div>", "wider than a window"),
}
needs_browser = pytest.mark.skipif(
    not any(shutil.which(name) for name in browser.NAMES), reason="no Chromium: requirements/debian-browser.txt"
)


@needs_browser
def test_a_real_browser_has_nothing_to_say_of_it(page: str, tmp_path: Path) -> None:
    path, picture = tmp_path / "report.html", tmp_path / "report.png"
    path.write_text(page, encoding="utf-8")
    seen = browser.look(path, picture)
    assert seen.problems == []
    assert (seen.title, seen.pictures) == ("Patch bundle: what is known", 2) and seen.tables > 5
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 100_000


@needs_browser
@pytest.mark.parametrize("what", BAD)
def test_what_a_browser_says_of_a_bad_page_fails_the_check(what: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text(document("bad", BAD[what][0]), encoding="utf-8")
    done = CliRunner().invoke(browser.main, [str(path)])
    assert done.exit_code == 1 and BAD[what][1] in done.output, done.output


@pytest.mark.parametrize(
    ("program", "said"),
    [("no-such-browser", "requirements/debian-browser.txt"), ("false", "ended with")],
    ids=["none is there", "it ends at once"],
)
def test_a_browser_that_does_not_answer_is_no_pass(
    program: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    path.write_text(document("page", ""), encoding="utf-8")
    monkeypatch.setattr(browser, "NAMES", (program,))
    done = CliRunner().invoke(browser.main, [str(path)])
    assert done.exit_code == 1 and said in done.output
