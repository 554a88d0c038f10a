"""The router built from its pinned source, stock and patched, and the harness that runs both on 127.0.0.1."""
