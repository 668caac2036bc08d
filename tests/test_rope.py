"""Rotary tables: fp32 as transformers computes them, interleaved pairs, YaRN, far positions."""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from longstraw_jax.config import ConfigError, RopeParameters, extend_positions, model_config_from_hf
from longstraw_jax.model import rope

GLM52 = json.loads((pathlib.Path(__file__).parents[1] / "experiments/configs/glm52.json").read_text())
TABLES = pathlib.Path(__file__).parents[2] / "shared/hf_reference/f_rope_2m"
YARN_2M = RopeParameters(8e6, "yarn", factor=2.0000152587890625, original_max_position_embeddings=1048576)

# transformers 5.24.0 with torch 2.13.0: 1 / theta ** (arange(0, 64, 2) / 64) for theta 8e6, as fp32 bit patterns.
# An fp32 pow of another library differs in seven of these by a unit in the last place.
HF_FREQUENCIES = """
3f800000 3f1bc84c 3ebd9851 3e66bf20 3e0c6a42 3daae464 3d4ffbfc 3cfd2099
3c9a08c8 3c3b77ab 3be42844 3b8ad6e3 3b28f979 3acda683 3a7a4971 3a184e4a
39b95d21 396198d6 3909480c 38a71410 384b57bd 37f77a71 379698c3 373748a4
36df10c4 3687bdae 3625341a 35c90f9a 3574b383 3514e825 34b53a20 345c8ff9
"""


def test_frequencies_have_the_bits_of_transformers():
    found = rope.inverse_frequencies(RopeParameters(8e6), 64)
    assert found.dtype == np.float32
    assert [f"{bits:08x}" for bits in found.view(np.uint32)] == HF_FREQUENCIES.split()


@pytest.mark.skipif(not TABLES.is_dir(), reason=f"{TABLES} is not there")
@pytest.mark.parametrize("prefix, rotary", [("default_1m", RopeParameters(8e6)), ("yarn_2m", YARN_2M)])
def test_tables_at_far_positions_equal_transformers(prefix, rotary):
    want = safetensors.numpy.load_file(TABLES / "expected.safetensors")
    cos, sin = jax.jit(lambda at: rope.cos_sin(at, rotary, 64))(want["positions"])
    np.testing.assert_array_equal(rope.inverse_frequencies(rotary, 64), want[f"{prefix}.inv_freq"])
    np.testing.assert_allclose(cos, want[f"{prefix}.cos"], atol=3e-7)
    np.testing.assert_allclose(sin, want[f"{prefix}.sin"], atol=3e-7)


def test_angle_is_one_fp32_product():
    """Exact angles differ by up to 0.06 rad at two million: the weights saw the product."""
    at = np.asarray([2097151, 1500001], np.int32)
    cos, _ = rope.cos_sin(jnp.asarray(at), RopeParameters(8e6), 64)
    f = rope.inverse_frequencies(RopeParameters(8e6), 64)
    product = (at[:, None].astype(np.float32) * f).astype(np.float64)
    np.testing.assert_allclose(cos, np.cos(product), atol=2e-7)
    assert np.abs(np.cos(product) - np.cos(at[:, None] * f.astype(np.float64))).max() > 1e-3


def test_yarn_keeps_fast_divides_slow_blends_between():
    base = rope.inverse_frequencies(RopeParameters(8e6), 64)
    scaled = rope.inverse_frequencies(YARN_2M, 64)
    ratio = scaled / base
    np.testing.assert_allclose(ratio[:18], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[25:], 1 / YARN_2M.factor, rtol=1e-6)
    assert np.all(np.diff(ratio[17:26]) < 0)
    untruncated = rope.inverse_frequencies(RopeParameters(**{**YARN_2M.__dict__, "truncate": False}), 64)
    assert np.any(untruncated != scaled)
    slower = rope.inverse_frequencies(RopeParameters(**{**YARN_2M.__dict__, "beta_fast": 8.0}), 64)
    assert np.any(slower != scaled)


