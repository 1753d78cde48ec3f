"""Settings that all entry points of OpenRLHF share, and how their datasets are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core import ConfigError

from rlhf_launch.importing.engine import Draft, Rule, combined, differs, missing, needless, to
from rlhf_launch.importing.values import dtype, every, scheduler

NO_WANDB = "write nothing: metrics are in metrics.jsonl and TensorBoard files; Weights & Biases is not connected"
UNLIMITED = 1_000_000
"""From here on a number of rows is no limit (their defaults are 1e6 and 1e8)."""


ENGINE: Mapping[str, Rule] = {
    "zero_stage": to("train.options.stage", convert=int),
    "adam_offload": to("train.options.offload_optimizer"),
    "zpg": to("train.options.zero_hpz_partition_size", neutral=(1,)),
    "overlap_comm": to("train.options.overlap_comm"),
    "deepcompile": to("train.options.deep_compile"),
    "grad_accum_dtype": to("train.options.accumulate_dtype", convert=dtype),
    "ds_tensor_parallel_size": to("train.options.autotp_size", neutral=(1,)),
    "ring_attn_size": differs(
        "sequences are divided by Ulysses, not by a ring: attention heads must be divisible by it",
        "train.sequence_parallel_size",
        convert=int,
    ),
    "ring_head_stride": needless("Ulysses has no stride"),
    "gradient_checkpointing": to("train.gradient_checkpointing"),
    "gradient_checkpointing_use_reentrant": needless("a detail of recomputation that changes no number"),
    "packing_samples": to("train.packing"),
    "bf16": to("model.dtype", convert=lambda _: "bfloat16"),
    "param_dtype": to("model.dtype", convert=dtype),
    "attn_implementation": Rule(
        keys=("model.attention",),
        neutral=("flash_attention_2", "flash_attention_3"),
        note="",
    ),
    "flash_attn": needless("the engine takes the attention that the machine has and that packs sequences"),
    "use_liger_kernel": needless("log-probs are computed in chunks, so that full logits never exist"),
    "experts_implementation": missing("leave it out: experts run as Transformers runs them"),
    "use_ds_universal_ckpt": needless("checkpoints are resumed on any number of ranks"),
    "local_rank": needless("ranks are placed by the run"),
    "actor_init_on_gpu": needless("weights are loaded where the engine needs them"),
    "full_determinism": needless("the same run gives the same numbers anyway, as far as the kernels allow"),
    "perf": needless("times of every phase are in metrics.jsonl"),
    "disable_fast_tokenizer": missing("give a tokenizer without a fast form at model.tokenizer"),
    "dataloader_num_workers": needless("rows are prepared once, before training"),
    "load_in_4bit": combined(),
    "lora_rank": combined(),
    "lora_alpha": combined(),
    "lora_dropout": combined(),
    "target_modules": combined(),
    "seed": to("seed", convert=int),
    "save_path": to("output"),
    "save_steps": to("checkpoint.every", convert=every),
    "max_ckpt_num": to("checkpoint.keep", convert=int),
    "max_ckpt_mem": missing("write checkpoint.keep, a number of checkpoints"),
    "ckpt_path": needless("checkpoints lie in checkpoints/ of the output directory"),
    "load_checkpoint": differs("add --resume to the command; without a checkpoint leave it out"),
    "save_hf_ckpt": missing(
        "the final model is a Transformers directory, and the best with evaluation.best_metric"
    ),
    "disable_ds_ckpt": missing("write checkpoint.every: 0 and checkpoint.minutes: 0 for no checkpoints"),
    "logging_steps": needless("every step is logged"),
    "use_wandb": missing(NO_WANDB, neutral=("None", False)),
    "wandb_org": missing(NO_WANDB),
    "wandb_group": missing(NO_WANDB),
    "wandb_project": missing(NO_WANDB),
    "wandb_run_name": missing(NO_WANDB),
    "use_tensorboard": differs("the files lie in the output directory", "tensorboard", convert=lambda _: True),
    "use_ms": missing("download the model and the data from ModelScope first, and give their paths"),
    "value_head_prefix": combined(
        "the reward model must be a sequence-classification model of Transformers, whose head has a fixed name"
    ),
}
"""Where a model's numbers, memory, files and logs are set."""

