"""Defaults of train_grpo.py; other configs start from these. Override with --config.grpo.clip_high=0.28."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    """Every field, with GLM-5.2-like values for the objective and the optimizer."""
    targets = ("q_a", "q_b", "kv_a", "kv_b", "o", "dense", "shared", "routed", "lm_head")
    return ConfigDict(
        {
            "seed": 0,
            "steps": 100,
            "model": {
                "checkpoint": "",  # a Hugging Face directory: config.json, safetensors, tokenizer, chat template
                "latent_norm_eps": 0.0,  # eps of the two latent norms; 0: rms_norm_eps, as the vendor's code
                "kernels": "auto",  # the device's where they serve; "reference": plain jnp everywhere
                "yarn_positions": 0,  # opt in to a longer position range; 0: the checkpoint's own
            },
            "mesh": {
                "devices": 1,
                "emulate": False,  # split the CPU into that many devices
            },
            "data": {
                "paths": ("",),  # JSONL or parquet rows: prompt, reward_model.ground_truth, extra_info.index
                "rows_per_step": 1,
                "document": "none",  # "python": put Python's documentation before the question
                "prompt_tokens": 0,  # exact prompt length, by cutting the document; 0: as it comes
                "prompt_file": "",  # prompt.npy of build_prompt.py: the whole prompt of the dataset's one row
            },
            "grpo": {
                "mode": "detached",
                "group": 8,
                "slots": 0,  # responses that decode at once, the next one where one ends; 0: the whole group
                "max_new_tokens": 256,
                "stop": (),  # strings that end a response as an eos does, and stay in it (generation_kwargs "stop")
                "temperature": 1.0,
                "top_p": 1.0,
                # In brackets the names of TRL's GRPOConfig, or of verl's configuration.
                "updates": 1,  # optimizer steps a rollout (num_iterations)
                "max_resamples": 0,  # groups of equal rewards that a step replaces by further rows (filter_groups)
                "stop_without_signal": 0,  # stop after that many steps in a row without a signal; 0: never
                "clip_low": 0.2,  # (epsilon)
                "clip_high": 0.28,  # (epsilon_high)
                "importance_level": "token",  # "sequence": GSPO (importance_sampling_level)
                "beta": 0.0,
                "kl_estimator": "k3",
                "entropy_coef": 0.0,  # weight of the entropy bonus (verl's entropy_coeff)
                "aggregation": "token_mean",  # "sequence_mean", "fixed_length" (loss_type "dapo", "grpo", "dr_grpo")
                "advantage_scale": "std",  # "none" (scale_rewards)
                "baseline": "mean",  # "leave_one_out": RLOO
                "tis_cap": 0.0,  # 0: no importance weights (vllm_importance_sampling_mode "token_truncate")
                "mis_cap": 0.0,  # 0: no mask; else what leaves [1 / cap, cap] leaves the loss ("token_mask")
                "mis_level": "token",  # or "sequence" ("sequence_mask")
                "mask_truncated": False,  # (mask_truncated_completions)
                "zero_variance_kl": True,
                "router_replay": False,  # replay takes the experts that sampling took
                "selection_replay": False,  # replay attends to the keys that sampling selected
            },
            "capture": {
                "chunk": 2048,
                "resident_bytes": 0,  # of a device's memory, for prompts that stay resident together; 0: one prompt
                "keep_selection": False,  # exact mode: hold what queries select on the host, do not select again
            },
            "refresh": {  # detached mode: how stale a prompt may be that is taken again after a step
                "policy": "every_step",  # not at all; "every_n": below `every` steps old; "drift": that, and its probe
                "every": 8,
                "bound": 0.05,  # has moved by at most so much since the capture (mean |log-prob change|, nats a token)
                "probe_tokens": 32,  # first tokens of a response sampled then
            },
            "reward": {
                "functions": ("boxed_math",),
                "weights": (1.0,),
                "timeout_s": 30.0,  # one call of one function
                "answer_timeout_s": 5.0,  # one answer of boxed_math
                "overlong_cache": 0,  # last tokens of the budget over which the reward sinks (overlong_buffer.len)
                "overlong_penalty": 1.0,  # by how much, where the budget is full (overlong_buffer.penalty_factor)
            },
            "lora": {name: {"rank": 8, "alpha": 16.0} for name in targets},  # rank 0: not a target
            "optimizer": {
                "learning_rate": 1e-5,
                "b1": 0.9,
                "b2": 0.98,
                "eps": 1e-8,
                "weight_decay": 0.0,
                "max_grad_norm": 1.0,
            },
            "checkpoint": {"every": 10, "keep": 2},
        }
    )
