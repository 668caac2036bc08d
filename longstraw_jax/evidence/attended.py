"""Which prompt positions the answers attended to: a histogram of selected ids, and its file in a run folder.

positions.npz holds `counts` int64 [L, bins], `layers` int32 [L] (the full layers' numbers), `prompt_tokens` int64 and
`queries` int64 (response tokens whose selections were counted).
"""

import os
import pathlib
import zipfile
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from longstraw_jax.config import ModelConfig
from longstraw_jax.io.whole_file import open_whole

POSITIONS_FILE = "positions.npz"
FIELDS = ("counts", "layers", "prompt_tokens", "queries")


def position_histogram(selected: Int[np.ndarray, "... K"], prompt_tokens: int, bins: int) -> Int[np.ndarray, "bins"]:
    """How often each part of a prompt was selected.

    Args:
      selected: ids of tokens, any shape; -1 is none, and ids from `prompt_tokens` on are the response's own.
      prompt_tokens: length S of the prompt.
      bins: parts that the prompt is cut into: token t is in part t * bins // S.

    Returns:
      int64 [bins].

    Raises:
      ValueError: no tokens, no bins, or more bins than tokens.
    """
    if not 1 <= bins <= prompt_tokens:
        raise ValueError(f"bins={bins} with prompt_tokens={prompt_tokens}; accepted: 1 to {max(prompt_tokens, 1)}")
    ids = np.asarray(selected, np.int64).reshape(-1)
    ids = ids[(ids >= 0) & (ids < prompt_tokens)]
    return np.bincount(ids * bins // prompt_tokens, minlength=bins).astype(np.int64)


def layer_histograms(
    selections: Sequence[Int[np.ndarray, "R B T K"]], prompt_tokens: int, bins: int
) -> Int[np.ndarray, "L bins"]:
    """`position_histogram` of each full layer, from the selections that sampling recorded (`choices.Choices`)."""
    layers = [layer for segment in selections for layer in np.asarray(segment)]
    return np.stack([position_histogram(layer, prompt_tokens, bins) for layer in layers])


def full_layers(config: ModelConfig) -> list[int]:
    """Numbers of the layers that select, in the order of their selections."""
    return [segment.layer_index(index, 0) for segment in config.segments() for index in range(segment.repeat)]


def write_positions(
    workdir: str | os.PathLike,
    counts: Int[np.ndarray, "L bins"],
    layers: Int[np.ndarray, "L"],
    *,
    prompt_tokens: int,
    queries: int,
) -> None:
    """Writes positions.npz of a run folder, a row of `position_histogram` a full layer."""
    counts, layers = np.asarray(counts, np.int64), np.asarray(layers, np.int32)
    if counts.ndim != 2 or counts.shape[0] != layers.size:
        raise ValueError(f"counts of shape {counts.shape} for {layers.size} layers; accepted: [layers, bins]")
    with open_whole(pathlib.Path(workdir) / POSITIONS_FILE) as file:
        np.savez(file, counts=counts, layers=layers, prompt_tokens=np.int64(prompt_tokens), queries=np.int64(queries))


def read_positions(workdir: str | os.PathLike) -> dict[str, np.ndarray] | None:
    """What `write_positions` wrote; None where a run has no such file.

    Raises:
      ValueError: the file is not of this format.
    """
    path = pathlib.Path(workdir) / POSITIONS_FILE
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {name: file[name] for name in FIELDS}
        if found["counts"].ndim != 2 or found["layers"].shape != found["counts"].shape[:1]:
            raise ValueError(f"counts of shape {found['counts'].shape} for layers of shape {found['layers'].shape}")
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: {error}; accepted: what write_positions wrote") from error
    return found
