"""The engine of the decode release on one GPU machine without a network: packing it here, running it there."""
