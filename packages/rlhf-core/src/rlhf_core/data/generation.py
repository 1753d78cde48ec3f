"""What goes into a rollout backend and what comes out: token ids, never text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_core.data.sampling import LogProbMeaning, SamplingConfig
from rlhf_core.errors import ConfigError

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: end-of-text or a stop condition; `length`: max_tokens or the context is full; `abort`: cut off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One prompt and its `n` samples. A backend computes the prompt once for all of them."""

    request_id: str
    """Unique among the requests in flight."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingConfig
    n: int = 1
    """Samples to draw."""
    seed: int | None = None
    """Sample i is drawn with seed + i, so give requests seeds at least `n` apart; None is unseeded."""
    images: tuple[Any, ...] = ()
    """Images in the order of their placeholders in the prompt; needs a backend with the `images` capability."""

    def __post_init__(self) -> None:
        if not self.prompt_token_ids:
            raise ConfigError(f"request {self.request_id!r} has an empty prompt; give at least one token id")
        if self.n < 1:
            raise ConfigError(f"request {self.request_id!r} asks for n={self.n} samples; give at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sampled continuation. The three per-token tuples have equal length.

    >>> Sample(token_ids=(7, 2), log_probs=(-0.1, -0.3), weight_versions=(4, 4), finish_reason="stop").length
    2
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Log-prob of each token under the distribution it was drawn from (see `GenerationResult.meaning`)."""
    weight_versions: tuple[int, ...]
    """Version of the weights that produced each token."""
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.log_probs) == len(self.weight_versions):
            raise ValueError(
                f"a sample needs one log-prob and one weight version per token, got {len(self.token_ids)} "
                f"tokens, {len(self.log_probs)} log-probs, {len(self.weight_versions)} versions"
            )

    @property
    def length(self) -> int:
        """Number of sampled tokens."""
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """The samples of one request, in the order of their seeds."""

    request_id: str
    samples: tuple[Sample, ...]
    meaning: LogProbMeaning = field(default_factory=LogProbMeaning)
