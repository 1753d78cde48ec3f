"""verl's settings, and where they go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_launch.importing.engine import Rule, combined, differs, missing, needless, to
from rlhf_launch.importing.values import every

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.ref."
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "max_length",
}
KL = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "abs": "abs"}
ESTIMATORS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gae": ("ppo", {}),
    "grpo": ("grpo", {"advantage_options.eps": 1e-6}),
    "reinforce_plus_plus": ("reinforce_pp", {}),
    "reinforce_plus_plus_baseline": (
        "reinforce_pp_baseline",
        {"whiten_options.unbiased": True, "whiten_options.eps": 1e-8, "whiten_options.eps_mode": "add"},
    ),
    "rloo": ("rloo", {}),
    "remax": ("remax", {}),
    "opo": ("opo", {}),
    "gpg": ("gpg", {}),
    "optimal_token_baseline": ("optimal_token", {}),
}
LOSSES = {
    "vanilla": None,
    "gspo": "gspo",
    "gmpo": "gmpo",
    "geo_mean": "gmpo",
    "cispo": "cispo",
    "sapo": "sapo",
    "gpg": None,
}
_BY_TOKENS = needless("scoring keeps to train.max_tokens_per_micro_batch")
_OPTIMIZER = {
    "lr": ("learning_rate", float),
    "lr_warmup_steps_ratio": ("warmup", float),
    "weight_decay": ("weight_decay", float),
    "betas": ("betas", lambda pair: [float(value) for value in pair]),
    "min_lr_ratio": ("min_learning_rate_ratio", float),
    "lr_scheduler_type": ("schedule", str),
    "warmup_style": ("schedule", str),
    "clip_grad": ("max_grad_norm", float),
}


def _optimizer(theirs: str, ours: str) -> dict[str, Rule]:
    rules = {f"{theirs}.{name}": to(f"{ours}.{key}", convert=kind) for name, (key, kind) in _OPTIMIZER.items()}
    rules[f"{theirs}.lr_warmup_steps"] = to(f"{ours}.warmup", convert=int, neutral=(-1,))
    rules[f"{theirs}.total_training_steps"] = needless("the course of the rate follows from train.steps")
    return rules


ONLINE: Mapping[str, Rule] = {
    "algorithm.adv_estimator": combined(),
    "algorithm.gamma": to("algorithm.gamma", convert=float),
    "algorithm.lam": combined(),
    "algorithm.use_kl_in_reward": combined(),
    "algorithm.kl_penalty": combined(),
    "algorithm.kl_ctrl.kl_coef": combined(),
    "algorithm.kl_ctrl.type": combined(),
    "algorithm.kl_ctrl.target_kl": combined(),
    "algorithm.kl_ctrl.horizon": to("algorithm.kl_horizon", convert=int),
    "algorithm.norm_adv_by_std_in_grpo": combined(),
    "data.train_files": combined(),
    "data.val_files": combined(),
    "data.prompt_key": combined(),
    "data.train_batch_size": to("train.prompts_per_step", convert=int),
    "data.val_batch_size": needless("the engines batch requests themselves"),
    "data.max_prompt_length": to("lengths.max_prompt_tokens", convert=int),
    "data.max_response_length": to("rollout.sampling.max_tokens", convert=int),
    "data.filter_overlong_prompts": combined(),
    "data.filter_overlong_prompts_workers": needless("rows are prepared once, before training"),
    "data.truncation": combined(),
    "data.train_max_samples": combined(),
    "data.val_max_samples": combined(),
    "data.shuffle": to("data.shuffle"),
    "data.seed": needless("one seed decides everything: `seed`"),
    "data.return_raw_chat": needless("reward functions get prompts as text"),
    "data.return_raw_input_ids": needless("token ids travel with every sample"),
    "data.return_full_prompt": needless("reward functions get prompts as text"),
    "data.dataloader_num_workers": needless("rows are prepared once, before training"),
    "data.trust_remote_code": to("model.trust_remote_code"),
    "data.image_key": combined(
        'a prompt has {"type": "image"} among the parts of its messages, or the processor\'s own token, for each '
        "image, where verl's data has <image>"
    ),
    "data.reward_fn_key": needless("a reward function gets every column of the data"),
    "data.custom_cls.path": missing("write the data as files of rows"),
    "data.custom_cls.name": missing("write the data as files of rows"),
    "actor_rollout_ref.hybrid_engine": needless("all roles share the GPUs, by placement.*.colocate_with"),
    "actor_rollout_ref.model.path": to("model.path"),
    "actor_rollout_ref.model.tokenizer_path": to("model.tokenizer"),
    "actor_rollout_ref.model.trust_remote_code": to("model.trust_remote_code"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": to("train.gradient_checkpointing"),
    "actor_rollout_ref.model.enable_activation_offload": missing(
        "write train.gradient_checkpointing: true", (False,)
    ),
    "actor_rollout_ref.model.use_remove_padding": to("train.packing"),
    "actor_rollout_ref.model.use_fused_kernels": needless("log-probs are computed in chunks of the vocabulary"),
    "actor_rollout_ref.model.use_liger": needless("log-probs are computed in chunks of the vocabulary"),
    "actor_rollout_ref.model.use_shm": needless("weights are read once by each host"),
    "actor_rollout_ref.model.lora_rank": to("model.lora.rank", convert=int, neutral=(0,)),
    "actor_rollout_ref.model.lora_alpha": combined(),
    "actor_rollout_ref.model.target_modules": combined(),
    "actor_rollout_ref.model.exclude_modules": missing(
        "write model.lora.target_modules, the modules that get adapters"
    ),
    **_optimizer(f"{ACTOR}optim", "train.optimizer"),
    **_optimizer("critic.optim", "train.critic_optimizer"),
    f"{ACTOR}grad_clip": to("train.optimizer.max_grad_norm", convert=float),
    "critic.grad_clip": to("train.critic_optimizer.max_grad_norm", convert=float),
    f"{ACTOR}strategy": needless("DeepSpeed ZeRO divides the model, whatever the strategy"),
    "critic.strategy": needless("DeepSpeed ZeRO divides the model, whatever the strategy"),
    f"{ACTOR}ppo_mini_batch_size": combined(),
    "critic.ppo_mini_batch_size": needless("the critic takes the minibatches of the policy"),
    f"{ACTOR}ppo_micro_batch_size": combined(),
    f"{ACTOR}ppo_micro_batch_size_per_gpu": combined(),
    "critic.ppo_micro_batch_size": _BY_TOKENS,
    "critic.ppo_micro_batch_size_per_gpu": _BY_TOKENS,
    f"{ACTOR}use_dynamic_bsz": needless("micro-batches are always filled by tokens"),
    "critic.use_dynamic_bsz": needless("micro-batches are always filled by tokens"),
    f"{ACTOR}ppo_max_token_len_per_gpu": combined(),
    "critic.ppo_max_token_len_per_gpu": _BY_TOKENS,
    "critic.forward_max_token_len_per_gpu": _BY_TOKENS,
    f"{ACTOR}ppo_epochs": to("train.epochs_per_step", convert=int),
    "critic.ppo_epochs": needless("the critic takes the passes of the policy"),
    f"{ACTOR}shuffle": needless("minibatches are balanced by length"),
    f"{ACTOR}clip_ratio": combined(),
    f"{ACTOR}clip_ratio_low": combined(),
    f"{ACTOR}clip_ratio_high": combined(),
    f"{ACTOR}clip_ratio_c": combined(),
    f"{ACTOR}policy_loss.loss_mode": combined(),
    f"{ACTOR}loss_agg_mode": combined(),
    f"{ACTOR}entropy_coeff": to("algorithm.loss_options.entropy_coef", convert=float),
    f"{ACTOR}entropy_checkpointing": needless("log-probs and entropies are computed in chunks"),
    f"{ACTOR}entropy_from_logits_with_chunking": needless("log-probs and entropies are computed in chunks"),
    f"{ACTOR}use_torch_compile": needless("kernels are chosen by the engine"),
    f"{ACTOR}use_kl_loss": combined(),
    f"{ACTOR}kl_loss_coef": combined(),
    f"{ACTOR}kl_loss_type": combined(),
    f"{ACTOR}ulysses_sequence_parallel_size": to("train.sequence_parallel_size", convert=int),
    "critic.ulysses_sequence_parallel_size": needless("all roles divide sequences alike"),
    f"{REF}ulysses_sequence_parallel_size": needless("all roles divide sequences alike"),
    f"{ACTOR}fsdp_config.param_offload": to("train.options.offload_parameters"),
    f"{ACTOR}fsdp_config.optimizer_offload": to("train.options.offload_optimizer"),
    f"{ACTOR}fsdp_config.model_dtype": combined("model.dtype is bfloat16, with an optimizer that keeps 32 bits"),
    f"{ACTOR}fsdp_config.fsdp_size": missing("write train.options.zero_hpz_partition_size", neutral=(-1,)),
    f"{ACTOR}fsdp_config.forward_prefetch": needless("ZeRO-3 fetches ahead"),
    "critic.model.fsdp_config.param_offload": combined(),
    "critic.model.fsdp_config.optimizer_offload": combined(),
    f"{REF}fsdp_config.param_offload": combined(),
    f"{REF}strategy": needless("DeepSpeed ZeRO divides the model, whatever the strategy"),
    **{
        f"{role}{name}": _BY_TOKENS
        for role in (REF, ROLLOUT)
        for name in (
            "log_prob_micro_batch_size",
            "log_prob_micro_batch_size_per_gpu",
            "log_prob_use_dynamic_bsz",
            "log_prob_max_token_len_per_gpu",
        )
    },
    f"{ROLLOUT}name": combined(),
    f"{ROLLOUT}mode": needless("engines always take requests one by one"),
    f"{ROLLOUT}n": to("rollout.samples_per_prompt", convert=int),
    f"{ROLLOUT}temperature": to("rollout.sampling.temperature", convert=float),
    f"{ROLLOUT}top_p": to("rollout.sampling.top_p", convert=float),
    f"{ROLLOUT}top_k": to("rollout.sampling.top_k", convert=lambda value: max(0, int(value))),
    f"{ROLLOUT}tensor_model_parallel_size": combined(),
    f"{ROLLOUT}gpu_memory_utilization": to("rollout.options.gpu_memory_utilization", convert=float),
    f"{ROLLOUT}enforce_eager": to("rollout.options.enforce_eager"),
    f"{ROLLOUT}enable_prefix_caching": to("rollout.options.enable_prefix_caching"),
    f"{ROLLOUT}enable_chunked_prefill": to("rollout.options.enable_chunked_prefill"),
    f"{ROLLOUT}max_num_batched_tokens": to("rollout.options.max_num_batched_tokens", convert=int),
    f"{ROLLOUT}max_num_seqs": to("rollout.max_num_seqs", convert=int),
    f"{ROLLOUT}max_model_len": needless("it follows from lengths"),
    f"{ROLLOUT}dtype": needless("the engines run in model.dtype"),
    f"{ROLLOUT}free_cache_engine": needless("engines sleep wherever they share devices"),
    f"{ROLLOUT}load_format": needless("engines get their weights from the trainer"),
    f"{ROLLOUT}layered_summon": needless("weights are gathered bucket by bucket"),
    f"{ROLLOUT}disable_log_stats": needless("a detail of the engine's own log"),
    f"{ROLLOUT}calculate_log_probs": needless("log-probs always travel with the samples"),
    f"{ROLLOUT}val_kwargs.do_sample": combined(),
    f"{ROLLOUT}val_kwargs.temperature": combined(),
    f"{ROLLOUT}val_kwargs.top_p": combined(),
    f"{ROLLOUT}val_kwargs.top_k": missing("evaluation has no top_k", neutral=(-1, 0)),
    f"{ROLLOUT}val_kwargs.n": combined(),
    "critic.model.path": to("model.critic"),
    "critic.model.tokenizer_path": needless("policy and critic have one tokenizer"),
    "critic.model.use_remove_padding": needless("all roles run unpadded, by train.packing"),
    "critic.model.enable_gradient_checkpointing": needless(
        "train.gradient_checkpointing holds for the critic, too"
    ),
    "critic.model.trust_remote_code": needless("model.trust_remote_code holds for all models"),
    "critic.cliprange_value": combined(),
    "reward_model.enable": combined(),
    "reward_model.model.path": combined(),
    "reward_model.model.input_tokenizer": needless(
        "texts are tokenised anew for a reward model of another tokenizer"
    ),
    "reward_model.model.use_remove_padding": needless("all roles run unpadded, by train.packing"),
    "reward_model.model.fsdp_config.param_offload": combined(),
    "reward_model.micro_batch_size_per_gpu": _BY_TOKENS,
    "reward_model.use_reward_loop": needless("samples are scored as they finish"),
    "reward_model.use_dynamic_bsz": needless("micro-batches are always filled by tokens"),
    "reward_model.num_workers": needless("the reward model has the ranks of its placement"),
    "reward_model.reward_manager": combined("only its reward function is taken; write it as reward.function"),
    "reward_model.rollout.*": needless("a training engine scores; it has no sampling of its own"),
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": combined(),
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": combined(),
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": combined(),
    "reward_model.reward_kwargs.overlong_buffer_cfg.log": needless("the penalty is always a metric of its own"),
    "reward_model.reward_kwargs.max_resp_len": needless("it follows from data.max_response_length"),
    "custom_reward_function.path": combined(),
    "custom_reward_function.name": combined(),
    "trainer.n_gpus_per_node": combined(),
    "trainer.nnodes": combined(),
    "trainer.total_epochs": combined(),
    "trainer.total_training_steps": to("train.steps", convert=int),
    "trainer.critic_warmup": to("train.critic_warmup_steps", convert=int),
    "trainer.save_freq": to("checkpoint.every", convert=every),
    "trainer.test_freq": to("evaluation.every", convert=every),
    "trainer.val_before_train": needless("an evaluation stands at the start and at the end"),
    "trainer.log_val_generations": needless("samples.jsonl has an account of every prompt"),
    "trainer.max_actor_ckpt_to_keep": to("checkpoint.keep", convert=int),
    "trainer.max_critic_ckpt_to_keep": needless("checkpoints hold policy and critic together"),
    "trainer.default_local_dir": to("output"),
    "trainer.resume_mode": differs("add --resume to the command; without a checkpoint leave it out"),
    "trainer.logger": combined("metrics.jsonl and TensorBoard files are written; other trackers are not connected"),
    "trainer.project_name": needless("a run is known by its output directory"),
    "trainer.experiment_name": combined(),
    "trainer.balance_batch": needless("lengths are always balanced among ranks"),
    "trainer.use_legacy_worker_impl": needless("a detail of their workers"),
    "actor_rollout_ref.nccl_timeout": to("placement.timeout_s", convert=float),
    f"{ACTOR}calculate_sum_pi_squared": needless("what an estimator reads is computed with the log-probs"),
    f"{ACTOR}checkpoint.*": missing(
        "a checkpoint holds all that a run needs to go on; the end is a Transformers model"
    ),
    f"{ACTOR}tau_pos": missing("write algorithm.loss_options"),
    f"{ACTOR}tau_neg": missing("write algorithm.loss_options"),
    "actor_rollout_ref.model.torch_dtype": to("model.dtype"),
    f"{ROLLOUT}data_parallel_size": missing("write rollout.engines", neutral=(1,)),
    f"{ROLLOUT}expert_parallel_size": missing(
        "write rollout.options: {enable_expert_parallel: true}", neutral=(1,)
    ),
    f"{ROLLOUT}engine_kwargs.*": missing("write engine arguments of vLLM into rollout.options"),
    "--config*": missing("settings of another file are not read; write them as overrides"),
    "*megatron*": missing("DeepSpeed ZeRO divides the model; write train.options and train.sequence_parallel_size"),
    f"{ROLLOUT}multi_turn.*": missing("write rollout.agent with an environment of yours (docs/agents.md)"),
    "*profiler*": missing("times of every phase are in metrics.jsonl"),
}
"""A name with `*` stands for all settings of that form."""

DEFAULTS: Mapping[str, Any] = {
    "algorithm.gamma": 1.0,
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{ROLLOUT}n": 1,
    f"{ROLLOUT}temperature": 1.0,
    f"{ACTOR}optim.lr": 1e-6,
    f"{ACTOR}optim.weight_decay": 0.01,
    f"{ACTOR}optim.betas": [0.9, 0.999],
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    f"{ROLLOUT}gpu_memory_utilization": 0.5,
}
CRITIC_DEFAULTS = {"critic.optim.lr": 1e-5, "critic.optim.weight_decay": 0.01, "critic.optim.betas": [0.9, 0.999]}
