"""Receipts say which implementation served each operation."""

import dataclasses
import json
import pathlib

import jax
import pytest
import tiny
from jax.sharding import AbstractDevice, AbstractMesh

from longstraw_jax import config
from longstraw_jax.evidence import kernels
from longstraw_jax.model import decoder
from pallas_kernels.grouped_matmul import api as grouped_matmul

GLM52 = pathlib.Path(__file__).parents[1] / "experiments" / "configs" / "glm52.json"
EVERY = {"indexer_topk", "sparse_mla", "grouped_matmul", "chunked_logprob"}


def test_fp32_is_served_by_the_references():
    found = kernels.implementations(tiny.model(1))
    assert found.keys() == EVERY and found["indexer_topk"] == found["sparse_mla"] == "reference"


def test_a_named_reference_serves_every_operation():
    found = kernels.implementations(dataclasses.replace(tiny.model(1), kernels="reference"))
    assert found == dict.fromkeys(EVERY, "reference")


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the Hopper kernels need JAX 0.11")
def test_glm52_is_served_by_the_kernels_on_an_h200():
    model = decoder.make_model(config.model_config_from_hf(json.loads(GLM52.read_text())))
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        found = kernels.implementations(model)
    assert [found[name] for name in ("indexer_topk", "sparse_mla", "grouped_matmul")] == ["hopper"] * 3


def test_kernels_are_chosen_by_two_names():
    with pytest.raises(ValueError, match="kernels='fast' is not supported; accepted: 'auto' or 'reference'"):
        decoder.make_model(tiny.CONFIG, kernels="fast")


def test_experts_whose_maps_get_different_kernels_are_named_by_both(monkeypatch):
    def by_width(x, w, rank, name):
        return "hopper" if w.shape[1] == tiny.CONFIG.hidden_size else "reference"

    monkeypatch.setattr(grouped_matmul, "backend", by_width)
    assert kernels.implementations(tiny.model(1))["grouped_matmul"] == "hopper+reference"
