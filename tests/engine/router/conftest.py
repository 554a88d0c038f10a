"""Makes the helper of this folder importable by the tests in it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
