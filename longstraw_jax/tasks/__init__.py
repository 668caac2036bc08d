"""Tasks with verifiable answers: retrieval from long prompts, and procedural reasoning."""
