"""What proves the bundle on a machine without a GPU. Nothing here travels to a node."""
