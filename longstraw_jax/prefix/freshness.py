"""Which weights captured a prefix, and whether they still are the policy's."""

import jax
import numpy as np
from jaxtyping import Array, UInt

from longstraw_jax import fingerprint
from longstraw_jax.types import Model, Params, PrefixState


class StalePrefixError(ValueError):
    """A prefix state that other weights captured."""


def policy_fingerprint(model: Model, base: str) -> UInt[np.ndarray, "2"]:
    """Fingerprint of what never changes in a policy: the base weights and the configuration they are read with.

    Args:
      model: its architecture (rotary scaling, eps, ...) and adapter scales count; the mesh does not.
      base: `fingerprint.tree_fingerprint` of the base weights.
    """
    digest = fingerprint.sha256_json([base, repr(model.config), repr(model.lora)])
    return np.frombuffer(bytes.fromhex(digest[:16]), ">u4").astype(np.uint32)


@jax.jit
def weights_fingerprint(base: UInt[Array, "2"], adapters: Params | None) -> UInt[Array, "2"]:
    """Fingerprint of the weights that a capture depends on.

    Args:
      base: from `policy_fingerprint`, taken once.
      adapters: the adapters the capture ran with, None when it ran without.
    """
    return base if adapters is None else base + fingerprint.device_fingerprint(adapters)


def check_fresh(state: PrefixState, expected: UInt[Array, "2"]) -> None:
    """Raises StalePrefixError unless `state` was captured with the weights of fingerprint `expected`.

    Replaying against a stale prefix is silently another policy; who wants it says so by not calling this.
    """
    found, wanted = np.asarray(state.fingerprint), np.asarray(expected)
    if not np.array_equal(found, wanted):
        raise StalePrefixError(
            f"prefix state of weights {found[0]:08x}{found[1]:08x} is stale: the policy's weights are "
            f"{wanted[0]:08x}{wanted[1]:08x}; capture the prompt again, or use prefix-gradient mode 'frozen', whose "
            "prefix does not depend on the adapters"
        )
