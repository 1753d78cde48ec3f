"""Everything that can be wrong with a run, found out before an engine starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_algos import ShowsTeacherMore, check_same_vocabulary, processor_of
from rlhf_core import ConfigError, DataError, SamplingConfig, check_model_path, check_transport
from rlhf_rollout import ChatTokens, check_agent

from rlhf_launch.config.reward import RewardSection
from rlhf_launch.config.run import HELD_OUT, EvaluationSet, OnlineConfig
from rlhf_launch.named_models import longest_row
from rlhf_launch.online.evaluation import HeldOut
from rlhf_launch.placement.plans import check_engines
from rlhf_launch.placement.resolve import ResolvedBackends, resolve_backends
from rlhf_launch.samples.curriculum import difficulties
from rlhf_launch.samples.pretraining import PretrainingText, load_pretraining
from rlhf_launch.samples.prompts import (
    Prompt,
    PromptFormat,
    PromptSets,
    ShownPrompt,
    load_prompts,
    policy_tokenizer,
)
from rlhf_launch.samples.reward import CheckedReward, check_reward
from rlhf_launch.samples.sampling import gateway_class
from rlhf_launch.samples.several_teachers import check_teachers_named
from rlhf_launch.samples.teacher_prompts import with_teacher_prompts


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What a run works on, checked."""

    backends: ResolvedBackends
    tokenizer: Any
    prompts: PromptSets
    held_out: Mapping[str, HeldOut]
    dropped: int
    """Prompts left out for their length."""
    reward: CheckedReward
    pretraining: PretrainingText | None = None
    """What `data.pretrain` names."""
    agent_processor: Any = None
    """The policy's, where agents show it images."""
    agent_image_token_ids: frozenset[int] = frozenset()
    """Tokens that stand for those."""

    @property
    def image_token_ids(self) -> frozenset[int]:
        """Tokens that stand for images in prompts and conversations; none where there can be no image."""
        shown = _shown(self.prompts, self.held_out)
        return self.agent_image_token_ids.union(token for one in shown for token in one.images.token_ids)


def check_inputs(config: OnlineConfig) -> Inputs:
    """Load and check all inputs that are cheap to load: parts, models' configurations, tokenizer, data, reward.

    Raises:
        UserError: the first thing that is wrong, with what was found and what to write instead.
    """
    backends = resolve_backends(config)
    check_engines(config, backends)
    if config.weight_sync.transport is not None:
        check_transport(config.weight_sync.transport)
    for key, path in {
        "model.path": config.model.path,
        "model.reference": config.model.reference,
        "model.critic": config.model.critic,
    }.items():
        if path is not None:
            check_model_path(path, what=key)
    model = config.model
    teachers = {"model.teacher": model.teacher} if model.teacher is not None else {}
    for key, path in {
        **teachers,
        **{f"model.teachers.{name}": one for name, one in model.teachers.items()},
    }.items():
        check_same_vocabulary(
            path,
            model.path,
            key=key,
            tokenizer=model.tokenizer,
            larger=True,
            trust_remote_code=model.trust_remote_code,
        )
    if config.rollout.agent is not None:
        check_agent(config.rollout.agent)
    tokenizer = policy_tokenizer(config.model)
    processor, agent_images = _check_conversations(config, tokenizer)
    if agent_images:
        backends = replace(backends, images=True)
        _check_all_see(config, backends)
    agent = config.rollout.agent is not None
    trusted = config.model.trust_remote_code
    reward = check_reward(config.reward, tokenizer, environment=agent, trust_remote_code=trusted)
    try:
        prompts, held_out, dropped = _prompts(config, tokenizer)
        if _shown(prompts, held_out):
            backends = replace(backends, images=True)
            _check_images(config, backends, prompts, held_out)
        pretraining = load_pretraining(config.data, tokenizer, config.lengths, max_length=config.max_length)
        reward.check_columns(prompts.prompts, config.data.description, environment=agent)
        for name, found in held_out.items():
            reward.check_columns(found.prompts, f"evaluation set {name!r}", environment=agent)
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
        pretraining=pretraining,
        agent_processor=processor,
        agent_image_token_ids=agent_images,
    )


def _check_conversations(config: OnlineConfig, tokenizer: Any) -> tuple[Any, frozenset[int]]:
    """Refuse programs that could not talk to the policy; returns its processor and the tokens of images, if they
    may show it any."""
    agent, model = config.rollout.agent, config.model
    if agent is None or not agent.uses_gateway:
        return None, frozenset()
    gateway_class()
    processor = None
    if agent.images:
        processor = processor_of(model.path, tokenizer, trust_remote_code=model.trust_remote_code)
        if processor is None:
            raise ConfigError(
                f"rollout.agent.images: model {model.path!r} has no processor that takes images; give a "
                "vision-language model with its processor's files, or leave the key out"
            )
    # Refuses a tokenizer without a chat template, and a processor that cannot be used.
    images = ChatTokens(tokenizer, processor).images
    return processor, frozenset(() if images is None else images.token_ids)


