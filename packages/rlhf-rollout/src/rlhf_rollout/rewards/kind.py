"""What every kind of reward has in a configuration, and what those with a model of their own have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from rlhf_core import DType, RewardFunction, Role

from rlhf_rollout.rewards.batched_scorer import Scorer
from rlhf_rollout.rewards.faults import FailureHandling


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Base of the kinds of rewards.

    A kind is a frozen dataclass with a field `kind` (a Literal of its name, by which files tell it from the
    others), its settings, and `make`; `rewards.parts` lists them.
    """

    # Without slots of its own, it can stand beside a slotted configuration as a second base class.
    __slots__ = ()

    weight: float = 1.0
    """Factor of the part's score in the sum of all parts; 0 only logs it."""
    on_failure: FailureHandling | None = None
    """What happens when this part fails; None for what the whole reward says."""

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of servers of which one must be there when a run starts."""
        return ()


@dataclass(frozen=True, kw_only=True)
class EngineRewardConfig(RewardConfig):
    """Base of the kinds whose model runs on ranks of its own. A launcher places the ranks and calls `make`."""

    __slots__ = ()

    role: ClassVar[Role] = "reward"
    """What the model is to its engine: `reward` has a scalar head, `reference` that of a language model."""
    compares_samples: ClassVar[bool] = False
    """Whether a sample's score depends on the others of its prompt, so that none of them can be left out."""
    reads_policy_tokens: ClassVar[bool] = False
    """Whether the model reads the tokens that the policy sampled, so that both need the same vocabulary."""

    path: str
    """The model: a path, or else a hub name."""
    engine: str | None = None
    """Training engine that scores; None for the policy's."""
    dtype: DType | None = None
    """Numbers in which the model runs; None for the policy's."""

    @property
    def columns(self) -> frozenset[str]:
        """Columns of the data that it needs."""
        return frozenset()

    def check(self, tokenizer: Any, *, name: str) -> None:
        """Refuse the model's own tokenizer before the model is loaded; `name` is that of the part.

        Raises:
            ConfigError: it does not fit the settings.
        """

    def make(self, engine: Scorer, *, name: str, tokenizer: Any, policy_tokenizer: Any) -> RewardFunction:
        """The reward.

        Args:
            engine: the model's ranks, as one engine in the role above.
            name: of the part, for messages.
            tokenizer: the model's own; None where its directory has none and it reads the policy's tokens.
            policy_tokenizer: the tokenizer that made the responses' texts.
        """
        raise NotImplementedError
