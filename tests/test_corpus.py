"""Every folder of tests/corpus: a tree, diffs, and the one right answer, with ``git apply`` as the other opinion.

case.toml says what is right (``expected``; for a refusal the ``reason``, and the ``line`` of the diff that it names, if
there is one), where the case comes from (``source``, a row of the study of patch tools, or "kind" for the neighbours of
one), and what git does where it differs (``git``: "applies", "refuses", or "applies otherwise": with another result),
and ``why``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from patchbundle.bases import parse_toml
from patchbundle.errors import BundleError, Reason
from tests import oracle
from tests.oracle import Files

CORPUS = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Case:
    name: str
    source: str
    says: str
    strip: int
    expected: str
    reason: str = ""
    line: int = 0
    git: str = ""
    why: str = ""

    @property
    def folder(self) -> Path:
        return CORPUS / self.name

    @property
    def tree(self) -> Files:
        return oracle.read(self.folder / "tree")

    @property
    def want(self) -> Files:
        return oracle.read(self.folder / "want")

    @property
    def diffs(self) -> list[Path]:
        return sorted(self.folder.glob("p*.diff"))

    @property
    def raw(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.diffs}


def _read(folder: Path) -> Case:
    return Case(folder.name, **parse_toml((folder / "case.toml").read_bytes(), folder.name))


CASES = [_read(folder) for folder in sorted(CORPUS.iterdir()) if folder.is_dir()]
APPLIES = [case for case in CASES if case.expected == "apply"]
REFUSED = [case for case in CASES if case.expected == "refuse"]


def _ids(case: Case) -> str:
    return f"{case.name}: {case.says}"


@pytest.mark.parametrize("case", CASES, ids=_ids)
def test_a_case_is_complete(case: Case) -> None:
    reasons = {reason.name.lower().replace("_", "-") for reason in Reason}
    assert case.diffs
    assert case.says
    assert case.source
    assert case.expected in {"apply", "refuse"}
    assert (case.folder / "want").exists() == (case.expected == "apply") or not case.want
    assert (case.reason in reasons) == (case.expected == "refuse")
    assert bool(case.git) == bool(case.why)


@pytest.mark.parametrize("case", APPLIES, ids=_ids)
def test_what_fits_applies_and_comes_off_byte_for_byte(case: Case) -> None:
    tree = case.tree
    series = oracle.pin(case.raw, tree, case.strip)
    top = len(case.diffs)
    assert oracle.move(series, 0, top) == case.want
    assert oracle.move(series, top, 0) == tree
    for level in range(top):
        assert oracle.move(series, level + 1, level) == {p: f for p, f in series.chain[level].items() if f}


@pytest.mark.parametrize("case", REFUSED, ids=_ids)
def test_what_does_not_fit_is_refused_for_the_right_reason_at_a_named_place(case: Case) -> None:
    for _ in range(2):  # the second time says the same
        with pytest.raises(BundleError) as refusal:
            oracle.pin(case.raw, case.tree, case.strip)
        assert refusal.value.code == case.reason
        assert refusal.value.exit_code == 1
        if len(case.diffs) == 1:
            place = re.match(r"(?:patches/)?p\.diff(?::([0-9]+))?(?:: |$)", refusal.value.where)
            assert place
            assert int(place[1] or 0) == case.line


@pytest.mark.parametrize("case", CASES, ids=_ids)
def test_git_agrees_or_the_case_says_why_not(case: Case, tmp_path: Path) -> None:
    folder = tmp_path / "tree"
    tree = case.tree
    oracle.write(folder, tree)
    took = oracle.git_apply(folder, case.diffs, case.strip)
    made = oracle.read(folder)
    if case.expected == "apply" and not case.git:
        assert took
        assert made == case.want
        assert oracle.git_apply(folder, case.diffs[::-1], case.strip, "-R")
        assert oracle.read(folder) == tree
    else:
        assert took == (case.git.startswith("applies"))
        if not took and len(case.diffs) == 1:
            assert made == tree


def test_every_row_of_the_study_that_is_about_text_or_names_has_a_case() -> None:
    rows = "B01 B04 B06 B07 B08 B09 B10 B11 B12 B13 B14 B15 B16 B17 B18 B19 B20 B21 B23 B24 B26 B27 B28 B29 B31 B33"
    rows += " B34 B38 B41 B44 B51"
    assert set(rows.split()) <= {case.source for case in CASES}


def test_refusals_outnumber_what_applies() -> None:
    assert len(REFUSED) > len(APPLIES)
