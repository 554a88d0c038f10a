"""The picture of the top-k page is the one that the evidence draws."""

from __future__ import annotations

from pathlib import Path

from benchmarks import topk_plot


def test_the_picture_is_that_of_the_evidence(tmp_path: Path) -> None:
    topk_plot.draw(tmp_path / "topk.svg")
    assert (tmp_path / "topk.svg").read_bytes() == topk_plot.PICTURE.read_bytes()
