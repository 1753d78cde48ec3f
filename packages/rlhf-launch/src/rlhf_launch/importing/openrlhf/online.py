"""OpenRLHF's `train_ppo_ray` as a configuration of `rlhf train`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from rlhf_core import ConfigError

from rlhf_launch.importing.engine import Draft, Rule, combined, differs, missing, needless, to
from rlhf_launch.importing.openrlhf.common import (
    ENGINE,
    OPTIMIZER_DEFAULTS,
    UNLIMITED,
    datasets,
    optimizer,
    write_lora,
    write_template,
)
from rlhf_launch.importing.openrlhf.placement import PLACEMENT, write_placement
from rlhf_launch.importing.values import every

_BOTH = ("train.optimizer", "train.critic_optimizer")
_ROLES = {
    name: rule
    for prefix, group in (("actor_", "train.optimizer"), ("critic_", "train.critic_optimizer"))
    for name, rule in optimizer(group, prefix=prefix).items()
}
_IMAGES = (
    'a prompt has {"type": "image"} among the parts of its messages, or the processor\'s own token, for each '
    "image, where OpenRLHF's data has <image>"
)

ONLINE: Mapping[str, Rule] = {
    **ENGINE,
    **PLACEMENT,
    **{name: rule for name, rule in optimizer(*_BOTH).items() if name != "learning_rate"},
    **_ROLES,
    "pretrain": to("model.path"),
    "reward_pretrain": combined(),
    "critic_pretrain": combined(),
    "remote_rm_url": combined(),
    "agent_func_path": combined(),
    "normalize_reward": combined(),
    "reward_clip_range": to("algorithm.shaping.clip", convert=lambda pair: [float(value) for value in pair]),
    "overlong_buffer_len": combined(),
    "overlong_penalty_factor": combined(),
    "stop_properly_penalty_coef": combined(),
    "prompt_data": combined(),
    "prompt_data_probs": combined(),
    "prompt_split": combined(),
    "max_samples": combined(),
    "input_key": combined(),
    "label_key": combined(),
    "input_template": combined(),
    "apply_chat_template": combined(),
    "image_key": combined(_IMAGES),
    "max_images_per_prompt": to("rollout.options.limit_mm_per_prompt.image", convert=int, neutral=(0,)),
    "freeze_visual_encoder": missing("write train.options.freeze with the names of the weights that stay"),
    "prompt_max_len": differs("longer prompts are left out, where OpenRLHF cuts them", "lengths.max_prompt_tokens"),
    "max_new_tokens": to("rollout.sampling.max_tokens", convert=int),
    "max_len": combined(),
    "temperature": to("rollout.sampling.temperature", convert=float),
    "top_p": to("rollout.sampling.top_p", convert=float),
    "n_samples_per_prompt": to("rollout.samples_per_prompt", convert=int),
    "rollout_batch_size": to("train.prompts_per_step", convert=int),
    "vllm_generate_batch_size": missing("write rollout.overlap.max_in_flight to bound the prompts under way"),
    "train_batch_size": combined(),
    "max_epochs": to("train.epochs_per_step", convert=int),
    "num_episodes": combined("a run has a number of steps: rows x num_episodes / rollout_batch_size"),
    "micro_train_batch_size": combined(),
    "micro_rollout_batch_size": needless("scoring keeps to train.max_tokens_per_micro_batch"),
    "use_dynamic_batch": needless("micro-batches are always filled by tokens"),
    "train_max_tokens_per_gpu": combined(),
    "rollout_max_tokens_per_gpu": needless("scoring keeps to train.max_tokens_per_micro_batch"),
    "actor_learning_rate": to("train.optimizer.learning_rate", convert=float),
    "critic_learning_rate": to("train.critic_optimizer.learning_rate", convert=float),
    "freezing_actor_steps": to("train.critic_warmup_steps", convert=every),
    "save_value_network": missing("the critic's weights are in the checkpoints"),
    "enable_ema": combined(),
    "ema_beta": combined(),
    "ptx_coef": combined(),
    "pretrain_data": combined(),
    "pretrain_data_probs": combined(),
    "pretrain_split": combined(),
    "advantage_estimator": combined(),
    "policy_loss_type": combined(),
    "no_advantage_std_norm": combined(),
    "eps_clip": to("algorithm.loss_options.clip_range", convert=float),
    "eps_clip_low_high": combined(),
    "dual_clip": to("algorithm.loss_options.dual_clip", convert=float),
    "value_clip": combined(),
    "lambd": combined(),
    "gamma": to("algorithm.gamma", convert=float),
    "entropy_loss_coef": to("algorithm.loss_options.entropy_coef", convert=float),
    "aux_loss_coef": to("algorithm.loss_options.aux_loss_coef", convert=float, neutral=(0,)),
    "init_kl_coef": to("algorithm.kl_coef", convert=float),
    "kl_target": to("algorithm.kl_target", convert=float),
    "kl_horizon": to("algorithm.kl_horizon", convert=int),
    "kl_estimator": to("algorithm.kl_estimator"),
    "use_kl_loss": combined(),
    "enable_vllm_is_correction": combined(),
    "vllm_is_truncated_threshold": combined(),
    "vllm_is_correction_type": combined(),
    "dynamic_filtering": combined(),
    "dynamic_filtering_reward_range": combined(
        "groups are replaced whose scores are all equal; OpenRLHF replaces those whose mean lies outside the range"
    ),
    "async_train": combined(),
    "async_queue_size": combined(),
    "partial_rollout": combined(),
    "eval_steps": to("evaluation.every", convert=every),
    "eval_dataset": combined(),
    "eval_split": combined(),
    "eval_temperature": combined(),
    "eval_n_samples_per_prompt": combined(),
    "best_metric_key": differs("names of our metrics: reward, or eval/eval/pass@1", "evaluation.best_metric"),
}
ONLINE_DEFAULTS: Mapping[str, Any] = {
    **OPTIMIZER_DEFAULTS,
    "actor_learning_rate": 1e-6,
    "critic_learning_rate": 9e-6,
    "zero_stage": 2,
    "seed": 42,
    "save_path": "./ckpt",
    "rollout_batch_size": 1024,
    "train_batch_size": 128,
    "n_samples_per_prompt": 1,
    "max_epochs": 1,
    "temperature": 1.0,
    "gamma": 1,
    "lambd": 1,
    "eps_clip": 0.2,
    "value_clip": 0.5,
    "ptx_coef": 0.05,
    "init_kl_coef": 0.01,
    "kl_estimator": "k1",
    "reward_clip_range": [-10, 10],
    "input_key": "input",
}
_WITHOUT_CRITIC = {
    "reinforce": "reinforce_pp",
    "rloo": "rloo",
    "reinforce_baseline": "reinforce_pp_baseline",
    "group_norm": "grpo",
    "dr_grpo": "grpo",
}


def online_run(draft: Draft) -> str:
    """Write what depends on several settings; the command that runs the file."""
    if not draft.on("pretrain"):
        raise ConfigError("the command names no model; add --pretrain (--actor.model_name_or_path)")
    write_lora(draft)
    write_template(draft)
    _write_lengths(draft)
    _write_data(draft)
    _write_pretraining(draft)
    _write_reward(draft)
    _write_algorithm(draft)
    _write_batches(draft)
    _write_overlap(draft)
    draft.put("rollout.backend", "vllm")
    write_placement(draft)
    return "rlhf train"


def _write_lengths(draft: Draft) -> None:
    draft.put("lengths.long_prompts", "drop")
    whole, new = draft.value("max_len"), draft.value("max_new_tokens")
    if "prompt_max_len" in draft.given or whole is None:
        draft.put("lengths.max_prompt_tokens", int(draft.value("prompt_max_len", 1024)))
        draft.put("rollout.sampling.max_tokens", int(new or 1024))
        draft.noted("max_len", "prompt and response have bounds of their own here")
        return
    whole = int(whole)
    tokens = int(new) if new else whole // 2
    if tokens >= whole:
        raise ConfigError(f"--max_len {whole} leaves no room for a prompt beside {tokens} new tokens")
    draft.put("lengths.max_prompt_tokens", whole - tokens)
    draft.put("rollout.sampling.max_tokens", tokens)
    if new:
        draft.noted("max_len", f"the prompt gets what the {tokens} new tokens leave; longer prompts are left out")
    else:
        draft.noted(
            "max_len",
            "half for the prompt, half for the response; OpenRLHF gives the response what the prompt leaves, which "
            "needs a bound for each here: change lengths.max_prompt_tokens and rollout.sampling.max_tokens",
        )


def _write_data(draft: Draft) -> None:
    if not draft.on("prompt_data"):
        raise ConfigError("the command names no prompts; add --prompt_data (--data.prompt_dataset)")
    columns = {"prompt": str(draft.value("input_key"))}
    if draft.on("label_key"):
        columns["label"] = str(draft.value("label_key"))
    if draft.on("image_key"):
        columns["images"] = str(draft.value("image_key"))
    split = str(draft.value("prompt_split", "train"))
    draft.put("data.train", datasets(draft, "prompt_data", "prompt_data_probs", split=split, columns=columns))
    if draft.on("eval_dataset"):
        split = str(draft.value("eval_split", "train"))
        draft.put(
            "evaluation.sets.eval",
            {
                "data": datasets(draft, "eval_dataset", None, split=split, columns=columns, limited=False),
                "samples": int(draft.value("eval_n_samples_per_prompt", 4)),
                "temperature": float(draft.value("eval_temperature", 0.6)),
            },
        )


def _write_pretraining(draft: Draft) -> None:
    """Text beside the samples, which needs both a weight (theirs has a default) and data."""
    if not draft.on("pretrain_data"):
        if draft.on("ptx_coef"):
            draft.noted("ptx_coef", "without --pretrain_data it changes nothing, as in OpenRLHF")
        return
    if float(draft.value("temperature")) != 1:
        why = "the likelihood of a text is that at temperature 1, and here a step has one temperature: write 1"
        draft.refused("pretrain_data", why)
        return
    draft.put("algorithm.ptx_coef", float(draft.value("ptx_coef")))
    split, columns = str(draft.value("pretrain_split", "train")), {"text": str(draft.value("input_key"))}
    sources = datasets(draft, "pretrain_data", "pretrain_data_probs", split=split, columns=columns, limited=False)
    draft.put("data.pretrain", sources)
    draft.noted("pretrain_data", "rows longer than the longest sample are cut")


def _write_reward(draft: Draft) -> None:
    agent, remote = draft.value("agent_func_path"), draft.value("remote_rm_url")
    models: list[str] = []
    if agent:
        module = PurePosixPath(str(agent)).stem
        draft.put("rollout.agent", {"environment": f"{module}:Environment"})
        draft.noted(
            "agent_func_path",
            f"write {module}.py anew as an rlhf_core.Environment (reset, step), or as a program that talks to the "
            "model (rollout.agent.program); see docs/agents.md. Its rewards count as the reward",
        )
    elif remote and str(remote).endswith(".py"):
        module = PurePosixPath(str(remote)).stem
        draft.put("reward.function", f"{module}:reward_func")
        draft.noted(
            "remote_rm_url",
            "put the file's folder on PYTHONPATH, and change the function: it is called with completions, prompts "
            "and the columns of the data (label), not queries, and returns a list of numbers",
        )
    elif remote:
        urls = [url.strip() for url in str(remote).split(",")]
        draft.put("reward.parts.http", {"kind": "http", "endpoints": {"urls": urls}})
        draft.noted(
            "remote_rm_url",
            "a request has completions, prompts and columns where OpenRLHF's has query; `rlhf serve-rm` takes both",
        )
    elif draft.on("reward_pretrain"):
        models = [path.strip() for path in str(draft.value("reward_pretrain")).split(",")]
        if len(models) == 1:
            draft.put("reward.model", models[0])
        for place, path in enumerate(models if len(models) > 1 else []):
            draft.put(f"reward.parts.model_{place}", {"kind": "model", "path": path, "weight": 1 / len(models)})
    else:
        raise ConfigError(
            "the command names no reward; add --reward_pretrain, --remote_rm_url or --agent_func_path"
        )
    if (agent or remote) and draft.on("reward_pretrain"):
        draft.noted("reward_pretrain", "not used, as in OpenRLHF beside a remote reward or an agent")
    if draft.on("normalize_reward"):
        if agent or remote:
            draft.noted("normalize_reward", "without a reward model it changes nothing, as in OpenRLHF")
        else:
            parts = ["model"] if len(models) == 1 else [f"model_{place}" for place in range(len(models))]
            draft.put("reward.normalize", {part: {"source": "measured"} for part in parts})
            draft.noted(
                "normalize_reward",
                "by mean and deviation of the first answers; OpenRLHF takes `mean` and `std` of the reward model's "
                "config.json: for these write source: given with both (of a model of `rlhf offline rm` with "
                "keep_scale leave it out: engines find the numbers)",
            )


def _write_algorithm(draft: Draft) -> None:
    estimator = str(draft.value("advantage_estimator", "gae"))
    if estimator == "gae":
        draft.put("algorithm.name", "ppo")
        draft.put("algorithm.lam", float(draft.value("lambd")))
        draft.put("algorithm.value_loss_options.clip_range", float(draft.value("value_clip")))
        if draft.on("critic_pretrain"):
            draft.put("model.critic", str(draft.value("critic_pretrain")))
    elif estimator in _WITHOUT_CRITIC:
        _without_critic(draft, estimator)
    else:
        raise ConfigError(f"--advantage_estimator {estimator}: known are gae, {', '.join(_WITHOUT_CRITIC)}")
    draft.put("algorithm.kl_in", "loss" if draft.on("use_kl_loss") else "reward")
    if draft.on("no_advantage_std_norm") and estimator in ("gae", "reinforce", "reinforce_baseline"):
        draft.put("algorithm.whiten_options.kind", "center")
    if draft.value("policy_loss_type", "ppo") == "gspo":
        draft.put("algorithm.loss", "gspo")
        draft.put("algorithm.loss_options.aggregation", "seq_mean_token_mean")
        draft.put("algorithm.loss_options.clip_range_high", float(draft.value("eps_clip")))
    if pair := draft.value("eps_clip_low_high"):
        draft.put("algorithm.loss_options.clip_range", float(pair[0]))
        draft.put("algorithm.loss_options.clip_range_high", float(pair[1]))
    _write_shaping(draft)
    _write_correction(draft)
    if draft.on("enable_ema"):
        draft.put("train.average_decay", float(draft.value("ema_beta", 0.992)))


def _without_critic(draft: Draft, estimator: str) -> None:
    draft.put("algorithm.name", _WITHOUT_CRITIC[estimator])
    draft.put("algorithm.loss_options.aggregation", "token_mean")
    if estimator in ("reinforce_baseline", "group_norm", "rloo", "dr_grpo"):
        draft.put("algorithm.shaping.clip_after_baseline", True)
    if estimator == "group_norm":
        draft.put("algorithm.advantage_options.eps", 1e-9)
    if estimator == "dr_grpo":
        draft.put("algorithm.advantage_options.scale", "none")
        draft.noted(
            "advantage_estimator", "the mean over tokens, as OpenRLHF's; `dr_grpo` here divides by a length"
        )
    why = f"{estimator} has no critic"
    for name in draft.given:
        critics = name.startswith("critic_") and name not in ("critic_num_nodes", "critic_num_gpus_per_node")
        if critics or name in ("value_clip", "lambd"):
            draft.noted(name, f"{why}: not used, as in OpenRLHF")
    draft.settings["train"].pop("critic_optimizer", None)
    draft.settings["train"].pop("critic_warmup_steps", None)


def _write_shaping(draft: Draft) -> None:
    if draft.on("overlong_buffer_len"):
        draft.put("algorithm.shaping.overlong_max_length", draft.take("rollout.sampling.max_tokens"))
        draft.put("algorithm.shaping.overlong_buffer", int(draft.value("overlong_buffer_len")))
        draft.put("algorithm.shaping.overlong_penalty", float(draft.value("overlong_penalty_factor", 1)))
    coefficient = draft.value("stop_properly_penalty_coef")
    if coefficient is not None:
        key = "truncation_factor" if float(coefficient) >= 0 else "truncation_score"
        draft.put(f"algorithm.shaping.{key}", float(coefficient))


def _write_correction(draft: Draft) -> None:
    if not draft.on("enable_vllm_is_correction"):
        return
    bounds = draft.value("vllm_is_truncated_threshold")
    kind = draft.value("vllm_is_correction_type", "tis")
    dotted = "vllm_is_correction_type" in draft.given or "." in draft.written["enable_vllm_is_correction"]
    low, high = (
        bounds if isinstance(bounds, list) else (0.5, 5.0) if dotted and bounds is None else (None, bounds or 2)
    )
    low, high = None if low is None else float(low), float(high)
    ours = {
        "tis": [{"low": low, "high": high}],
        "icepop": [{"mode": "mask", "low": low, "high": high}],
        "seq-mask-tis": [{"level": "geometric", "mode": "reject", "low": low, "high": high}, {"high": None}],
    }
    if kind not in ours:
        raise ConfigError(f"{draft.written['vllm_is_correction_type']} {kind}: known are {', '.join(ours)}")
    draft.put("algorithm.off_policy", ours[kind])


def _write_batches(draft: Draft) -> None:
    prompts, samples = int(draft.value("rollout_batch_size")), int(draft.value("n_samples_per_prompt"))
    batch = int(draft.value("train_batch_size"))
    minibatches = max(1, prompts * samples // batch)
    draft.put("train.minibatches", minibatches)
    if prompts * samples != minibatches * batch:
        draft.noted(
            "train_batch_size",
            f"{prompts * samples} samples of a step are cut into {minibatches} minibatches of nearly equal size",
        )
    rows = int(float(draft.value("max_samples", UNLIMITED)))
    if rows < UNLIMITED:
        draft.put("train.steps", max(1, rows * int(draft.value("num_episodes", 1)) // prompts))
        draft.noted("max_samples", "train.steps follows from it; if the data has fewer rows, lower train.steps")
    else:
        draft.remarks.append(
            "train.steps is our default of 100: OpenRLHF's run ends with its data. Write rows x num_episodes / "
            f"{prompts} (rollout_batch_size)."
        )
    longest = draft.take("lengths.max_prompt_tokens") + draft.take("rollout.sampling.max_tokens")
    if draft.on("use_dynamic_batch"):
        draft.put("train.max_tokens_per_micro_batch", int(draft.value("train_max_tokens_per_gpu", 16192)))
        draft.noted("micro_train_batch_size", "not used with dynamic batches, as in OpenRLHF")
    elif "micro_train_batch_size" in draft.given:
        micro = int(draft.value("micro_train_batch_size"))
        draft.put("train.max_tokens_per_micro_batch", micro * longest)
        draft.noted("micro_train_batch_size", f"in tokens: {micro} sequences of {longest}")


def _write_overlap(draft: Draft) -> None:
    if draft.on("dynamic_filtering"):
        draft.put("rollout.dynamic_sampling", {})
    if not draft.on("async_train"):
        return
    corrected = draft.on("enable_vllm_is_correction")
    overlap = {
        "max_staleness": int(draft.value("async_queue_size", 1)),
        "pause_while_training": False,
        "off_policy_correction": corrected,
    }
    draft.put("rollout.overlap", overlap)
    draft.noted("async_train", "samples that run on across an update go on under the new weights")
