"""TRL's YAML files as configurations of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core import ConfigError

from rlhf_launch.importing.engine import Draft, Import, apply_table, finish, reading
from rlhf_launch.importing.trl.table import BATCH, DEFAULTS, METHODS, SCALES, VLLM_CORRECTIONS
from rlhf_launch.importing.values import every


def import_trl(method: str, settings: Mapping[str, Any], *, source: str) -> Import:
    """Our configuration for a TRL file.

    Args:
        method: what follows `trl` on the command line: sft, dpo, kto, reward or grpo.
        settings: the file's content.
        source: its name, for messages.

    Raises:
        ConfigError: another method, a value that cannot be read, or settings that our own reader refuses.
    """
    if method not in METHODS:
        raise ConfigError(f"{method!r} is no method of TRL that is known here; write one of {', '.join(METHODS)}")
    name, table, defaults = METHODS[method]
    given = {key: value for key, value in settings.items() if value is not None}
    draft = Draft(given=given, written={key: key for key in given}, defaults={**DEFAULTS, **defaults})
    draft.put("algorithm.name", name)
    apply_table(draft, table)
    with reading(source):
        _write_shared(draft)
        if method == "grpo":
            _write_grpo(draft)
        else:
            _write_offline(draft, method)
    if method == "grpo":
        return finish(draft, command="rlhf train", source=source)
    return finish(draft, command=f"rlhf offline {name}", source=source)


def _write_shared(draft: Draft) -> None:
    if not draft.on("model_name_or_path"):
        raise ConfigError("the file names no model; add model_name_or_path")
    kinds = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32", "auto": "auto"}
    kind = kinds.get(str(draft.value("dtype", draft.value("torch_dtype", "auto"))), "auto")
    kind = "bfloat16" if draft.value("bf16") else "float16" if draft.value("fp16") else kind
    draft.put("model.dtype", kind)
    if draft.on("use_peft"):
        draft.put("model.lora.rank", int(draft.value("lora_r", 16)))
        draft.put("model.lora.alpha", float(draft.value("lora_alpha", 32)))
        draft.put("model.lora.dropout", float(draft.value("lora_dropout", 0.05)))
        draft.put("model.lora.target_modules", draft.value("lora_target_modules", "all-linear"))
        if draft.on("load_in_4bit"):
            draft.put("model.lora.quantize", str(draft.value("bnb_4bit_quant_type", "nf4")))
    elif draft.on("load_in_4bit"):
        draft.refused("load_in_4bit", "4-bit weights are trained through adapters: write use_peft")
    draft.put(
        "train.optimizer.betas", [float(draft.value("adam_beta1", 0.9)), float(draft.value("adam_beta2", 0.999))]
    )
    if draft.value("lr_scheduler_kwargs"):
        ratio = draft.value("lr_scheduler_kwargs").get("min_lr_rate")
        if ratio is None or len(draft.value("lr_scheduler_kwargs")) > 1:
            draft.refused(
                "lr_scheduler_kwargs", "only min_lr_rate is known: train.optimizer.min_learning_rate_ratio"
            )
        else:
            draft.put("train.optimizer.min_learning_rate_ratio", float(ratio))
    draft.put("data.train", _datasets(draft))
    if draft.value("save_strategy", "steps") == "no":
        draft.put("checkpoint", {"every": 0, "minutes": 0})
    elif draft.value("save_strategy", "steps") == "steps":
        draft.put("checkpoint.every", every(draft.value("save_steps", 500)))
    else:
        draft.noted("save_strategy", "write the steps of an epoch at checkpoint.every")
    if draft.value("eval_strategy", "no") != "no":
        if "eval_steps" in draft.given:
            draft.put("evaluation.every", every(draft.value("eval_steps")))
        split = str(draft.value("dataset_test_split", "test"))
        draft.put("evaluation.data", [{**source, "split": split} for source in _datasets(draft)])
        if draft.value("eval_strategy") == "epoch":
            draft.noted("eval_strategy", "write the steps of an epoch at evaluation.every")
    if "router_aux_loss_coef" in draft.given:
        draft.noted("router_aux_loss_coef", "for mixtures of experts: write algorithm.aux_loss_coef")


def _datasets(draft: Draft) -> list[dict[str, Any]]:
    if draft.on("datasets"):
        found: list[dict[str, Any]] = []
        for part in draft.value("datasets"):
            source = {"path": str(part["path"])}
            source |= {key: part[key] for key in ("name", "split") if part.get(key) not in (None, "train")}
            if lost := set(part) - {"path", "name", "split"}:
                draft.noted("datasets", f"left out: {', '.join(sorted(lost))}; see data.train.*")
            found.append(source)
        return found
    if not draft.on("dataset_name"):
        raise ConfigError("the file names no data; add dataset_name")
    source = {"path": str(draft.value("dataset_name"))}
    if draft.on("dataset_config"):
        source["name"] = str(draft.value("dataset_config"))
    if draft.value("dataset_train_split", "train") != "train":
        source["split"] = str(draft.value("dataset_train_split"))
    return [source]


def _devices_batch(draft: Draft) -> int:
    """Examples per optimizer step of one process, which the file does not count."""
    batch = int(draft.value("per_device_train_batch_size", BATCH)) * int(
        draft.value("gradient_accumulation_steps", 1)
    )
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        draft.noted(name, "batches are counted over all ranks: multiply by the processes that `accelerate` starts")
    draft.remarks.append("train.ranks is 1, as the file does not say how many processes there are.")
    return batch


def _write_offline(draft: Draft, method: str) -> None:
    draft.put("train.batch_size", _devices_batch(draft))
    steps = int(draft.value("max_steps", -1))
    epochs = float(draft.value("num_train_epochs", 3))
    draft.put("train.epochs", max(1, round(epochs)))
    if epochs != round(epochs) or epochs < 1:
        draft.noted("num_train_epochs", "whole passes only; write train.steps for a part of one")
    if steps > 0:
        draft.put("train.steps", steps)
    if draft.value("truncation_mode", "keep_start") != "keep_start":
        draft.noted("truncation_mode", "write lengths.long_prompts: keep_end; a response is always cut at its end")
    if method == "sft" and draft.value("dataset_text_field", "text") != "text":
        for source in draft.settings["data"]["train"]:
            source["columns"] = {"text": str(draft.value("dataset_text_field"))}
    if draft.value("completion_only_loss") is False:
        draft.refused(
            "completion_only_loss", "prompts never count; put prompt and completion into one column `text`"
        )
    if method == "kto" and draft.value("loss_type", "kto") == "apo_zero_unpaired":
        draft.put("algorithm.loss", "apo_zero")


def _write_grpo(draft: Draft) -> None:
    kind = str(draft.value("loss_type", "dapo"))
    aggregations = {
        "grpo": "seq_mean_token_mean",
        "dapo": "token_mean",
        "bnpo": "token_mean",
        "dr_grpo": "max_length",
        "cispo": "token_mean",
        "sapo": "seq_mean_token_mean",
        "luspo": "seq_mean_token_sum",
    }
    if kind not in aggregations:
        raise ConfigError(f"loss_type {kind!r}: known are {', '.join(aggregations)}")
    losses = {"cispo": "cispo", "sapo": "sapo", "luspo": "gspo"}
    options = "algorithm.loss_options"
    if kind in losses:
        draft.put("algorithm.loss", losses[kind])
    if kind in ("cispo", "sapo"):
        high = draft.value("epsilon_high")
        draft.settings["algorithm"]["loss_options"] = {}
        if kind == "cispo" and high is not None:
            draft.put(f"{options}.ratio_low", 0.0)
            draft.put(f"{options}.ratio_high", float(high))
    draft.put(f"{options}.aggregation", aggregations[kind])
    if kind == "dr_grpo":
        draft.put(f"{options}.max_length", int(draft.value("max_completion_length")))
    if kind == "bnpo":
        draft.noted("loss_type", "the mean over the tokens of the batch, not of a micro-batch")
    if draft.value("importance_sampling_level", "token") == "sequence" and kind not in losses:
        draft.put("algorithm.loss", "gspo")
    draft.put("algorithm.advantage_options.eps", 1e-4)
    draft.put("algorithm.advantage_options.scale", SCALES[str(draft.value("scale_rewards", "group"))])
    _write_grpo_rewards(draft)
    _write_vllm(draft)
    samples = int(draft.value("num_generations"))
    updates = int(draft.value("steps_per_generation", draft.value("gradient_accumulation_steps", 1)))
    accumulated = int(draft.value("gradient_accumulation_steps", 1))
    rows = _devices_batch(draft) // accumulated * updates
    rows = int(draft.value("generation_batch_size", rows))
    draft.put("train.prompts_per_step", max(1, rows // samples))
    draft.put("train.minibatches", max(1, updates // accumulated))
    draft.put("lengths.long_prompts", "drop")
    steps = int(draft.value("max_steps", -1))
    if steps > 0:
        per_step = int(draft.value("num_iterations", 1)) * max(1, updates // accumulated)
        draft.put("train.steps", max(1, steps // per_step))
    else:
        draft.noted("num_train_epochs", "write train.steps: rows x num_train_epochs / train.prompts_per_step")
        draft.remarks.append("train.steps is our default of 100: write rows x epochs / train.prompts_per_step.")


def _write_grpo_rewards(draft: Draft) -> None:
    names = draft.value("reward_funcs") or []
    names = [names] if isinstance(names, str) else list(names)
    weights = draft.value("reward_weights") or [1.0] * (len(names) + draft.on("reward_model_name_or_path"))
    if draft.on("reward_model_name_or_path") and names:
        model = draft.settings["reward"].pop("model")
        draft.put("reward.parts.model", {"kind": "model", "path": str(model), "weight": float(weights[0])})
        weights = weights[1:]
    for name, weight in zip(names, weights, strict=False):
        module, _, function = str(name).rpartition(".")
        path = f"{module}:{function}" if module else f"trl.rewards:{name}"
        draft.put(f"reward.parts.{function}", {"kind": "function", "function": path, "weight": float(weight)})
    draft.noted("reward_funcs", "called with completions and prompts as text, not as lists of messages")
    if not names and not draft.on("reward_model_name_or_path"):
        raise ConfigError("the file names no reward; add reward_funcs or reward_model_name_or_path")


def _write_vllm(draft: Draft) -> None:
    if draft.value("use_vllm") and draft.value("vllm_mode", "colocate") == "colocate":
        draft.put("placement.rollout.colocate_with", "policy")
    wanted = draft.value("vllm_importance_sampling_correction", bool(draft.value("use_vllm")))
    if not draft.value("use_vllm") or not wanted:
        return
    mode = str(draft.value("vllm_importance_sampling_mode", "sequence_mask"))
    if mode not in VLLM_CORRECTIONS:
        draft.refused(
            "vllm_importance_sampling_mode", f"write algorithm.off_policy; known are {[*VLLM_CORRECTIONS]}"
        )
        return
    level, what = VLLM_CORRECTIONS[mode]
    high = float(draft.value("vllm_importance_sampling_clip_max", draft.value("vllm_importance_sampling_cap", 3.0)))
    correction: dict[str, Any] = {"level": level, "mode": what, "high": high}
    if draft.on("vllm_importance_sampling_clip_min"):
        correction["low"] = float(draft.value("vllm_importance_sampling_clip_min"))
    draft.put("algorithm.off_policy", [correction])
