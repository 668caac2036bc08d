"""Training all weights of a small model from scratch, its indexer by a divergence of its own."""
