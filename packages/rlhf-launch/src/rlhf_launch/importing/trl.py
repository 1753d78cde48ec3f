"""TRL's YAML files, as `trl sft --config FILE` takes them, as configurations of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
from rlhf_launch.importing.openrlhf_common import every, scheduler

_NO_HUB = missing("upload the exported model yourself")
_COMPUTED = needless("log-probs are computed in chunks, and sequences run unpadded")

_COMMON: Mapping[str, Rule] = {
    "model_name_or_path": to("model.path"),
    "model_revision": missing("download that revision, and give its path at model.path", neutral=("main",)),
    "dtype": combined(),
    "torch_dtype": combined(),
    "bf16": combined(),
    "fp16": combined(),
    "attn_implementation": to("model.attention", neutral=("flash_attention_2", "flash_attention_3")),
    "trust_remote_code": to("model.trust_remote_code"),
    "chat_template_path": to("model.chat_template"),
    "use_peft": combined(),
    "lora_r": combined(),
    "lora_alpha": combined(),
    "lora_dropout": combined(),
    "lora_target_modules": combined(),
    "lora_task_type": needless("it follows from the method"),
    "use_rslora": missing("write model.lora.alpha times the square root of the rank", neutral=(False,)),
    "use_dora": missing("leave it out: plain low-rank adapters are trained", neutral=(False,)),
    "lora_modules_to_save": missing("leave it out: adapters alone are trained, and the heads of reward models"),
    "load_in_4bit": combined(),
    "load_in_8bit": missing("write model.lora.quantize: nf4", neutral=(False,)),
    "bnb_4bit_quant_type": combined(),
    "use_bnb_nested_quant": needless("scales of 4-bit weights are always doubly quantised"),
    "dataset_name": combined(),
    "dataset_config": combined(),
    "dataset_train_split": combined(),
    "dataset_test_split": combined(),
    "dataset_streaming": missing("leave it out: rows are read before training", neutral=(False,)),
    "datasets": combined(),
    "dataset_num_proc": needless("rows are prepared once, and quickly"),
    "dataloader_num_workers": needless("rows are prepared once, before training"),
    "dataloader_pin_memory": needless("rows are prepared once, before training"),
    "output_dir": to("output"),
    "overwrite_output_dir": differs("add --overwrite to the command"),
    "resume_from_checkpoint": differs("add --resume to the command"),
    "learning_rate": to("train.optimizer.learning_rate", convert=float),
    "lr_scheduler_type": to("train.optimizer.schedule", convert=scheduler),
    "lr_scheduler_kwargs": combined(),
    "warmup_ratio": to("train.optimizer.warmup", convert=float),
    "warmup_steps": to("train.optimizer.warmup", convert=float),
    "weight_decay": to("train.optimizer.weight_decay", convert=float),
    "adam_beta1": combined(),
    "adam_beta2": combined(),
    "adam_epsilon": to("train.optimizer.eps", convert=float),
    "max_grad_norm": to("train.optimizer.max_grad_norm", convert=float),
    "optim": missing(
        "the optimizer is AdamW (or train.optimizer.kind: muon)",
        neutral=("adamw_torch", "adamw_torch_fused", "adamw_hf"),
    ),
    "per_device_train_batch_size": combined(),
    "gradient_accumulation_steps": combined(),
    "per_device_eval_batch_size": needless("evaluation batches by tokens, or by evaluation.batch_size"),
    "num_train_epochs": combined(),
    "max_steps": combined(),
    "gradient_checkpointing": to("train.gradient_checkpointing"),
    "gradient_checkpointing_kwargs": needless("a detail of recomputation that changes no number"),
    "activation_offloading": missing("write train.gradient_checkpointing: true", neutral=(False,)),
    "use_liger_kernel": _COMPUTED,
    "padding_free": _COMPUTED,
    "pad_to_multiple_of": _COMPUTED,
    "torch_empty_cache_steps": needless("engines free their memory where roles share devices"),
    "disable_dropout": needless(
        "models run without dropout",
    ),
    "remove_unused_columns": needless("columns that nothing reads are passed over"),
    "eval_strategy": combined(),
    "eval_steps": combined(),
    "eval_on_start": needless("online runs evaluate at the start"),
    "save_strategy": combined(),
    "save_steps": combined(),
    "save_total_limit": to("checkpoint.keep", convert=int),
    "save_only_model": missing("leave it out: checkpoints are there to resume from", neutral=(False,)),
    "load_best_model_at_end": differs("the best model is kept in best/, beside the last"),
    "logging_steps": needless("every step is logged"),
    "logging_first_step": needless("every step is logged"),
    "logging_strategy": needless("every step is logged"),
    "report_to": missing(
        "metrics are in metrics.jsonl and TensorBoard files; other trackers are not connected",
        neutral=("none", "tensorboard", ["tensorboard"], []),
    ),
    "run_name": needless("a run is known by its output directory"),
    "seed": to("seed", convert=int),
    "push_to_hub": missing(_NO_HUB.note, neutral=(False,)),
    "hub_model_id": _NO_HUB,
    "hub_strategy": _NO_HUB,
    "env": missing("set the environment variables in the shell; placement.forward_env sends them to other hosts"),
    "deepspeed": missing("write train.options (stage, offload_optimizer, ...)"),
    "ddp_timeout": to("placement.timeout_s", convert=float),
    "router_aux_loss_coef": combined(),
    "model_init_kwargs": missing("write model.dtype, model.attention, model.trust_remote_code"),
    "eos_token": missing("the tokenizer says it: give one at model.tokenizer"),
    "pad_token": needless("sequences run unpadded"),
}
_PREFERENCE: Mapping[str, Rule] = {
    "beta": to("algorithm.beta", convert=float),
    "precompute_ref_log_probs": needless("the reference scores the data once, before training"),
    "precompute_ref_batch_size": needless("the reference scores the data once, before training"),
    "sync_ref_model": missing("leave it out: the reference stays", neutral=(False,)),
    "ref_model_mixup_alpha": missing("leave it out: the reference stays"),
    "ref_model_sync_steps": missing("leave it out: the reference stays"),
}
_LENGTHS: Mapping[str, Rule] = {
    "max_length": to("lengths.max_length", convert=int),
    "max_prompt_length": to("lengths.max_prompt_tokens", convert=int),
    "truncation_mode": combined(),
}
_SCALES = {"group": "group", "batch": "batch", "none": "none", "True": "group", "False": "none"}
_VLLM_CORRECTIONS = {"token_truncate": ("token", "truncate"), "token_mask": ("token", "mask")}
_VLLM_CORRECTIONS |= {"sequence_truncate": ("sequence", "truncate"), "sequence_mask": ("sequence", "mask")}

METHODS: Mapping[str, tuple[str, Mapping[str, Rule], Mapping[str, Any]]] = {
    "sft": (
        "sft",
        {
            **_COMMON,
            **_LENGTHS,
            "dataset_text_field": combined(),
            "packing": needless("sequences are packed without padding and do not see each other"),
            "packing_strategy": needless("sequences are packed without padding and do not see each other"),
            "eval_packing": needless("sequences are packed without padding and do not see each other"),
            "completion_only_loss": combined(),
            "assistant_only_loss": needless(
                "every turn of the assistant counts in a conversation, and nothing else"
            ),
            "loss_type": to(
                "algorithm.loss", convert=lambda kind: {"nll": "nll", "chunked_nll": "nll", "dft": "dft"}[kind]
            ),
            "shuffle_dataset": to("data.shuffle"),
        },
        {"learning_rate": 2e-5, "max_length": 1024},
    ),
    "dpo": (
        "dpo",
        {
            **_COMMON,
            **_LENGTHS,
            **_PREFERENCE,
            "loss_type": to(
                "algorithm.loss",
                convert=lambda kind: kind[0] if isinstance(kind, list) and len(kind) == 1 else kind,
            ),
            "loss_weights": missing("one loss alone; nll_loss beside it is algorithm.sft_coef"),
            "label_smoothing": to("algorithm.label_smoothing", convert=float),
            "ld_alpha": to("algorithm.ld_alpha", convert=float),
            "f_divergence_type": to("algorithm.f_divergence"),
            "f_alpha_divergence_coef": to("algorithm.alpha", convert=float),
            "use_weighting": to("algorithm.weighted"),
            "discopop_tau": to("algorithm.discopop_tau", convert=float),
            "reference_free": to("algorithm.reference_free"),
            "rpo_alpha": to("algorithm.sft_coef", convert=float),
            "ref_model_name_or_path": to("model.reference"),
        },
        {"learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    ),
    "kto": (
        "kto",
        {
            **_COMMON,
            **_LENGTHS,
            **_PREFERENCE,
            "loss_type": combined(),
            "train_sampling_strategy": differs("write data.shuffle: false for the order of the data"),
            "desirable_weight": to("algorithm.desirable_weight", convert=float),
            "undesirable_weight": to("algorithm.undesirable_weight", convert=float),
        },
        {"learning_rate": 1e-6, "max_length": 1024, "beta": 0.1},
    ),
    "reward": (
        "rm",
        {**_COMMON, **_LENGTHS, "center_rewards_coefficient": to("algorithm.center_coef", convert=float)},
        {"learning_rate": 1e-4, "max_length": 1024},
    ),
    "grpo": (
        "grpo",
        {
            **_COMMON,
            "reward_model_name_or_path": to("reward.model"),
            "reward_funcs": combined(),
            "reward_weights": combined(),
            "num_generations": to("rollout.samples_per_prompt", convert=int),
            "num_generations_eval": missing("write evaluation.sets with samples of its own"),
            "max_completion_length": to("rollout.sampling.max_tokens", convert=int),
            "max_prompt_length": to("lengths.max_prompt_tokens", convert=int),
            "temperature": to("rollout.sampling.temperature", convert=float),
            "top_p": to("rollout.sampling.top_p", convert=float),
            "top_k": to("rollout.sampling.top_k", convert=lambda value: max(0, int(value or 0))),
            "min_p": to("rollout.sampling.min_p", convert=float),
            "repetition_penalty": to("rollout.sampling.repetition_penalty", convert=float),
            "generation_batch_size": combined(),
            "steps_per_generation": combined(),
            "num_iterations": to("train.epochs_per_step", convert=int),
            "shuffle_dataset": to("data.shuffle"),
            "beta": to("algorithm.kl_coef", convert=float),
            "epsilon": to("algorithm.loss_options.clip_range", convert=float),
            "epsilon_high": to("algorithm.loss_options.clip_range_high", convert=float),
            "delta": to("algorithm.loss_options.dual_clip", convert=float),
            "entropy_coef": to("algorithm.loss_options.entropy_coef", convert=float),
            "top_entropy_quantile": to("algorithm.loss_options.top_entropy", convert=float, neutral=(1.0, 1)),
            "off_policy_mask_threshold": to("algorithm.loss_options.sequence_kl_limit", convert=float),
            "use_bias_correction_kl": to("algorithm.loss_options.kl_ratio_weighted"),
            "mask_truncated_completions": to("algorithm.shaping.mask_truncated"),
            "scale_rewards": combined(),
            "loss_type": combined(),
            "importance_sampling_level": combined(),
            "multi_objective_aggregation": missing(
                "write algorithm.name: gdpo for normalize_then_sum", neutral=("sum_then_normalize",)
            ),
            "use_vllm": to("rollout.backend", convert=lambda on: "vllm" if on else "transformers"),
            "vllm_mode": combined(),
            "vllm_gpu_memory_utilization": to("rollout.options.gpu_memory_utilization", convert=float),
            "vllm_tensor_parallel_size": to("rollout.tensor_parallel_size", convert=int),
            "vllm_max_model_length": needless("it follows from lengths"),
            "vllm_enable_sleep_mode": needless("engines sleep wherever they share devices"),
            "vllm_server_host": needless("the run starts its engines itself"),
            "vllm_server_port": needless("the run starts its engines itself"),
            "vllm_server_timeout": needless("the run starts its engines itself"),
            "vllm_server_base_url": needless("the run starts its engines itself"),
            "vllm_group_port": needless("the run chooses free ports"),
            "vllm_importance_sampling_correction": combined(),
            "vllm_importance_sampling_mode": combined(),
            "vllm_importance_sampling_clip_max": combined(),
            "vllm_importance_sampling_cap": combined(),
            "vllm_importance_sampling_clip_min": combined(),
            "ds3_gather_for_generation": needless("engines have weights of their own"),
            "log_completions": needless("samples.jsonl has an account of every prompt"),
            "num_completions_to_print": needless("samples.jsonl has an account of every prompt"),
            "sync_ref_model": missing("leave it out: the reference stays", neutral=(False,)),
        },
        {
            "learning_rate": 1e-6,
            "num_generations": 8,
            "max_completion_length": 512,
            "temperature": 1.0,
            "epsilon": 0.2,
            "beta": 0.0,
            "use_vllm": False,
        },
    ),
}
_DEFAULTS: Mapping[str, Any] = {
    "gradient_checkpointing": True,
    "lr_scheduler_type": "linear",
    "seed": 42,
    "output_dir": "trainer_output",
}
_BATCH = 8
"""`per_device_train_batch_size` of Transformers' TrainingArguments."""


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
    draft = Draft(given=given, written={key: key for key in given}, defaults={**_DEFAULTS, **defaults})
    draft.put("algorithm.name", name)
    apply_table(draft, table)
    _write_shared(draft)
    if method == "grpo":
        _write_grpo(draft)
        return finish(draft, command="rlhf train", source=source)
    _write_offline(draft, method)
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
    batch = int(draft.value("per_device_train_batch_size", _BATCH)) * int(
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
    draft.put("algorithm.advantage_options.scale", _SCALES[str(draft.value("scale_rewards", "group"))])
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
    if mode not in _VLLM_CORRECTIONS:
        draft.refused(
            "vllm_importance_sampling_mode", f"write algorithm.off_policy; known are {[*_VLLM_CORRECTIONS]}"
        )
        return
    level, what = _VLLM_CORRECTIONS[mode]
    high = float(draft.value("vllm_importance_sampling_clip_max", draft.value("vllm_importance_sampling_cap", 3.0)))
    correction: dict[str, Any] = {"level": level, "mode": what, "high": high}
    if draft.on("vllm_importance_sampling_clip_min"):
        correction["low"] = float(draft.value("vllm_importance_sampling_clip_min"))
    draft.put("algorithm.off_policy", [correction])
