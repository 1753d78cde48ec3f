"""Everything that can be wrong with a run, found out before an engine starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_algos import DataSource, check_model_path
from rlhf_core import ConfigError, SamplingConfig

from rlhf_launch.config.run import DataSection, EvaluationSection, RunConfig
from rlhf_launch.online.evaluation import HeldOut
from rlhf_launch.placement.plans import check_engines
from rlhf_launch.placement.resolve import ResolvedBackends, resolve_backends
from rlhf_launch.samples.prompts import Prompt, PromptFormat, load_tokenizer, read_prompts
from rlhf_launch.samples.reward import CheckedReward, check_reward


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What a run works on, checked."""

    backends: ResolvedBackends
    tokenizer: Any
    prompts: Sequence[Prompt]
    held_out: Mapping[str, HeldOut]
    dropped: int
    """Prompts left out for their length."""
    reward: CheckedReward


def check_inputs(config: RunConfig) -> Inputs:
    """Load and check all inputs that are cheap to load: parts, models' configurations, tokenizer, data, reward.

    Raises:
        UserError: the first thing that is wrong, with what was found and what to write instead.
    """
    backends = resolve_backends(config)
    check_engines(config, backends)
    for key, path in {
        "model.policy": config.model.policy,
        "model.reference": config.model.reference,
        "model.critic": config.model.critic,
    }.items():
        if path is not None:
            check_model_path(path, what=key)
    if config.rollout.agent is not None:
        config.rollout.agent.environment_maker()
    tokenizer = load_tokenizer(config.model.policy, trust_remote_code=config.model.trust_remote_code)
    agent = config.rollout.agent is not None
    trusted = config.model.trust_remote_code
    reward = check_reward(config.reward, tokenizer, environment=agent, trust_remote_code=trusted)
    try:
        prompts, held_out, dropped = _prompts(config, tokenizer)
        reward.check_columns(prompts, config.data.prompts, environment=agent)
        for name, found in held_out.items():
            reward.check_columns(found.prompts, f"evaluations.{name}", environment=agent)
    except BaseException:
        reward.close()
        raise
    return Inputs(
        backends=backends,
        tokenizer=tokenizer,
        prompts=prompts,
        held_out=held_out,
        dropped=dropped,
        reward=reward,
    )


def prompt_format(data: DataSection) -> PromptFormat:
    """How the rows of this section become prompts."""
    return PromptFormat(
        chat=data.chat,
        system_prompt=data.system_prompt,
        max_tokens=data.max_prompt_tokens,
        drop_overlong=data.overlong == "drop",
    )


def training_source(data: DataSection) -> DataSource:
    """Where the prompts to train on, or to generate for, are."""
    return DataSource(path=data.prompts, split=data.split, columns=data.columns, limit=data.limit)


def _prompts(config: RunConfig, tokenizer: Any) -> tuple[list[Prompt], dict[str, HeldOut], int]:
    """Training prompts, held-out sets by name, and how many prompts of all were dropped for their length."""
    data, form = config.data, prompt_format(config.data)
    prompts, dropped = read_prompts(training_source(data), tokenizer, form)
    if data.eval_rows >= len(prompts):
        raise ConfigError(
            f"data.eval_rows={data.eval_rows} leaves none of the {len(prompts)} prompts to train on; lower it or "
            "give a file under evaluations"
        )
    cut = len(prompts) - data.eval_rows
    held_out: dict[str, HeldOut] = {}
    if data.eval_rows:
        section = EvaluationSection(prompts=data.prompts, split=data.split)
        held_out["held-out"] = _held_out(prompts[cut:], section, config.rollout.sampling)
    if "held-out" in held_out and "held-out" in config.evaluations:
        raise ConfigError("evaluations.held-out is what data.eval_rows makes; give the set another name")
    for name, section in config.evaluations.items():
        source = DataSource(path=section.prompts, split=section.split, columns=section.columns, limit=section.limit)
        found, more = read_prompts(source, tokenizer, form)
        held_out[name] = _held_out(found, section, config.rollout.sampling)
        dropped += more
    return prompts[:cut], held_out, dropped


def _held_out(prompts: Sequence[Prompt], section: EvaluationSection, training: SamplingConfig) -> HeldOut:
    """A set that is sampled as the training's prompts are, except for what its section says."""
    longest = section.max_tokens or training.max_tokens
    sampling = replace(
        training,
        temperature=section.temperature,
        top_p=section.top_p,
        max_tokens=longest,
        min_tokens=min(training.min_tokens, longest),
    )
    return HeldOut(prompts=prompts, sampling=sampling, samples=section.samples, pass_score=section.pass_score)
