"""Keys of earlier versions of `rlhf train`'s configuration, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping

RENAMED: Mapping[str, str] = {
    "model.policy": "model.path",
    "data.prompts": "data.train",
    "data.split": "split beside the path: data.train: {path: ..., split: ...}",
    "data.columns": "columns beside the path: data.train: {path: ..., columns: {...}}",
    "data.limit": "limit beside the path: data.train: {path: ..., limit: ...}",
    "data.eval_rows": "data.hold_out",
    "data.max_prompt_tokens": "lengths.max_prompt_tokens",
    "data.overlong": "lengths.long_prompts",
    "algorithm.grpo": "its fields beside algorithm.name",
    "algorithm.ppo": "its fields beside algorithm.name",
    "evaluations": "evaluation.sets, with data in place of prompts",
    "evaluation.sets.*.prompts": "data",
    "rollout.max_model_len": "lengths.max_length",
    "rollout.agent.max_tokens": "lengths.max_length",
    "train.epochs": "train.epochs_per_step",
    "train.batch_size": "train.prompts_per_step",
    "train.options.lora": "model.lora",
    "train.options.average_decay": "train.average_decay",
    "train.options.packing": "train.packing",
    "train.options.sequence_parallel_size": "train.sequence_parallel_size",
    "train.optimizer.warmup_steps": "train.optimizer.warmup",
    "train.optimizer.total_steps": "train.steps",
    "train.critic_optimizer.warmup_steps": "train.critic_optimizer.warmup",
    "reward.policy": "reward.on_failure",
    "reward.parts.*.policy": "on_failure",
    "steps": "train.steps",
    "output_dir": "output",
    "eval_every": "evaluation.every",
    "checkpoint_every": "checkpoint.every",
    "keep_checkpoints": "checkpoint.keep",
    "keep_best": "evaluation.best_metric",
    "best_is": "evaluation.greater_is_better",
    "checkpoint_in_background": "checkpoint.in_background",
    "resume": "the flag --resume on the command line",
}
