"""Every figure that the documentation shows is a claim: recomputed, measured by a script here, or reported."""
