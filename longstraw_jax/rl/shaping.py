"""What the length of a response adds to its reward."""

import numpy as np
from jaxtyping import Float, Int


def overlong_penalty(
    lengths: Int[np.ndarray, "N"], *, max_len: int, cache: int, factor: float = 1.0
) -> Float[np.ndarray, "N"]:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, equation 13), counted in tokens.

    0 up to max_len - cache tokens, then linear down to -factor at max_len. (verl: overlong_buffer; TRL:
    get_soft_overlong_punishment.)

    Args:
        lengths: tokens of each response, the eos included.
        max_len: response budget in tokens.
        cache: tokens at the end of the budget over which the penalty grows; 0 for none.
        factor: penalty of a response that fills the budget.

    Returns:
        fp32 [N], 0 or less.

    Raises:
        ValueError: the cache is negative or leaves the budget, or the factor is negative.
    """
    if not 0 <= cache <= max_len:
        raise ValueError(f"overlong_cache={cache}; accepted: 0 to the response budget of {max_len} tokens")
    if not factor >= 0:
        raise ValueError(f"overlong_penalty={factor}; accepted: a number of at least 0")
    if not cache:
        return np.zeros(len(lengths), np.float32)
    over = np.asarray(lengths) - (max_len - cache)
    return (-factor * np.clip(over / cache, 0.0, 1.0)).astype(np.float32)
