"""The resident state of a prompt: pages, capture, freshness."""
