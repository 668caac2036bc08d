"""Latent attention over each query's selected rows."""
