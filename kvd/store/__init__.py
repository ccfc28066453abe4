"""Storage engines and the block index."""
