"""The kinds of rewards, told apart by `kind`: a new one is its own module in `kinds` and a line here."""

from __future__ import annotations

from rlhf_rollout.rewards.kinds.answers import ExactRewardConfig, FuzzyRewardConfig, MathRewardConfig
from rlhf_rollout.rewards.kinds.code import CodeRewardConfig
from rlhf_rollout.rewards.kinds.environment import EnvironmentRewardConfig
from rlhf_rollout.rewards.kinds.form import LengthRewardConfig, RegexRewardConfig
from rlhf_rollout.rewards.kinds.function import FunctionRewardConfig
from rlhf_rollout.rewards.kinds.generative import GenerativeRewardConfig, PairwiseRewardConfig
from rlhf_rollout.rewards.kinds.http import HTTPRewardConfig
from rlhf_rollout.rewards.kinds.judge import JudgeRewardConfig
from rlhf_rollout.rewards.kinds.model import ModelRewardConfig
from rlhf_rollout.rewards.kinds.steps import StepRewardConfig

RewardPart = (
    FunctionRewardConfig
    | HTTPRewardConfig
    | JudgeRewardConfig
    | CodeRewardConfig
    | MathRewardConfig
    | ExactRewardConfig
    | FuzzyRewardConfig
    | RegexRewardConfig
    | LengthRewardConfig
    | EnvironmentRewardConfig
    | ModelRewardConfig
    | StepRewardConfig
    | GenerativeRewardConfig
    | PairwiseRewardConfig
)
"""Configuration of one part of a reward."""
