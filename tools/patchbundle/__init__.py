"""A patch bundle whose tree is its own state: plan, apply, verify and revert pinned patches."""

import gc

__version__ = "0.2.0"

# A command ends soon and leaves next to no cycles: looking for them in all that is imported took time at each start.
gc.set_threshold(100_000)
