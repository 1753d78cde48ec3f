"""OpenRLHF's `batch_inference`, as far as `rlhf generate` does the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core import ConfigError

from rlhf_launch.importing.engine import Draft, Rule, combined, missing, needless, to
from rlhf_launch.importing.openrlhf.common import ENGINE, datasets, write_template

_OF_ENGINES = (
    "attn_implementation",
    "flash_attn",
    "local_rank",
    "full_determinism",
    "disable_fast_tokenizer",
    "use_ms",
)

GENERATE: Mapping[str, Rule] = {
    **{name: ENGINE[name] for name in (*_OF_ENGINES, "bf16", "param_dtype", "seed")},
    "eval_task": combined(),
    "pretrain": to("model.path"),
    "output_path": to("output"),
    "dataset": combined(),
    "dataset_probs": combined(),
    "dataset_split": combined(),
    "max_samples": combined(),
    "input_key": combined(),
    "output_key": needless("the samples lie under names of our own in the file that is written"),
    "input_template": combined(),
    "apply_chat_template": combined(),
    "prompt_max_len": to("lengths.max_prompt_tokens", convert=int),
    "max_new_tokens": to("rollout.sampling.max_tokens", convert=int),
    "max_len": needless("prompt and response have bounds of their own"),
    "greedy_sampling": to("rollout.sampling.temperature", convert=lambda _: 0.0),
    "temperature": to("rollout.sampling.temperature", convert=float),
    "top_p": to("rollout.sampling.top_p", convert=float),
    "repetition_penalty": to("rollout.sampling.repetition_penalty", convert=float),
    "best_of_n": to("rollout.samples_per_prompt", convert=int),
    "tp_size": to("rollout.tensor_parallel_size", convert=int),
    "max_num_seqs": to("rollout.max_num_seqs", convert=int),
    "enable_prefix_caching": to("rollout.options.enable_prefix_caching"),
    "zero_stage": needless("the engine generates; nothing is trained"),
    "micro_batch_size": needless("the engine batches requests itself"),
    "iter": missing("the whole file is sampled at once; data.train takes a part of it"),
    "rollout_batch_size": missing("write data.train: {path: ..., limit: N} for the first N rows"),
    "post_processor": missing("choose among the samples of the file that is written, by their scores"),
    "normalize_reward": missing("scores are written as they are"),
    "reward_template": missing("choose among the samples of the file that is written, by their scores"),
    "enable_csft": missing("write the text behind the prompt with data.prompt_template"),
    "csft_prompt": missing("write the text behind the prompt with data.prompt_template"),
    "value_head_prefix": needless("the reward model is read with its own head"),
}
GENERATE_DEFAULTS: Mapping[str, Any] = {
    "seed": 1234,
    "prompt_max_len": 1024,
    "max_new_tokens": 1024,
    "temperature": 1.0,
    "best_of_n": 1,
}


def generation_run(draft: Draft) -> str:
    """Write what depends on several settings; the command that runs the file.

    Raises:
        ConfigError: the task is to score a file, which no command of ours does.
    """
    task = str(draft.value("eval_task"))
    if task not in ("generate_vllm", "generate"):
        raise ConfigError(
            f"--eval_task {task} has no counterpart: no command scores a file of responses. `rlhf generate` scores "
            "the samples that it draws: give it reward: {model: PATH}, and choose among them by their scores"
        )
    for name in ("pretrain", "dataset", "output_path"):
        if not draft.on(name):
            raise ConfigError(f"the command lacks --{name}")
    if draft.on("greedy_sampling"):
        draft.put("rollout.sampling.temperature", 0.0)
        draft.noted("temperature", "greedy sampling has none")
    columns = {"prompt": str(draft.value("input_key", "input"))}
    split = str(draft.value("dataset_split", "train"))
    draft.put("data.train", datasets(draft, "dataset", "dataset_probs", split=split, columns=columns))
    write_template(draft)
    draft.put("lengths.long_prompts", "drop")
    draft.put("rollout.backend", "vllm" if task == "generate_vllm" else "transformers")
    return "rlhf generate"
