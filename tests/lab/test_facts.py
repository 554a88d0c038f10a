"""The figures of the original bundle, its reviews and its notes are all claimed, with the values that they have there.

Nothing here can recompute what others reported: an edit of such a claim, or its loss, shows only against a second copy.
"""

from __future__ import annotations

from pathlib import Path

from lab.evidence import claims
from lab.evidence.claims import Kind

KNOWN = {claim.id: claim for claim in claims.read(Path(__file__).parents[2])[0]}
ORIGINS = ("the original bundle", "its reviews", "the design notes")
REPORTED: dict[str, tuple[float, str]] = {
    "acceptance-first": (7014.18, "tokens/s/GPU"),
    "acceptance-second": (7009.29, "tokens/s/GPU"),
    "acceptance-first-half": (7083, "tokens/s/GPU"),
    "acceptance-second-half": (6936, "tokens/s/GPU"),
    "acceptance-done": (4144, "requests"),
    "acceptance-each": (518, "requests"),
    "acceptance-gap": (20, "s"),
    "input-sp-rate-before": (0.687809, "req/s"),
    "input-sp-rate-after": (0.724529, "req/s"),
    "input-sp-union-before": (1440.734, "ms"),
    "input-sp-union-after": (1364.046, "ms"),
    "input-sp-communication-before": (813.19, "ms"),
    "input-sp-communication-after": (737.978, "ms"),
    "input-sp-compute-before": (620.348, "ms"),
    "input-sp-compute-after": (620.471, "ms"),
    "capacity-no-split": (217000, "tokens"),
    "capacity-split": (806000, "tokens"),
    "capacity-split-16k": (540000, "tokens"),
    "pool-observed": (110464, "tokens"),
    "pack-timeout": (32, "s"),
    "pack-compared": (35568, "comparisons"),
    "pack-short": (96, "runs"),
    "recovery-retractions": (37, "retractions"),
    "recovery-answers": (32, "requests"),
    "router-error": (1, "s"),
    "deployment-cards": (40, "cards"),
    "deployment-layers": (78, "layers"),
    "deployment-chunk": (16384, "tokens"),
    "request-cached": (73728, "tokens"),
    "request-fresh": (8192, "tokens"),
    "request-output": (600, "tokens"),
    "acceptance-rate": (3.4, "req/s"),
    "acceptance-round": (2072, "requests"),
    "acceptance-window-begin": (120, "s"),
    "acceptance-window-end": (540, "s"),
    "packaged-tests": (25, "tests"),
    "packaged-patches": (4, "patches"),
    "packaged-files": (7, "files"),
    "packaged-functions": (3, "functions"),
    "recovery-tests": (6, "tests"),
    "recovery-method-tests": (6, "tests"),
    "recovery-calm-answers": (4, "requests"),
    "router-faults": (8, "faults"),
    "router-burst": (32, "requests"),
    "router-burst-rank": (8, "requests"),
    "router-decode-abort-least": (3, "s"),
    "router-decode-abort-most": (4, "s"),
    "review-tests": (32, "tests"),
    "review-arithmetic": (7, "tests"),
    "review-pairs": (96, "pairs"),
    "review-digests": (7, "files"),
    "input-sp-arm": (128, "requests"),
    "input-sp-third-rate": (0.7, "req/s"),
    "full-copy-before": (46, "requests"),
    "full-copy-after": (51, "requests"),
    "full-copy-input": (85200, "tokens"),
    "pack-ends": (16, "requests"),
    "index-share": (12.5, "%"),
    "community-2xh100-before": (0.28173, "s"),
    "community-2xh100-after": (0.2718, "s"),
    "community-2xb200-before": (0.14388, "s"),
    "community-2xb200-after": (0.13589, "s"),
    "community-vllm-before": (420, "ms"),
    "community-vllm-after": (383, "ms"),
}
# Given there as well; here a formula stands behind each.
RECOMPUTED: dict[str, tuple[float, str]] = {
    "offered-load": (7014.2, "tokens/s/GPU"),
    "request-input": (81920, "tokens"),
    "shard": (48, "MiB"),
    "input-sp-before": (4.0, "S"),
    "input-sp-after": (4.5, "S"),
    "input-sp-before-mib": (192, "MiB"),
    "input-sp-after-mib": (216, "MiB"),
    "input-sp-more-mib": (24, "MiB"),
    "input-sp-payload": (12.5, "%"),
    "persistent-saves": (0, "S"),
    "input-sp-rate": (5.339, "%"),
    "input-sp-union": (5.323, "%"),
    "input-sp-communication": (75.212, "ms"),
    "pool-full": (6.33, "GiB"),
    "pool-split-least": (1.54, "GiB"),
    "pool-split-most": (1.62, "GiB"),
    "pool-split-saves": (4.7, "GiB"),
    "pool-copy-8192": (0.77, "GiB"),
    "pool-split-8192": (0.2, "GiB"),
    "prefix-leaves": (36736, "tokens"),
    "four-fit": (106496, "tokens"),
    "five-do-not": (114688, "tokens"),
    "two-unshared": (163840, "tokens"),
    "dcp2-capacity": (1.71, "×"),
    "dcp4-capacity": (2.66, "×"),
    "busiest-source": (3.9, "×"),
    "full-copy-gain": (10.9, "%"),
    "slice-item": (256, "bytes"),
    "slice-stride": (1024, "bytes"),
    "slice-batches": (96, "calls"),
    "slice-batch": (262144, "bytes"),
    "zigzag-segment": (512, "tokens"),
    "cp-computes": (1024, "tokens"),
    "broadcast-of-four": (3, "×"),
    "entry-all-reduce": (1.0, "S"),
    "entry-cp-gather": (3.0, "S"),
    "entry-reduce-scatter": (0.5, "S"),
    "entry-world-gather": (3.5, "S"),
    "entry-residual": (0.5, "S"),
    "slice-descriptors": (1024, "descriptors"),
    "all-cp-range": (1024, "tokens"),
    "filter-loses": (75, "%"),
    "index-share-bf16": (11.5, "%"),
    "index-share-fp8": (20.1, "%"),
    "padded-heads": (16, "×"),
    "limit-look-up": (180, "days"),
}


def test_every_reported_figure_is_claimed_as_it_was_reported() -> None:
    said = {
        claim.id: (claim.value, claim.unit)
        for claim in KNOWN.values()
        if claim.kind is Kind.REPORTED and claim.source.startswith(ORIGINS)
    }
    assert said == REPORTED


def test_every_figure_that_a_formula_gives_is_claimed() -> None:
    said = {claim.id: (claim.value, claim.unit) for claim in KNOWN.values() if claim.kind is Kind.RECOMPUTED}
    assert said == RECOMPUTED


def test_the_corrections_of_the_reviews_are_made() -> None:
    """What the first description said otherwise, or left open."""
    said = {name: (claim.statement + " " + claim.not_shown).lower() for name, claim in KNOWN.items()}
    assert "no reduction of communication" in said["input-sp-payload"]
    assert "short, backlogged windows" in said["input-sp-rate"]
    assert "communication and not the norm" in said["input-sp-union"]
    assert "a combination, on another load" in said["full-copy-gain"]
    assert "no isolated figure exists" in said["pack-timeout"]
    assert "offered load" in said["offered-load"] and "equals the offered load" in said["acceptance-first"]
