"""Reading and writing checkpoints, adapters, data and text."""
