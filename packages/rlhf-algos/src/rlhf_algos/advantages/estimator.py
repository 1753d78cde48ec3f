"""What an advantage estimator is: a function of scores with a frozen config, as a loss is one of model outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from rlhf_core import Batch
from torch import Tensor

AdvantageFunction = Callable[[Tensor, Tensor, Batch, Any], Tensor]
"""f(scores [rows], group_ids [rows], batch, config) -> advantages [rows] or [rows, length].

`group_ids` are equal for responses to the same prompt. `batch` is the whole global batch, with its columns.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageConfig:
    """What a config says of its estimator beside the options; the config of an estimator without options."""

    @property
    def min_samples_per_prompt(self) -> int:
        """Responses to a prompt below which the estimator has nothing to learn from."""
        return 1

    @property
    def needs_greedy_scores(self) -> bool:
        """True if the batch must have the column `greedy_scores` [rows]: the score of the greedy response."""
        return False

    @property
    def score_parts(self) -> tuple[str, ...]:
        """Parts of the score that the batch must have as columns `score/<part>` [rows]."""
        return ()

    @property
    def old_outputs(self) -> tuple[str, ...]:
        """Fields of ModelOutputs, beside log_probs, that the batch must have as columns `old_<field>`: what the
        policy said before the step."""
        return ()

    @property
    def by_groups(self) -> bool:
        """True if the advantages of a group do not depend on other groups."""
        return False

    @property
    def by_steps(self) -> bool:
        """True if the estimator judges each step of a response where parts of the score fell at certain tokens
        (see `step_advantages`). False if it is called once: it reads the column `rewards` itself, or has no
        use for it."""
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantage:
    """An estimator with its config."""

    function: AdvantageFunction
    config: Any = None
    """An `AdvantageConfig`, or what a user's own function takes: there, the properties may be left out."""

    def __call__(
        self, scores: Float[Tensor, " rows"], group_ids: Int[Tensor, " rows"], batch: Batch
    ) -> Float[Tensor, " rows"] | Float[Tensor, "rows length"]:
        """Call the function with its config."""
        return self.function(scores, group_ids, batch, self.config)

    def says(self, name: str) -> Any:
        """A property of `AdvantageConfig`, its default where the config of a user's function does not have it."""
        return getattr(self.config, name, getattr(AdvantageConfig(), name))
