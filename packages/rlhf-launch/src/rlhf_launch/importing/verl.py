"""verl's command lines (`python3 -m verl.trainer.main_ppo data.train_files=... ...`) as configurations of ours."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import yaml
from rlhf_core import ConfigError

from rlhf_launch.importing.engine import (
    Draft,
    Import,
    Rule,
    apply_table,
    combined,
    differs,
    finish,
    missing,
    needless,
    to,
)
from rlhf_launch.importing.openrlhf_common import every
from rlhf_launch.importing.openrlhf_names import number_or_text
from rlhf_launch.importing.shell import command_lines

MARKER = "verl.trainer."
_ACTOR, _ROLLOUT, _REF = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.ref."
_AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "max_length",
}
_KL = {"low_var_kl": "k3", "k3": "k3", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "abs": "abs"}
_ESTIMATORS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
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
_LOSSES = {
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
    "data.image_key": missing("prompts are text here"),
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
    **_optimizer(f"{_ACTOR}optim", "train.optimizer"),
    **_optimizer("critic.optim", "train.critic_optimizer"),
    f"{_ACTOR}grad_clip": to("train.optimizer.max_grad_norm", convert=float),
    "critic.grad_clip": to("train.critic_optimizer.max_grad_norm", convert=float),
    f"{_ACTOR}strategy": needless("DeepSpeed ZeRO divides the model, whatever the strategy"),
    "critic.strategy": needless("DeepSpeed ZeRO divides the model, whatever the strategy"),
    f"{_ACTOR}ppo_mini_batch_size": combined(),
    "critic.ppo_mini_batch_size": needless("the critic takes the minibatches of the policy"),
    f"{_ACTOR}ppo_micro_batch_size": combined(),
    f"{_ACTOR}ppo_micro_batch_size_per_gpu": combined(),
    "critic.ppo_micro_batch_size": _BY_TOKENS,
    "critic.ppo_micro_batch_size_per_gpu": _BY_TOKENS,
    f"{_ACTOR}use_dynamic_bsz": needless("micro-batches are always filled by tokens"),
    "critic.use_dynamic_bsz": needless("micro-batches are always filled by tokens"),
    f"{_ACTOR}ppo_max_token_len_per_gpu": combined(),
    "critic.ppo_max_token_len_per_gpu": _BY_TOKENS,
    "critic.forward_max_token_len_per_gpu": _BY_TOKENS,
    f"{_ACTOR}ppo_epochs": to("train.epochs_per_step", convert=int),
    "critic.ppo_epochs": needless("the critic takes the passes of the policy"),
    f"{_ACTOR}shuffle": needless("minibatches are balanced by length"),
    f"{_ACTOR}clip_ratio": combined(),
    f"{_ACTOR}clip_ratio_low": combined(),
    f"{_ACTOR}clip_ratio_high": combined(),
    f"{_ACTOR}clip_ratio_c": combined(),
    f"{_ACTOR}policy_loss.loss_mode": combined(),
    f"{_ACTOR}loss_agg_mode": combined(),
    f"{_ACTOR}entropy_coeff": to("algorithm.loss_options.entropy_coef", convert=float),
    f"{_ACTOR}entropy_checkpointing": needless("log-probs and entropies are computed in chunks"),
    f"{_ACTOR}entropy_from_logits_with_chunking": needless("log-probs and entropies are computed in chunks"),
    f"{_ACTOR}use_torch_compile": needless("kernels are chosen by the engine"),
    f"{_ACTOR}use_kl_loss": combined(),
    f"{_ACTOR}kl_loss_coef": combined(),
    f"{_ACTOR}kl_loss_type": combined(),
    f"{_ACTOR}ulysses_sequence_parallel_size": to("train.sequence_parallel_size", convert=int),
    "critic.ulysses_sequence_parallel_size": needless("all roles divide sequences alike"),
    f"{_REF}ulysses_sequence_parallel_size": needless("all roles divide sequences alike"),
    f"{_ACTOR}fsdp_config.param_offload": to("train.options.offload_parameters"),
    f"{_ACTOR}fsdp_config.optimizer_offload": to("train.options.offload_optimizer"),
    f"{_ACTOR}fsdp_config.model_dtype": combined("model.dtype is bfloat16, with an optimizer that keeps 32 bits"),
    f"{_ACTOR}fsdp_config.fsdp_size": missing("write train.options.zero_hpz_partition_size", neutral=(-1,)),
    f"{_ACTOR}fsdp_config.forward_prefetch": needless("ZeRO-3 fetches ahead"),
    "critic.model.fsdp_config.param_offload": combined(),
    "critic.model.fsdp_config.optimizer_offload": combined(),
    f"{_REF}fsdp_config.param_offload": combined(),
    f"{_REF}strategy": needless("DeepSpeed ZeRO divides the model, whatever the strategy"),
    **{
        f"{role}{name}": _BY_TOKENS
        for role in (_REF, _ROLLOUT)
        for name in (
            "log_prob_micro_batch_size",
            "log_prob_micro_batch_size_per_gpu",
            "log_prob_use_dynamic_bsz",
            "log_prob_max_token_len_per_gpu",
        )
    },
    f"{_ROLLOUT}name": combined(),
    f"{_ROLLOUT}mode": needless("engines always take requests one by one"),
    f"{_ROLLOUT}n": to("rollout.samples_per_prompt", convert=int),
    f"{_ROLLOUT}temperature": to("rollout.sampling.temperature", convert=float),
    f"{_ROLLOUT}top_p": to("rollout.sampling.top_p", convert=float),
    f"{_ROLLOUT}top_k": to("rollout.sampling.top_k", convert=lambda value: max(0, int(value))),
    f"{_ROLLOUT}tensor_model_parallel_size": combined(),
    f"{_ROLLOUT}gpu_memory_utilization": to("rollout.options.gpu_memory_utilization", convert=float),
    f"{_ROLLOUT}enforce_eager": to("rollout.options.enforce_eager"),
    f"{_ROLLOUT}enable_prefix_caching": to("rollout.options.enable_prefix_caching"),
    f"{_ROLLOUT}enable_chunked_prefill": to("rollout.options.enable_chunked_prefill"),
    f"{_ROLLOUT}max_num_batched_tokens": to("rollout.options.max_num_batched_tokens", convert=int),
    f"{_ROLLOUT}max_num_seqs": to("rollout.max_num_seqs", convert=int),
    f"{_ROLLOUT}max_model_len": needless("it follows from lengths"),
    f"{_ROLLOUT}dtype": needless("the engines run in model.dtype"),
    f"{_ROLLOUT}free_cache_engine": needless("engines sleep wherever they share devices"),
    f"{_ROLLOUT}load_format": needless("engines get their weights from the trainer"),
    f"{_ROLLOUT}layered_summon": needless("weights are gathered bucket by bucket"),
    f"{_ROLLOUT}disable_log_stats": needless("a detail of the engine's own log"),
    f"{_ROLLOUT}calculate_log_probs": needless("log-probs always travel with the samples"),
    f"{_ROLLOUT}val_kwargs.do_sample": combined(),
    f"{_ROLLOUT}val_kwargs.temperature": combined(),
    f"{_ROLLOUT}val_kwargs.top_p": combined(),
    f"{_ROLLOUT}val_kwargs.top_k": missing("evaluation has no top_k", neutral=(-1, 0)),
    f"{_ROLLOUT}val_kwargs.n": combined(),
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
    f"{_ACTOR}calculate_sum_pi_squared": needless("what an estimator reads is computed with the log-probs"),
    f"{_ACTOR}checkpoint.*": missing(
        "a checkpoint holds all that a run needs to go on; the end is a Transformers model"
    ),
    f"{_ACTOR}tau_pos": missing("write algorithm.loss_options"),
    f"{_ACTOR}tau_neg": missing("write algorithm.loss_options"),
    "actor_rollout_ref.model.torch_dtype": to("model.dtype"),
    f"{_ROLLOUT}data_parallel_size": missing("write rollout.engines", neutral=(1,)),
    f"{_ROLLOUT}expert_parallel_size": missing(
        "write rollout.options: {enable_expert_parallel: true}", neutral=(1,)
    ),
    f"{_ROLLOUT}engine_kwargs.*": missing("write engine arguments of vLLM into rollout.options"),
    "--config*": missing("settings of another file are not read; write them as overrides"),
    "*megatron*": missing("DeepSpeed ZeRO divides the model; write train.options and train.sequence_parallel_size"),
    f"{_ROLLOUT}multi_turn.*": missing("write rollout.agent with an environment of yours (docs/agents.md)"),
    "*profiler*": missing("times of every phase are in metrics.jsonl"),
}
"""A name with `*` stands for all settings of that form."""

DEFAULTS: Mapping[str, Any] = {
    "algorithm.gamma": 1.0,
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{_ROLLOUT}n": 1,
    f"{_ROLLOUT}temperature": 1.0,
    f"{_ACTOR}optim.lr": 1e-6,
    f"{_ACTOR}optim.weight_decay": 0.01,
    f"{_ACTOR}optim.betas": [0.9, 0.999],
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    f"{_ROLLOUT}gpu_memory_utilization": 0.5,
}
_CRITIC_DEFAULTS = {"critic.optim.lr": 1e-5, "critic.optim.weight_decay": 0.01, "critic.optim.betas": [0.9, 0.999]}


def find_commands(text: str, variables: Mapping[str, str] | None = None) -> list[list[str]]:
    """The verl commands in a script or a command line; overrides alone are taken for those of `main_ppo`.

    Raises:
        ConfigError: there is none, or a quote is not closed.
    """
    if MARKER not in text and "=" in text and "#!" not in text:
        text = f"{MARKER}main_ppo {text}"
    commands = command_lines(text, MARKER, variables)
    if not commands:
        raise ConfigError(f"no verl command found: no word begins with {MARKER!r} (for instance {MARKER}main_ppo)")
    return commands


def import_verl(command: list[str]) -> Import:
    """Our configuration for a verl command.

    Args:
        command: the entry point and its overrides: `["verl.trainer.main_ppo", "data.train_files=...", ...]`.

    Raises:
        ConfigError: another entry point than `main_ppo`, a word that is no override, or settings that our own
            reader refuses.
    """
    if command[0] != f"{MARKER}main_ppo":
        raise ConfigError(
            f"{command[0]}: only {MARKER}main_ppo is known; start an offline run with `rlhf init sft`"
        )
    given: dict[str, Any] = {}
    written: dict[str, str] = {}
    for word in command[1:]:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is no override of the form key=value")
        key = name.lstrip("+~")
        given[key], written[key] = _value(value), name
    known = {key: next((rule for rule in ONLINE if fnmatch.fnmatchcase(key, rule)), key) for key in given}
    table = {**ONLINE, **{key: ONLINE[rule] for key, rule in known.items() if rule in ONLINE}}
    critic = given.get("algorithm.adv_estimator", "gae") == "gae"
    draft = Draft(given=given, written=written, defaults={**DEFAULTS, **(_CRITIC_DEFAULTS if critic else {})})
    for key, value in given.items():
        if isinstance(value, str) and "$" in value:
            draft.remarks.append(f"{key} has a shell variable without a value: {value}. Replace it in the file.")
    apply_table(draft, table)
    _write_model_and_data(draft)
    _write_algorithm(draft, critic)
    _write_reward(draft)
    _write_batches(draft)
    _write_placement(draft, critic)
    return finish(draft, command="rlhf train", source=f"{MARKER}main_ppo")


def _value(text: str) -> Any:
    number = number_or_text(text)
    if not isinstance(number, str):
        return number
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _write_model_and_data(draft: Draft) -> None:
    if not draft.on("actor_rollout_ref.model.path"):
        raise ConfigError("the command names no model; add actor_rollout_ref.model.path=...")
    if not draft.on("data.train_files"):
        raise ConfigError("the command names no data; add data.train_files=...")
    if draft.take("model.dtype") is None:
        draft.put("model.dtype", "bfloat16")
    if draft.take("model.lora") is not None:
        draft.put("model.lora.alpha", float(draft.value("actor_rollout_ref.model.lora_alpha", 16)))
        draft.put("model.lora.target_modules", draft.value("actor_rollout_ref.model.target_modules", "all-linear"))
    draft.put("data.train", _files(draft, "data.train_files", "data.train_max_samples"))
    draft.put("lengths.long_prompts", "drop" if draft.value("data.filter_overlong_prompts") else "error")
    if draft.value("data.truncation", "error") == "left":
        draft.put("lengths.long_prompts", "keep_end")
    elif draft.value("data.truncation", "error") != "error":
        draft.noted("data.truncation", "a prompt keeps its end, or is left out; see lengths.long_prompts")
    if draft.on("data.val_files"):
        sampled = draft.value(f"{_ROLLOUT}val_kwargs.do_sample", False)
        evaluated: dict[str, Any] = {
            "data": _files(draft, "data.val_files", "data.val_max_samples"),
            "samples": int(draft.value(f"{_ROLLOUT}val_kwargs.n", 1)),
            "temperature": float(draft.value(f"{_ROLLOUT}val_kwargs.temperature", 0)) if sampled else 0.0,
        }
        if sampled:
            evaluated["top_p"] = float(draft.value(f"{_ROLLOUT}val_kwargs.top_p", 1.0))
        draft.put("evaluation.sets.val", evaluated)


def _files(draft: Draft, name: str, limit: str) -> list[dict[str, Any]]:
    files = draft.value(name)
    sources = [{"path": str(path)} for path in (files if isinstance(files, list) else [files])]
    for source in sources:
        if draft.value("data.prompt_key", "prompt") != "prompt":
            source["columns"] = {"prompt": str(draft.value("data.prompt_key"))}
        if int(draft.value(limit, -1)) > 0:
            source["limit"] = int(draft.value(limit))
    return sources


def _write_algorithm(draft: Draft, critic: bool) -> None:
    estimator = str(draft.value("algorithm.adv_estimator", "gae"))
    if estimator not in _ESTIMATORS:
        raise ConfigError(f"algorithm.adv_estimator={estimator}: known are {', '.join(_ESTIMATORS)}")
    name, options = _ESTIMATORS[estimator]
    draft.put("algorithm.name", name)
    for key, value in options.items():
        draft.put(f"algorithm.{key}", value)
    if critic:
        draft.put("algorithm.lam", float(draft.value("algorithm.lam", 1.0)))
        draft.put("algorithm.value_loss_options.clip_range", float(draft.value("critic.cliprange_value", 0.5)))
    else:
        draft.settings["train"].pop("critic_optimizer", None)
        draft.settings["model"].pop("critic", None)
        if not draft.value("trainer.critic_warmup", 0):
            draft.settings["train"].pop("critic_warmup_steps", None)
        for key in draft.given:
            if key.startswith("critic."):
                draft.noted(key, f"{estimator} has no critic: not used, as in verl")
    if not draft.value("algorithm.norm_adv_by_std_in_grpo", True):
        draft.put("algorithm.advantage_options.scale", "none")
    _write_loss(draft)
    _write_kl(draft)
    if draft.value("reward_model.reward_kwargs.overlong_buffer_cfg.enable", False):
        prefix = "reward_model.reward_kwargs.overlong_buffer_cfg"
        draft.put("algorithm.shaping.overlong_max_length", draft.take("rollout.sampling.max_tokens"))
        draft.put("algorithm.shaping.overlong_buffer", int(draft.value(f"{prefix}.len")))
        draft.put("algorithm.shaping.overlong_penalty", float(draft.value(f"{prefix}.penalty_factor", 1.0)))
        draft.put("algorithm.shaping.overlong_grows", True)


def _write_loss(draft: Draft) -> None:
    mode = str(draft.value(f"{_ACTOR}policy_loss.loss_mode", "vanilla"))
    if mode not in _LOSSES:
        raise ConfigError(f"policy_loss.loss_mode={mode}: known are {', '.join(_LOSSES)}")
    options = "algorithm.loss_options"
    if _LOSSES[mode]:
        draft.put("algorithm.loss", _LOSSES[mode])
    aggregation = str(draft.value(f"{_ACTOR}loss_agg_mode", "token-mean"))
    if aggregation not in _AGGREGATIONS:
        raise ConfigError(f"loss_agg_mode={aggregation}: known are {', '.join(_AGGREGATIONS)}")
    draft.put(f"{options}.aggregation", _AGGREGATIONS[aggregation])
    if aggregation == "seq-mean-token-sum-norm":
        draft.put(f"{options}.max_length", draft.take("rollout.sampling.max_tokens"))
    both = float(draft.value(f"{_ACTOR}clip_ratio", 0.2))
    low = float(draft.value(f"{_ACTOR}clip_ratio_low", both))
    high = float(draft.value(f"{_ACTOR}clip_ratio_high", both))
    if mode == "cispo":
        draft.put(f"{options}.ratio_low", max(0.0, 1 - low))
        draft.put(f"{options}.ratio_high", 1 + high)
    elif mode != "sapo":
        draft.put(f"{options}.clip_range", low)
        draft.put(f"{options}.clip_range_high", high)
    if mode == "gspo":
        draft.put(f"{options}.token_form", True)
    if mode == "vanilla" and draft.settings["algorithm"]["name"] != "gpg":
        draft.put(f"{options}.dual_clip", float(draft.value(f"{_ACTOR}clip_ratio_c", 3.0)))
    if draft.settings["algorithm"]["name"] == "gpg":
        for name in ("clip_range", "clip_range_high"):
            draft.settings["algorithm"]["loss_options"].pop(name)


def _write_kl(draft: Draft) -> None:
    in_reward, in_loss = (
        draft.value("algorithm.use_kl_in_reward", False),
        draft.value(f"{_ACTOR}use_kl_loss", False),
    )
    if in_reward:
        draft.put("algorithm.kl_coef", float(draft.value("algorithm.kl_ctrl.kl_coef", 0.001)))
        summed = draft.settings["algorithm"]["name"] not in ("ppo", "reinforce_pp")
        draft.put("algorithm.kl_in", "score" if summed else "reward")
        draft.put("algorithm.kl_estimator", _KL[str(draft.value("algorithm.kl_penalty", "kl"))])
        if draft.value("algorithm.kl_ctrl.type", "fixed") == "adaptive":
            draft.put("algorithm.kl_target", float(draft.value("algorithm.kl_ctrl.target_kl", 0.1)))
        if in_loss:
            draft.refused(f"{_ACTOR}use_kl_loss", "one KL term alone: that in the reward was taken")
    elif in_loss:
        draft.put("algorithm.kl_coef", float(draft.value(f"{_ACTOR}kl_loss_coef", 0.001)))
        draft.put("algorithm.kl_in", "loss")
        kind = str(draft.value(f"{_ACTOR}kl_loss_type", "low_var_kl"))
        draft.put("algorithm.kl_estimator", _KL[kind.removesuffix("+")])
        if kind.endswith("+"):
            draft.put("algorithm.loss_options.kl_gradient", "k2")
    else:
        draft.put("algorithm.kl_coef", 0.0)


def _write_reward(draft: Draft) -> None:
    if draft.value("reward_model.enable", False):
        draft.put("reward.model", str(draft.value("reward_model.model.path")))
        return
    if draft.on("custom_reward_function.path"):
        module = PurePosixPath(str(draft.value("custom_reward_function.path"))).stem
        draft.put("reward.function", f"{module}:{draft.value('custom_reward_function.name', 'compute_score')}")
        draft.noted(
            "custom_reward_function.path",
            "put the file's folder on PYTHONPATH, and change the function: it is called with completions, prompts and "
            "the columns of the data, each a list, and returns a list of numbers",
        )
        return
    draft.put("reward.function", "your_module:compute_score")
    draft.unwritten.append(
        "reward.function stands for verl's rules by data_source, which are not here. Write a function of "
        "completions, prompts and the columns of the data (data_source, reward_model, ...), or take a kind of "
        "reward.parts (math, exact, code, ...)."
    )


def _write_batches(draft: Draft) -> None:
    prompts = int(draft.value("data.train_batch_size"))
    mini = min(prompts, int(draft.value(f"{_ACTOR}ppo_mini_batch_size", 256)))
    draft.put("train.minibatches", max(1, prompts // mini))
    if prompts % mini:
        draft.noted(f"{_ACTOR}ppo_mini_batch_size", "minibatches are cut to nearly equal size")
    longest = draft.take("lengths.max_prompt_tokens") + draft.take("rollout.sampling.max_tokens")
    micro = draft.value(f"{_ACTOR}ppo_micro_batch_size_per_gpu")
    if draft.value(f"{_ACTOR}use_dynamic_bsz", False) or micro is None:
        tokens = draft.value(f"{_ACTOR}ppo_max_token_len_per_gpu", 16384)
        draft.put("train.max_tokens_per_micro_batch", int(tokens))
        draft.noted(f"{_ACTOR}ppo_micro_batch_size_per_gpu", "not used with dynamic batches, as in verl")
    else:
        draft.put("train.max_tokens_per_micro_batch", int(micro) * longest)
        draft.noted(f"{_ACTOR}ppo_micro_batch_size_per_gpu", f"in tokens: {micro} sequences of {longest}")
    draft.noted(f"{_ACTOR}ppo_micro_batch_size", "write train.max_tokens_per_micro_batch, tokens of one rank")
    if "trainer.total_training_steps" not in draft.given:
        draft.noted("trainer.total_epochs", "write train.steps: rows x epochs / train.prompts_per_step")
        draft.remarks.append(f"train.steps is our default of 100: write rows x epochs / {prompts}.")
    if "trainer.default_local_dir" not in draft.given:
        draft.put("output", f"runs/{draft.value('trainer.experiment_name', 'gsm8k')}")


def _write_placement(draft: Draft, critic: bool) -> None:
    gpus, hosts = draft.value("trainer.n_gpus_per_node", 8), draft.value("trainer.nnodes", 1)
    for name, value in (("trainer.n_gpus_per_node", gpus), ("trainer.nnodes", hosts)):
        if not isinstance(value, int):
            draft.remarks.append(f"{name}={value} has no number; {1 if 'nnodes' in name else 8} was taken.")
    gpus, hosts = gpus if isinstance(gpus, int) else 8, hosts if isinstance(hosts, int) else 1
    sliced = int(draft.value(f"{_ROLLOUT}tensor_model_parallel_size", 2))
    draft.put("train.ranks", gpus * hosts)
    if hosts > 1:
        draft.put("placement.policy.hosts", hosts)
    draft.put("rollout.tensor_parallel_size", sliced)
    draft.put("rollout.engines", max(1, gpus * hosts // sliced))
    backend = str(draft.value(f"{_ROLLOUT}name", "vllm"))
    draft.put("rollout.backend", "transformers" if backend == "hf" else "vllm")
    if backend not in ("vllm", "hf"):
        draft.noted(f"{_ROLLOUT}name", f"vLLM in place of {backend}")
    draft.put("placement.rollout.colocate_with", "policy")
    if critic:
        draft.put("placement.critic.colocate_with", "policy")
        for what in ("param", "optimizer"):
            if draft.value(f"critic.model.fsdp_config.{what}_offload", False):
                key = "offload_parameters" if what == "param" else "offload_optimizer"
                draft.put(f"placement.critic.options.{key}", True)
    if draft.take("algorithm.kl_coef") and draft.take("model.lora") is None:
        draft.put("placement.reference.colocate_with", "policy")
        if draft.value(f"{_REF}fsdp_config.param_offload", False):
            draft.put("placement.reference.options.offload_parameters", True)
    elif f"{_REF}fsdp_config.param_offload" in draft.given:
        draft.noted(f"{_REF}fsdp_config.param_offload", "not used: the run has no reference of its own")
    if draft.take("reward.model"):
        draft.put("placement.reward.model", {"ranks": gpus * hosts, "colocate_with": "policy"})
        if draft.value("reward_model.model.fsdp_config.param_offload", False):
            draft.put("placement.reward.model.options.offload_parameters", True)
