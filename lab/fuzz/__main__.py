"""Run one target of the fuzzer for some time, from the repository's own seeds; stops at the first finding.

The inputs that it made are kept nowhere: a finding becomes a case of tests/corpus, or a test.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import atheris
import click

with atheris.instrument_imports(include=["patchbundle", "unidiff"]):
    from lab.fuzz.targets import TARGETS, seeds


@click.command()
@click.argument("target", type=click.Choice(sorted(TARGETS)))
@click.option("--seconds", default=300, show_default=True)
@click.option("--seed", default=1, show_default=True, help="Of libFuzzer's random numbers.")
@click.option("--largest", default=4096, show_default=True, help="Bytes of an input, at most.")
@click.option("--artifacts", default="build/fuzz", show_default=True, help="Where an input that fails is put.")
def main(target: str, seconds: int, seed: int, largest: int, artifacts: str) -> None:
    """Fuzz TARGET. Exit code 0 if the time passed without a finding."""
    Path(artifacts).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="fuzz-") as corpus:
        for number, data in enumerate(seeds(target)):
            (Path(corpus) / f"seed-{number}").write_bytes(data)
        options = [f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={largest}", "-print_final_stats=1"]
        options += [f"-artifact_prefix={artifacts}/", "-timeout=20", "-rss_limit_mb=4096", "-verbosity=1"]
        atheris.Setup([sys.argv[0], *options, corpus], TARGETS[target])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
