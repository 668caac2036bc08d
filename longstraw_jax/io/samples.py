"""What a run's members said: samples/<step>.jsonl, a line a member.

A file a step, so that a resumed run replaces those of the steps that it does again.
"""

import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from longstraw_jax.io.metrics import parse_strict_json
from longstraw_jax.io.whole_file import write_whole

SAMPLES_FOLDER = "samples"
FIELDS = {"row_id": (int, str), "member": int, "text": str, "reward": (float, int, type(None)), "tokens": int,
          "truncated": bool}  # fmt: skip


def members(
    rollouts: Sequence[Any], row_ids: Sequence[int | str], to_text: Callable[[list[int]], str]
) -> Iterator[dict]:
    """The members of a step's rollouts (`rollout.Rollout`), as `write_samples` takes them.

    Args:
      row_ids: of the rollouts' prompts, in their order.
      to_text: ids -> text.
    """
    for group, row_id in zip(rollouts, row_ids, strict=True):
        for number, (ids, reward, cut) in enumerate(zip(group.responses, group.rewards, group.truncated, strict=True)):
            yield {
                "row_id": row_id,
                "member": number,
                "text": to_text(ids),
                "reward": float(reward) if math.isfinite(reward) else None,
                "tokens": len(ids),
                "truncated": bool(cut),
            }


def write_samples(workdir: str | os.PathLike, step: int, members: Iterable[Mapping[str, Any]]) -> None:
    """Writes one step's members: row_id, member (its number in the group), text, reward (None: unscorable), tokens,
    truncated.
    """
    lines = (json.dumps({name: member[name] for name in FIELDS}, ensure_ascii=False) for member in members)
    data = "".join(f"{line}\n" for line in lines).encode("utf-8", errors="replace")
    write_whole(pathlib.Path(workdir) / SAMPLES_FOLDER / f"{step:06d}.jsonl", data)


def sampled_steps(workdir: str | os.PathLike) -> list[int]:
    """Steps whose members were written, in order."""
    folder = pathlib.Path(workdir) / SAMPLES_FOLDER
    return sorted(int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdecimal())


def read_samples(workdir: str | os.PathLike, step: int) -> Sequence[dict[str, Any]]:
    """One step's members.

    Raises:
      ValueError: a line is not what `write_samples` writes.
      OSError: there is no such file.
    """
    path = pathlib.Path(workdir) / SAMPLES_FOLDER / f"{step:06d}.jsonl"
    members = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            member = parse_strict_json(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} line {number}: {error}") from error
        for name, kind in FIELDS.items():
            if not isinstance(member, dict) or not isinstance(member.get(name, ...), kind):
                raise ValueError(f"{path} line {number}: field {name} is not as accepted: {', '.join(FIELDS)}")
        members.append(member)
    return members
