"""What a run learns from, scores, a teacher or pairs, and what that asks of its other settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_algos import ShowsTeacherMore
from rlhf_core import ConfigError

if TYPE_CHECKING:
    from rlhf_launch.config.run import OnlineConfig


def check_signals(config: OnlineConfig) -> None:
    """Refuse settings that need a signal which the run does not have.

    Raises:
        ConfigError: the first of them, with what to write instead.
    """
    _check_teacher(config)
    _check_shown(config)
    if not config.is_scored:
        _check_unscored(config)
    if config.learns_from_pairs:
        _check_pairs(config)
    curriculum = config.data.curriculum
    if curriculum is not None and curriculum.cooldown_steps and config.rollout.samples_per_prompt < 2:
        raise ConfigError(
            "data.curriculum.cooldown_steps is about prompts whose samples all score alike, which one sample "
            "always does; raise rollout.samples_per_prompt, or leave it out"
        )


def _check_teacher(config: OnlineConfig) -> None:
    name, teacher, teachers = config.algorithm.name, config.model.teacher, config.model.teachers
    itself = isinstance(config.algorithm.recipe, ShowsTeacherMore)
    if config.needs_teacher and teacher is None and not teachers and not itself:
        raise ConfigError(f"algorithm {name!r} learns from a teacher; write model.teacher: path/of/the/teacher")
    if (teacher is not None or teachers) and not config.needs_teacher:
        raise ConfigError(
            f"model.{'teacher' if teacher is not None else 'teachers'} is set, but algorithm {name!r} has no "
            "teacher; write algorithm: on_policy_distillation, or leave it out"
        )
    if teachers and teacher is not None:
        raise ConfigError("model.teacher and model.teachers are both set; name the one among the others")
    if teachers and itself:
        raise ConfigError(
            f"algorithm {name!r} has one teacher, which is shown more than the policy; write model.teacher, or "
            "leave it out for the policy's own start"
        )
    for one in teachers:
        if not one.replace("-", "_").isidentifier():
            raise ConfigError(f"model.teachers: {one!r} is no name; write letters, digits, - and _")


def _check_shown(config: OnlineConfig) -> None:
    """Refuse a teacher with a prompt of its own where there is no such thing."""
    recipe = config.algorithm.recipe
    if not isinstance(recipe, ShowsTeacherMore):
        return
    if config.rollout.agent is not None:
        raise ConfigError(
            f"algorithm {config.algorithm.name!r} shows the teacher another prompt than the samples had, and the "
            "episodes of rollout.agent have several turns; leave rollout.agent out"
        )
    if recipe.shows_success and not config.is_scored:
        raise ConfigError(
            "algorithm.teacher_template has the place {success}, and without a reward no sample is a success; give "
            "reward.function, reward.model or reward.parts"
        )


def _check_unscored(config: OnlineConfig) -> None:
    """Refuse what needs scores in a run without a reward."""
    curriculum, evaluation = config.data.curriculum, config.evaluation
    keys = {
        "rollout.dynamic_sampling": config.rollout.dynamic_sampling is not None,
        "data.hold_out": bool(config.data.hold_out),
        "evaluation.data": bool(evaluation.data),
        "evaluation.sets": bool(evaluation.sets),
    }
    if found := [key for key, there in keys.items() if there]:
        raise ConfigError(
            f"{found[0]} needs scores, and there is no reward; give reward.function, reward.model or reward.parts "
            f"(with reward_coef=0 {config.algorithm.name} only reports it), or leave {found[0]} out"
        )
    if curriculum is not None and curriculum.needs_scores:
        raise ConfigError(
            "data.curriculum: target_success_rate and cooldown_steps go by scores, and there is no reward; "
            "give one, or leave them out (difficulty and mixture need none)"
        )


def _check_pairs(config: OnlineConfig) -> None:
    name, train = config.algorithm.name, config.train
    if train.prompts_per_step < train.minibatches * train.ranks:
        raise ConfigError(
            f"algorithm {name!r} makes one pair of each prompt, and {train.prompts_per_step} pairs a step "
            f"(train.prompts_per_step) cannot be cut into {train.minibatches} minibatches for {train.ranks} ranks; "
            "every rank needs a pair"
        )
    if train.routing_replay:
        raise ConfigError(
            "train.routing_replay takes the experts from scoring the samples before the update, and algorithm "
            f"{name!r} does not score them; leave it out"
        )
