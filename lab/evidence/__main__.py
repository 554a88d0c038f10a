"""``make claims``: write the pages that list every claim and every link upstream."""

from pathlib import Path

from lab.evidence.check import write

write(Path(__file__).resolve().parents[2])
