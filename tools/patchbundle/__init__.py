"""A patch bundle whose tree is its own state: plan, apply, verify and revert pinned patches."""

__version__ = "0.2.0"
