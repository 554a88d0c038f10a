"""Where a run may be stopped, and what a loss of power may leave: every call on the file system, on every series."""
