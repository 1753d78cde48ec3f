"""What goes into a rollout backend and what comes out: token ids, never text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rlhf_core.data.packed import FloatsLike, IntsLike, PackedFloats, PackedInts
from rlhf_core.data.sampling import LogProbMeaning, SamplingConfig
from rlhf_core.errors import ConfigError

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: end-of-text or a stop condition; `length`: max_tokens or the context is full; `abort`: cut off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationRequest:
    """One prompt and its `n` samples. A backend computes the prompt once for all of them.

    The prompt may be given as any sequence of numbers.
    """

    request_id: str
    """Unique among the requests in flight."""
    prompt_token_ids: PackedInts
    sampling: SamplingConfig
    n: int = 1
    """Samples to draw."""
    seed: int | None = None
    """Sample i is drawn with seed + i, so give requests seeds at least `n` apart; None is unseeded."""
    images: tuple[Any, ...] = ()
    """Images in the order of their placeholders in the prompt, one for each: the backend puts as many tokens there
    as the image takes. Needs a backend with the `images` capability."""

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            request_id: str,
            prompt_token_ids: IntsLike,
            sampling: SamplingConfig,
            n: int = 1,
            seed: int | None = None,
            images: Sequence[Any] = (),
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", PackedInts.of(self.prompt_token_ids))
        if not self.prompt_token_ids:
            raise ConfigError(f"request {self.request_id!r} has an empty prompt; give at least one token id")
        if self.n < 1:
            raise ConfigError(f"request {self.request_id!r} asks for n={self.n} samples; give at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One sampled continuation. The three per-token columns have equal length, and may be given as any sequences or
    arrays.

    >>> Sample(token_ids=(7, 2), log_probs=(-0.1, -0.3), weight_versions=(4, 4), finish_reason="stop").length
    2
    """

    token_ids: PackedInts
    log_probs: PackedFloats
    """Log-prob of each token under the distribution it was drawn from (see `GenerationResult.meaning`)."""
    weight_versions: PackedInts
    """Version of the weights that produced each token."""
    finish_reason: FinishReason

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            token_ids: IntsLike,
            log_probs: FloatsLike,
            weight_versions: IntsLike,
            finish_reason: FinishReason,
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", PackedInts.of(self.token_ids))
        object.__setattr__(self, "log_probs", PackedFloats.of(self.log_probs))
        object.__setattr__(self, "weight_versions", PackedInts.of(self.weight_versions).compressed())
        if not len(self.token_ids) == len(self.log_probs) == len(self.weight_versions):
            raise ValueError(
                f"a sample needs one log-prob and one weight version per token, got {len(self.token_ids)} "
                f"tokens, {len(self.log_probs)} log-probs, {len(self.weight_versions)} versions"
            )

    @property
    def length(self) -> int:
        """Number of sampled tokens."""
        return len(self.token_ids)

    def owned(self) -> Sample:
        """The same sample in memory of this process alone."""
        return Sample(
            token_ids=self.token_ids.owned(),
            log_probs=self.log_probs.owned(),
            weight_versions=self.weight_versions.owned(),
            finish_reason=self.finish_reason,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # dataclasses would look up the names of the fields for each of a million samples.
        return _sample, (self.token_ids, self.log_probs, self.weight_versions, self.finish_reason)


def _sample(
    token_ids: PackedInts, log_probs: PackedFloats, weight_versions: PackedInts, finish_reason: FinishReason
) -> Sample:
    return Sample(
        token_ids=token_ids, log_probs=log_probs, weight_versions=weight_versions, finish_reason=finish_reason
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationResult:
    """The samples of one request, in the order of their seeds."""

    request_id: str
    samples: tuple[Sample, ...]
    meaning: LogProbMeaning = field(default_factory=LogProbMeaning)
    prompt_token_ids: PackedInts | None = None
    """The prompt as the model ran it, where the request has images: each placeholder as many tokens as its image
    takes. A trainer compares them with its own."""
