"""The GLM-5.2 trunk as Flax NNX modules."""
