"""Everything that the patch bundle adds to the engine lives in this package."""
