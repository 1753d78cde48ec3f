"""Everything that can be wrong with a run, found out before an engine starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_algos import DataSource, check_model_path, read_rows
from rlhf_core import ConfigError

from rlhf_launch.config.run import EvaluationSection, RunConfig
from rlhf_launch.online.evaluation import HeldOut
from rlhf_launch.placement.plans import check_engines
from rlhf_launch.placement.resolve import ResolvedBackends, choose_components
from rlhf_launch.samples.prompts import Prompt, make_prompts
from rlhf_launch.samples.reward import CheckedReward, check_reward


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What a run works on, checked."""

    components: ResolvedBackends
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
    components = choose_components(config)
    check_engines(config, components)
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
        components=components,
        tokenizer=tokenizer,
        prompts=prompts,
        held_out=held_out,
        dropped=dropped,
        reward=reward,
    )


def load_tokenizer(model: str, *, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer.

    Raises:
        ConfigError: the model has none that can be loaded.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.policy: no tokenizer can be loaded from {model!r}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.policy: the tokenizer of {model!r} has no end-of-text token; set `eos_token` in it"
        )
    return tokenizer


def _prompts(config: RunConfig, tokenizer: Any) -> tuple[list[Prompt], dict[str, HeldOut], int]:
    """Training prompts, held-out sets by name, and how many prompts of all were dropped for their length."""
    data = config.data
    source = DataSource(path=data.prompts, split=data.split, columns=data.columns, limit=data.limit)
    prompts, dropped = make_prompts(read_rows(source, required=("prompt",)), tokenizer, data)
    if data.eval_rows >= len(prompts):
        raise ConfigError(
            f"data.eval_rows={data.eval_rows} leaves none of the {len(prompts)} prompts to train on; lower it or "
            "give a file under evaluations"
        )
    cut = len(prompts) - data.eval_rows
    held_out: dict[str, HeldOut] = {}
    if data.eval_rows:
        section = EvaluationSection(prompts=data.prompts, split=data.split)
        held_out["held-out"] = HeldOut(prompts=prompts[cut:], section=section)
    if "held-out" in held_out and "held-out" in config.evaluations:
        raise ConfigError("evaluations.held-out is what data.eval_rows makes; give the set another name")
    for name, section in config.evaluations.items():
        source = DataSource(path=section.prompts, split=section.split, columns=section.columns, limit=section.limit)
        found, more = make_prompts(read_rows(source, required=("prompt",)), tokenizer, data)
        held_out[name] = HeldOut(prompts=found, section=section)
        dropped += more
    return prompts[:cut], held_out, dropped
