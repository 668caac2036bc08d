"""The configuration of gradient parity on one GPU: the slice it means, ready for the command."""

import tiny_jobs  # puts experiments/ on the path

from longstraw_jax import job_config, lora

import gradient_parity  # isort: skip


def test_the_slice_is_four_full_width_layers_with_adapters_everywhere():
    config = tiny_jobs.defaults("parity_slice")
    found = gradient_parity.load_architecture(config)
    assert (found.num_hidden_layers, found.hidden_size, found.n_routed_experts) == (4, 6144, 64)
    assert found.indexer_types == ("full", "shared", "shared", "shared") and found.dtype == "bfloat16"
    found.check_length(65_536 + config.grpo.max_new_tokens)
    adapters = job_config.lora_config(config)
    assert "routed" in dict((name, rank) for name, rank, _ in adapters.targets) and lora.sites(found, adapters)
    config.model.architecture.dtype = "float32"
    config.model.architecture.n_routed_experts = 16
    assert gradient_parity.load_architecture(config).n_routed_experts == 16
