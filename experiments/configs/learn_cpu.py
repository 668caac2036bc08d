"""Held-out curves of a reader that one CPU core trains in minutes: two digits, one look-alike, 188 tokens, one device.

python experiments/pretrain_tiny.py --workdir=runs/small --config=experiments/configs/pretrain_cpu.py \
    --config.mix.digits=2 --config.stages.short.steps=550 --config.stages.sparse.steps=220
python experiments/learning_curves.py --config=experiments/configs/learn_cpu.py \
    --config.job.model.checkpoint=runs/small/checkpoint --out=runs/learning_small
"""

import pathlib
import runpy

from ml_collections import ConfigDict

_TINY = runpy.run_path(str(pathlib.Path(__file__).with_name("learn_tiny.py")))


def get_config() -> ConfigDict:
    """Only what differs from learn_tiny.py; the reader knows one kind of task, so that none is chosen."""
    config = _TINY["get_config"]()
    config.job.mesh.devices = 1
    config.job.data.rows_per_step = 2
    config.job.grpo.update(group=8, temperature=1.0, max_new_tokens=4)
    config.job.capture.chunk = 192
    config.task.update(kind="needle", tokens=188, distractors=1, digits=2)
    config.held_out.update(rows=96, every=25)
    return config
