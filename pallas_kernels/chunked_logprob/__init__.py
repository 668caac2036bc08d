"""Log-probabilities of given tokens without the matrix of all logits."""
