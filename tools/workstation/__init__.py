"""What a workstation does with a bundle beside applying it: images, and documents that travel. No node needs it."""
