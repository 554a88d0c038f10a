"""The arithmetic of the design space: every formula with its units and the source of the fact. No engine runs here."""