@pytest.mark.parametrize(
    "more, factor",
    [
        ({}, 0.1 * math.log(2.0000152587890625) + 1),
        ({"mscale": 0.5}, 0.1 * math.log(2.0000152587890625) + 1),  # one of the two alone is not read
        ({"mscale": 0.5, "mscale_all_dim": 2.0}, (0.05 * math.log(2.0) + 1) / (0.2 * math.log(2.0) + 1)),
        ({"attention_factor": 1.5}, 1.5),
    ],
)
def test_attention_factor_scales_cos_and_sin(more, factor):
    rotary = RopeParameters(**{**YARN_2M.__dict__, **more})
    assert rope.attention_factor(rotary) == pytest.approx(factor, rel=2e-5)
    cos, sin = rope.cos_sin(jnp.arange(5), rotary, 64)
    np.testing.assert_allclose(cos**2 + sin**2, factor**2, rtol=1e-4)


def test_f1_rotation_pairs_neighbours_not_halves():
    """Interleaved pairs: a rotation of (x0, x1) moves nothing else, and half-split pairs would."""
    x = jnp.asarray([1.0, 2.0, 0.0, 0.0])
    cos, sin = rope.cos_sin(jnp.int32(1), RopeParameters(100.0), 4)
    turned = rope.rotate(x, cos, sin)
    first = [math.cos(1) - 2 * math.sin(1), 2 * math.cos(1) + math.sin(1)]
    np.testing.assert_allclose(
        turned, [first[0], 0, first[1], 0], atol=1e-6
    )  # halves: all firsts, all seconds


def test_rotation_makes_scores_depend_on_the_distance_alone():
    q, k = jax.random.normal(jax.random.key(0), (2, 16))

    def score(i, j):
        return rope.rotate(q, *rope.cos_sin(i, RopeParameters(1e4), 16)) @ rope.rotate(
            k, *rope.cos_sin(j, RopeParameters(1e4), 16)
        )

    np.testing.assert_allclose(
        score(jnp.int32(9), jnp.int32(4)), score(jnp.int32(105), jnp.int32(100)), rtol=1e-4
    )
    assert abs(score(jnp.int32(9), jnp.int32(4)) - score(jnp.int32(9), jnp.int32(5))) > 1e-3


def test_rotation_is_fp32_and_keeps_the_input_dtype():
    x = jax.random.normal(jax.random.key(1), (3, 8)).astype(jnp.bfloat16)
    cos, sin = rope.cos_sin(jnp.asarray([70001, 70002, 70003]), RopeParameters(1e4), 8)
    assert cos.dtype == jnp.float32 and rope.rotate(x, cos, sin).dtype == jnp.bfloat16
    exact = rope.rotate(x.astype(jnp.float32), cos, sin).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(rope.rotate(x, cos, sin)), np.asarray(exact))


def test_h2_positions_past_the_range_are_refused_and_never_clamped():
    config = model_config_from_hf(GLM52)
    config.check_length(1048576)
    with pytest.raises(
        ConfigError, match=r"1048577 tokens exceeds max_position_embeddings=1048576.*yarn_positions"
    ):
        config.check_length(1048577)
    extend_positions(config, 2097168).check_length(2097168)
    # Angles come from positions, not from a table: the last and the next position differ.
    cos, _ = rope.cos_sin(jnp.asarray([1048575, 1048576, 1048577]), config.rope_parameters, 64)
    assert len(np.unique(np.asarray(cos)[:, 0])) == 3 and np.isfinite(np.asarray(cos)).all()


def test_extended_range_has_the_exact_factor():
    config = extend_positions(model_config_from_hf(GLM52), 2097168)
    assert config.rope_parameters.factor == YARN_2M.factor
    np.testing.assert_array_equal(
        rope.inverse_frequencies(config.rope_parameters, 64), rope.inverse_frequencies(YARN_2M, 64)
    )
    with pytest.raises(ConfigError, match="yarn_positions=1048576"):
        extend_positions(model_config_from_hf(GLM52), 1048576)
