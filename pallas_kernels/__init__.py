"""Kernels, one folder an operation; reference.py in each is its specification in jnp."""
