"""Index scores and the exact selection of each query's best keys."""
