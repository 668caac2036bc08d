"""Reinforcement learning on million-token prompts for GLM-5.2.

Shape letters used in names, comments and einsum strings: B batch row, G responses of a prompt, S prefix
token, T query token, D model, N heads, H head dim, R latent rank, Q query rank, P rotary dim, I index heads,
K selected keys, E experts, F feed-forward, V vocabulary, L layer, J layer within its group, C page row.
"""
