"""What a release is made of: one file for a node, an archive of the sources, notes. The same bytes anywhere."""