_OPTIMIZER: Mapping[str, tuple[str, Any]] = {
    "optim": ("kind", lambda name: {"adam": "adamw", "muon": "muon"}[name]),
    "learning_rate": ("learning_rate", float),
    "adam_betas": ("betas", lambda pair: [float(value) for value in pair]),
    "adam_eps": ("eps", float),
    "l2": ("weight_decay", float),
    "lr_scheduler": ("schedule", scheduler),
    "lr_warmup_ratio": ("warmup", float),
    "min_lr_ratio": ("min_learning_rate_ratio", float),
    "max_norm": ("max_grad_norm", float),
    "muon_lr": ("muon_learning_rate", float),
    "muon_momentum": ("muon_momentum", float),
}


def optimizer(*groups: str, prefix: str = "") -> dict[str, Rule]:
    """The rules of an optimizer's settings, written into these groups of ours."""
    rules = {
        f"{prefix}{name}": to(*(f"{group}.{ours}" for group in groups), convert=convert)
        for name, (ours, convert) in _OPTIMIZER.items()
    }
    for name in ("muon_ns_steps", "muon_nesterov", "muon_no_nesterov"):
        rules[f"{prefix}{name}"] = needless("their engine reads no such setting either")
    return rules


OPTIMIZER_DEFAULTS: Mapping[str, Any] = {
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": 0.03,
    "min_lr_ratio": 0.1,
}
"""Where ours are others: a constant rate from the first step on."""


def write_lora(draft: Draft) -> None:
    """Adapters, if there are any."""
    if not draft.value("lora_rank"):
        if draft.on("load_in_4bit"):
            draft.refused(
                "load_in_4bit", "4-bit weights are trained through adapters: write model.lora.quantize: nf4"
            )
        return
    draft.put("model.lora.rank", int(draft.value("lora_rank")))
    draft.put("model.lora.alpha", float(draft.value("lora_alpha", 16)))
    draft.put("model.lora.dropout", float(draft.value("lora_dropout", 0)))
    names = draft.value("target_modules", ["all-linear"])
    draft.put("model.lora.target_modules", "all-linear" if names in ("all-linear", ["all-linear"]) else list(names))
    if draft.on("load_in_4bit"):
        draft.put("model.lora.quantize", "nf4")


def datasets(
    draft: Draft, name: str, probs: str | None, *, split: str, columns: Mapping[str, str], limited: bool = True
) -> list[dict[str, Any]]:
    """Our `data.train` for a comma-separated list of datasets and a list of probabilities.

    Raises:
        ConfigError: as many probabilities as datasets are needed.
    """
    paths = [path.strip() for path in str(draft.value(name)).split(",")]
    weights = [float(part) for part in str(draft.value(probs)).split(",")] if probs and draft.on(probs) else []
    if weights and len(weights) != len(paths):
        raise ConfigError(f"{draft.written[probs or '']}: {len(weights)} probabilities for {len(paths)} datasets")
    limit = int(float(draft.value("max_samples", UNLIMITED))) if limited else UNLIMITED
    sources: list[dict[str, Any]] = []
    for place, path in enumerate(paths):
        folder = path.partition("@")
        source: dict[str, Any] = {"path": folder[0]}
        if folder[1]:
            draft.noted(
                name, f"the part of the dataset behind '@' ({folder[2]}) is left out; give a path to its files"
            )
        if split != "train":
            source["split"] = split
        if renamed := {ours: theirs for ours, theirs in columns.items() if ours != theirs}:
            source["columns"] = dict(renamed)
        if len(paths) > 1 and weights:
            source["weight"] = weights[place]
        if limit < UNLIMITED:
            source["limit"] = limit
        sources.append(source)
    if len(paths) > 1 and limit < UNLIMITED:
        draft.noted("max_samples", "it limits each dataset, not their mixture")
    return sources


def write_template(draft: Draft) -> None:
    """The chat template or the text around a prompt."""
    if draft.on("apply_chat_template"):
        draft.put("data.chat", True)
        if draft.on("input_template"):
            draft.record(
                "input_template", draft.findings["input_template"].outcome, "not used with a chat template"
            )
        return
    template = draft.value("input_template")
    if not draft.on("input_template"):
        return
    if "{}" not in str(template):
        draft.noted("input_template", "it has no {} and is ignored, as theirs is")
        return
    draft.put("data.prompt_template", str(template).replace("\\n", "\n"))
