"""OpenRLHF's `train_sft`, `train_rm`, `train_dpo`, `train_kto`, `train_prm` and `train_kd` for `rlhf offline`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core import ConfigError

from rlhf_launch.importing.engine import Draft, Rule, combined, differs, missing, needless, to
from rlhf_launch.importing.openrlhf.common import (
    ENGINE,
    OPTIMIZER_DEFAULTS,
    datasets,
    optimizer,
    write_lora,
    write_template,
)
from rlhf_launch.importing.values import every

_COMMON: Mapping[str, Rule] = {
    **ENGINE,
    **optimizer("train.optimizer"),
    "pretrain": to("model.path"),
    "tokenizer_chat_template": missing("write the template into a file and give it at model.chat_template"),
    "train_batch_size": to("train.batch_size", convert=int),
    "micro_train_batch_size": combined(),
    "max_epochs": to("train.epochs", convert=int),
    "max_len": to("lengths.max_length", convert=int),
    "dataset": combined(),
    "dataset_probs": combined(),
    "dataset_split": combined(),
    "train_split": combined(),
    "eval_dataset": combined(),
    "eval_split": combined(),
    "eval_steps": combined(),
    "max_samples": combined(),
    "input_template": combined(),
    "apply_chat_template": combined(),
    "aux_loss_coef": to("algorithm.aux_loss_coef", convert=float, neutral=(0,)),
}
_NO_AUX = missing("leave it out: this method has no router loss", neutral=(0,))
_SUPERVISED: Mapping[str, Rule] = {"input_key": combined(), "output_key": combined()}
_PAIRS: Mapping[str, Rule] = {"prompt_key": combined(), "chosen_key": combined(), "rejected_key": combined()}
_REFERENCE: Mapping[str, Rule] = {
    "ref_pretrain": to("model.reference"),
    "ref_offload": needless("the reference scores the data once, before training, and is then gone"),
}
_DEFAULTS: Mapping[str, Any] = {
    **OPTIMIZER_DEFAULTS,
    "zero_stage": 2,
    "seed": 42,
    "save_path": "./ckpt",
    "train_batch_size": 128,
    "max_epochs": 1,
}
_PREFIXED = {"input_template": "User: {}\nAssistant: "}

OFFLINE: Mapping[str, tuple[Mapping[str, Rule], Mapping[str, Any]]] = {
    "train_sft": (
        {
            **_COMMON,
            **_SUPERVISED,
            "pretrain_mode": combined(),
            "multiturn": needless("every turn of the assistant counts in a conversation"),
        },
        {**_DEFAULTS, **_PREFIXED, "learning_rate": 5e-6, "max_epochs": 2, "max_len": 2048},
    ),
    "train_kd": (
        {
            **_COMMON,
            **_SUPERVISED,
            "pretrain_mode": combined(),
            "aux_loss_coef": _NO_AUX,
            "teacher_model": differs(
                "its top_k=64 tokens at each place count, and the others as one; OpenRLHF takes all",
                "algorithm.teacher",
            ),
            "kd_coef": to("algorithm.kd_coef", convert=float),
            "teacher_offload": needless("the teacher scores the data once, before training, and is then gone"),
        },
        {**_DEFAULTS, **_PREFIXED, "learning_rate": 5e-6, "max_len": 2048, "kd_coef": 0.4},
    ),
    "train_rm": (
        {
            **_COMMON,
            **_PAIRS,
            "aux_loss_coef": _NO_AUX,
            "loss": to("algorithm.loss", convert=lambda name: "sigmoid" if name == "sigmoid" else "log_exp"),
            "margin_loss": needless("a column `margin` of the data is used wherever there is one"),
            "compute_fp32_loss": needless("losses are computed in 32 bits"),
        },
        {**_DEFAULTS, "learning_rate": 9e-6, "max_len": 512},
    ),
    "train_dpo": (
        {
            **_COMMON,
            **_PAIRS,
            **_REFERENCE,
            "beta": to("algorithm.beta", convert=float),
            "ipo": to("algorithm.loss", convert=lambda _: "ipo"),
            "label_smoothing": to("algorithm.label_smoothing", convert=float),
            "nll_loss_coef": to("algorithm.sft_coef", convert=float),
        },
        {**_DEFAULTS, "learning_rate": 1e-5, "max_len": 512, "beta": 0.1},
    ),
    "train_kto": (
        {
            **_COMMON,
            **_REFERENCE,
            "input_key": combined(),
            "output_key": combined(),
            "label_key": combined(),
            "beta": to("algorithm.beta", convert=float),
            "desirable_loss_weight": to("algorithm.desirable_weight", convert=float),
            "undesirable_loss_weight": to("algorithm.undesirable_weight", convert=float),
        },
        {**_DEFAULTS, **_PREFIXED, "learning_rate": 1e-5, "max_len": 2048, "beta": 0.01},
    ),
    "train_prm": (
        {
            **_COMMON,
            "aux_loss_coef": _NO_AUX,
            "input_key": combined(),
            "label_key": combined(),
            "placeholder_token": to("data.step_placeholder", convert=str),
            "reward_tokens": to("algorithm.label_tokens", convert=lambda words: [str(word) for word in words]),
        },
        {**_DEFAULTS, "learning_rate": 1e-6, "max_len": 2048},
    ),
}
_METHODS = {"train_kd": "distill"}
_ROWS_PER_EXAMPLE = {"train_dpo": 2, "train_rm": 2}
_MICRO = {"train_rm": 1, "train_prm": 1}
"""Examples per micro-batch where nothing is said; 8 elsewhere."""


def offline_run(draft: Draft, entry: str) -> str:
    """Write what depends on several settings; the command that runs the file."""
    for name, flag in (
        ("pretrain", "--pretrain (--model.model_name_or_path)"),
        ("dataset", "--dataset (--data.dataset)"),
    ):
        if not draft.on(name):
            raise ConfigError(f"the command lacks {flag}")
    method = _METHODS.get(entry, entry.removeprefix("train_"))
    draft.put("algorithm.name", method)
    write_lora(draft)
    if entry in ("train_rm", "train_dpo", "train_sft", "train_kd", "train_kto"):
        write_template(draft)
    columns = _columns(draft, entry)
    split = str(draft.value("dataset_split", draft.value("train_split", "train")))
    draft.put("data.train", datasets(draft, "dataset", "dataset_probs", split=split, columns=columns))
    if draft.on("eval_dataset"):
        split = str(draft.value("eval_split", "test"))
        found = datasets(draft, "eval_dataset", None, split=split, columns=columns, limited=False)
        draft.put("evaluation.data", found)
        draft.put("evaluation.every", every(draft.value("eval_steps", -1)))
    elif every(draft.value("eval_steps", -1)):
        draft.put("evaluation.every", every(draft.value("eval_steps")))
        draft.noted("eval_steps", "without an --eval_dataset there is nothing to evaluate on; write data.hold_out")
    draft.put("lengths.long_prompts", "drop")
    _write_micro_batch(draft, entry)
    options = draft.settings["train"]
    ranks = max(options.get("sequence_parallel_size", 1), options["options"].get("autotp_size", 1))
    draft.put("train.ranks", ranks)
    draft.remarks.append(
        f"train.ranks is {ranks}: OpenRLHF takes all GPUs that its launcher finds. Write their number there."
    )
    return f"rlhf offline {method}"


def _write_micro_batch(draft: Draft, entry: str) -> None:
    micro = int(draft.value("micro_train_batch_size", _MICRO.get(entry, 8)))
    tokens = micro * int(draft.value("max_len")) * _ROWS_PER_EXAMPLE.get(entry, 1)
    draft.put("train.max_tokens_per_micro_batch", tokens)
    draft.noted("micro_train_batch_size", f"in tokens: as many as {micro} of the longest examples have")


def _columns(draft: Draft, entry: str) -> dict[str, str]:
    """Our column name -> theirs."""
    if entry in ("train_dpo", "train_rm"):
        pairs = {"chosen": str(draft.value("chosen_key", "chosen"))}
        pairs["rejected"] = str(draft.value("rejected_key", "rejected"))
        return {"prompt": str(draft.value("prompt_key"))} | pairs if draft.on("prompt_key") else pairs
    theirs = str(draft.value("input_key", "input"))
    if entry == "train_prm":
        return {"input": theirs, "label": str(draft.value("label_key", "label"))}
    if draft.on("pretrain_mode"):
        return {"text": theirs}
    answers = {"prompt": theirs, "completion": str(draft.value("output_key", "output"))}
    if entry == "train_kto":
        return _unpaired(draft, theirs, answers)
    if draft.on("output_key"):
        return answers
    if draft.on("apply_chat_template"):
        draft.noted("input_key", "a conversation, in which every turn of the assistant counts; OpenRLHF: the last")
        return {"messages": theirs}
    # OpenRLHF's own output of batch_inference: the columns input and output.
    draft.noted("input_key", "without --output_key the columns input and output are read")
    return {} if theirs == "input" else {"input": theirs}


def _unpaired(draft: Draft, theirs: str, answers: dict[str, str]) -> dict[str, str]:
    label = {"label": str(draft.value("label_key", "label"))}
    if draft.on("output_key"):
        return answers | label
    draft.noted("input_key", "a conversation, whose last message is the completion")
    return {"input": theirs} | label