def _prompts(config: OnlineConfig, tokenizer: Any) -> tuple[PromptSets, dict[str, HeldOut], int]:
    """Training prompts, held-out sets by name, and how many prompts of all were dropped for their length."""
    data, model = config.data, config.model
    processor = processor_of(model.path, tokenizer, trust_remote_code=model.trust_remote_code)
    form = replace(PromptFormat.of(data, config.lengths), processor=processor)
    train = load_prompts(data.train, tokenizer, form, hold_out=data.held_out_rows, seed=config.seed)
    if len(train.prompts) < config.train.prompts_per_step:
        raise ConfigError(
            f"train.prompts_per_step={config.train.prompts_per_step} is more than the {len(train.prompts)} prompts "
            f"of {data.description}; lower it, or give more data"
        )
    if isinstance(config.recipe, ShowsTeacherMore):
        train = replace(train, prompts=_shown_to_teacher(config, config.recipe, tokenizer, train.prompts))
    if model.teachers:
        check_teachers_named(train.prompts, model.teachers, data.description)
    if data.curriculum is not None:
        difficulties(train.prompts, data.curriculum, data.description)
    dropped, sampling = train.dropped, config.rollout.sampling
    held_out: dict[str, HeldOut] = {}
    own = load_prompts(config.evaluation.data, tokenizer, form)
    if found := [*train.held_out, *own.prompts]:
        held_out[HELD_OUT] = _held_out(found, EvaluationSet(data=data.train), sampling)
    dropped += own.dropped
    for name, section in config.evaluation.sets.items():
        more = load_prompts(section.data, tokenizer, form)
        held_out[name] = _held_out(more.prompts, section, sampling)
        dropped += more.dropped
    return train, held_out, dropped


def _shown(train: PromptSets, held_out: Mapping[str, HeldOut]) -> list[ShownPrompt]:
    """The images of all prompts that have some."""
    sets = (train.prompts, train.held_out, *(one.prompts for one in held_out.values()))
    return [prompt.shown for prompts in sets for prompt in prompts if prompt.shown is not None]


def _check_images(
    config: OnlineConfig, backends: ResolvedBackends, train: PromptSets, held_out: Mapping[str, HeldOut]
) -> None:
    """Refuse prompts with images where a part of the run would not see them, or they cannot run together."""
    if config.rollout.agent is not None:
        raise ConfigError(
            "rollout.agent: prompts with images are answered at once here, not in episodes; leave the agent out, "
            "or the column of images (a program can read images itself, and show them with rollout.agent.images)"
        )
    _check_all_see(config, backends)
    first, *others = (one.images for one in _shown(train, held_out))
    for prompt in train.prompts:
        if prompt.shown is None and any(prompt.token_ids.count(token) for token in first.token_ids):
            raise DataError(
                f"{config.data.description}: prompt {prompt.prompt_id} has the token of an image in its text, and "
                "no image; to the trainer's model it would be the place of one of another row; take it out"
            )
    for other in others:
        if other.layout != first.layout:
            raise DataError(
                f"{other.images[0].place}: it does not fit {first.images[0].place}: the processor makes "
                f"{other.layout} of one, and {first.layout} of the other; resize them alike"
            )


def _check_all_see(config: OnlineConfig, backends: ResolvedBackends) -> None:
    """Refuse a run of which a part would not see the images."""
    if blind := sorted((config.reward or RewardSection()).engine_parts()):
        raise ConfigError(
            f"reward.{blind[0]}: a model that scores responses is shown no images, and the policy is; give "
            "a reward that reads the response and the row's columns (function, math, rules, http, ...)"
        )
    if isinstance(config.recipe, ShowsTeacherMore):
        raise ConfigError(
            "algorithm: what a teacher is shown more is text, and the policy is shown images; distil from a "
            "teacher that sees the prompts as they are (on_policy_distillation with model.teacher)"
        )
    check_engines(config, backends)  # refuses roles and settings that do not go with images


def _shown_to_teacher(
    config: OnlineConfig, recipe: ShowsTeacherMore, tokenizer: Any, prompts: Sequence[Prompt]
) -> list[Prompt]:
    from transformers import AutoConfig

    model = config.model
    teacher = AutoConfig.from_pretrained(model.teacher or model.path, trust_remote_code=model.trust_remote_code)
    return with_teacher_prompts(
        prompts,
        recipe,
        tokenizer,
        max_tokens=config.rollout.sampling.max_tokens,
        longest_row=longest_row(teacher),
        where=config.data.description,
    )


def _held_out(prompts: Sequence[Prompt], section: EvaluationSet, training: SamplingConfig) -> HeldOut:
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
