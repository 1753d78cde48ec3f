"""verl's command lines (`python3 -m verl.trainer.main_ppo data.train_files=... ...`) as configurations of ours."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import yaml
from rlhf_core import ConfigError

from rlhf_launch.importing.engine import Draft, Import, apply_table, finish, reading
from rlhf_launch.importing.shell import command_lines
from rlhf_launch.importing.values import number_or_text
from rlhf_launch.importing.verl.table import (
    ACTOR,
    AGGREGATIONS,
    CRITIC_DEFAULTS,
    DEFAULTS,
    ESTIMATORS,
    KL,
    LOSSES,
    ONLINE,
    REF,
    ROLLOUT,
)

MARKER = "verl.trainer."
_COLUMNS = {"prompt": "prompt_key", "images": "image_key"}
"""Our columns, and the settings that name theirs."""


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
    draft = Draft(given=given, written=written, defaults={**DEFAULTS, **(CRITIC_DEFAULTS if critic else {})})
    for key, value in given.items():
        if isinstance(value, str) and "$" in value:
            draft.remarks.append(f"{key} has a shell variable without a value: {value}. Replace it in the file.")
    apply_table(draft, table)
    with reading(command[0]):
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
        sampled = draft.value(f"{ROLLOUT}val_kwargs.do_sample", False)
        evaluated: dict[str, Any] = {
            "data": _files(draft, "data.val_files", "data.val_max_samples"),
            "samples": int(draft.value(f"{ROLLOUT}val_kwargs.n", 1)),
            "temperature": float(draft.value(f"{ROLLOUT}val_kwargs.temperature", 0)) if sampled else 0.0,
        }
        if sampled:
            evaluated["top_p"] = float(draft.value(f"{ROLLOUT}val_kwargs.top_p", 1.0))
        draft.put("evaluation.sets.val", evaluated)


def _files(draft: Draft, name: str, limit: str) -> list[dict[str, Any]]:
    files = draft.value(name)
    sources: list[dict[str, Any]] = [
        {"path": str(path)} for path in (files if isinstance(files, list) else [files])
    ]
    for source in sources:
        theirs = {ours: str(draft.value(f"data.{key}", ours)) for ours, key in _COLUMNS.items()}
        if renamed := {ours: column for ours, column in theirs.items() if ours != column}:
            source["columns"] = renamed
        if int(draft.value(limit, -1)) > 0:
            source["limit"] = int(draft.value(limit))
    return sources


def _write_algorithm(draft: Draft, critic: bool) -> None:
    estimator = str(draft.value("algorithm.adv_estimator", "gae"))
    if estimator not in ESTIMATORS:
        raise ConfigError(f"algorithm.adv_estimator={estimator}: known are {', '.join(ESTIMATORS)}")
    name, options = ESTIMATORS[estimator]
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
    mode = str(draft.value(f"{ACTOR}policy_loss.loss_mode", "vanilla"))
    if mode not in LOSSES:
        raise ConfigError(f"policy_loss.loss_mode={mode}: known are {', '.join(LOSSES)}")
    options = "algorithm.loss_options"
    if LOSSES[mode]:
        draft.put("algorithm.loss", LOSSES[mode])
    aggregation = str(draft.value(f"{ACTOR}loss_agg_mode", "token-mean"))
    if aggregation not in AGGREGATIONS:
        raise ConfigError(f"loss_agg_mode={aggregation}: known are {', '.join(AGGREGATIONS)}")
    draft.put(f"{options}.aggregation", AGGREGATIONS[aggregation])
    if aggregation == "seq-mean-token-sum-norm":
        draft.put(f"{options}.max_length", draft.take("rollout.sampling.max_tokens"))
    both = float(draft.value(f"{ACTOR}clip_ratio", 0.2))
    low = float(draft.value(f"{ACTOR}clip_ratio_low", both))
    high = float(draft.value(f"{ACTOR}clip_ratio_high", both))
    if mode == "cispo":
        draft.put(f"{options}.ratio_low", max(0.0, 1 - low))
        draft.put(f"{options}.ratio_high", 1 + high)
    elif mode != "sapo":
        draft.put(f"{options}.clip_range", low)
        draft.put(f"{options}.clip_range_high", high)
    if mode == "gspo":
        draft.put(f"{options}.token_form", True)
    if mode == "vanilla" and draft.settings["algorithm"]["name"] != "gpg":
        draft.put(f"{options}.dual_clip", float(draft.value(f"{ACTOR}clip_ratio_c", 3.0)))
    if draft.settings["algorithm"]["name"] == "gpg":
        for name in ("clip_range", "clip_range_high"):
            draft.settings["algorithm"]["loss_options"].pop(name)


def _write_kl(draft: Draft) -> None:
    in_reward, in_loss = (
        draft.value("algorithm.use_kl_in_reward", False),
        draft.value(f"{ACTOR}use_kl_loss", False),
    )
    if in_reward:
        draft.put("algorithm.kl_coef", float(draft.value("algorithm.kl_ctrl.kl_coef", 0.001)))
        summed = draft.settings["algorithm"]["name"] not in ("ppo", "reinforce_pp")
        draft.put("algorithm.kl_in", "score" if summed else "reward")
        draft.put("algorithm.kl_estimator", KL[str(draft.value("algorithm.kl_penalty", "kl"))])
        if draft.value("algorithm.kl_ctrl.type", "fixed") == "adaptive":
            draft.put("algorithm.kl_target", float(draft.value("algorithm.kl_ctrl.target_kl", 0.1)))
        if in_loss:
            draft.refused(f"{ACTOR}use_kl_loss", "one KL term alone: that in the reward was taken")
    elif in_loss:
        draft.put("algorithm.kl_coef", float(draft.value(f"{ACTOR}kl_loss_coef", 0.001)))
        draft.put("algorithm.kl_in", "loss")
        kind = str(draft.value(f"{ACTOR}kl_loss_type", "low_var_kl"))
        draft.put("algorithm.kl_estimator", KL[kind.removesuffix("+")])
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
            "put the file's folder on PYTHONPATH, and change the function: it is called with completions, prompts "
            "and the columns of the data, each a list, and returns a list of numbers",
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
    mini = min(prompts, int(draft.value(f"{ACTOR}ppo_mini_batch_size", 256)))
    draft.put("train.minibatches", max(1, prompts // mini))
    if prompts % mini:
        draft.noted(f"{ACTOR}ppo_mini_batch_size", "minibatches are cut to nearly equal size")
    longest = draft.take("lengths.max_prompt_tokens") + draft.take("rollout.sampling.max_tokens")
    micro = draft.value(f"{ACTOR}ppo_micro_batch_size_per_gpu")
    if draft.value(f"{ACTOR}use_dynamic_bsz", False) or micro is None:
        tokens = draft.value(f"{ACTOR}ppo_max_token_len_per_gpu", 16384)
        draft.put("train.max_tokens_per_micro_batch", int(tokens))
        draft.noted(f"{ACTOR}ppo_micro_batch_size_per_gpu", "not used with dynamic batches, as in verl")
    else:
        draft.put("train.max_tokens_per_micro_batch", int(micro) * longest)
        draft.noted(f"{ACTOR}ppo_micro_batch_size_per_gpu", f"in tokens: {micro} sequences of {longest}")
    draft.noted(f"{ACTOR}ppo_micro_batch_size", "write train.max_tokens_per_micro_batch, tokens of one rank")
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
    sliced = int(draft.value(f"{ROLLOUT}tensor_model_parallel_size", 2))
    draft.put("train.ranks", gpus * hosts)
    if hosts > 1:
        draft.put("placement.policy.hosts", hosts)
    draft.put("rollout.tensor_parallel_size", sliced)
    draft.put("rollout.engines", max(1, gpus * hosts // sliced))
    backend = str(draft.value(f"{ROLLOUT}name", "vllm"))
    draft.put("rollout.backend", "transformers" if backend == "hf" else "vllm")
    if backend not in ("vllm", "hf"):
        draft.noted(f"{ROLLOUT}name", f"vLLM in place of {backend}")
    draft.put("placement.rollout.colocate_with", "policy")
    if critic:
        draft.put("placement.critic.colocate_with", "policy")
        for what in ("param", "optimizer"):
            if draft.value(f"critic.model.fsdp_config.{what}_offload", False):
                key = "offload_parameters" if what == "param" else "offload_optimizer"
                draft.put(f"placement.critic.options.{key}", True)
    if draft.take("algorithm.kl_coef") and draft.take("model.lora") is None:
        draft.put("placement.reference.colocate_with", "policy")
        if draft.value(f"{REF}fsdp_config.param_offload", False):
            draft.put("placement.reference.options.offload_parameters", True)
    elif f"{REF}fsdp_config.param_offload" in draft.given:
        draft.noted(f"{REF}fsdp_config.param_offload", "not used: the run has no reference of its own")
    if draft.take("reward.model"):
        draft.put("placement.reward.model", {"ranks": gpus * hosts, "colocate_with": "policy"})
        if draft.value("reward_model.model.fsdp_config.param_offload", False):
            draft.put("placement.reward.model.options.offload_parameters", True)
