"""``make claims``: write the page that lists every claim."""

from pathlib import Path

from lab.evidence.check import write

write(Path(__file__).resolve().parents[2])
