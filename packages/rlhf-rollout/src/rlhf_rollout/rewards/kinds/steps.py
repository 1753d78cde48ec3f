"""Process rewards: a model that judges every step of a response, not its end alone."""

from __future__ import annotations

import asyncio
import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rlhf_core import Batch, ConfigError, RewardFunction, Score, Trajectory, check_scores, pad_rows

from rlhf_rollout.rewards.batched_scorer import JoinedScorer, Scorer
from rlhf_rollout.rewards.kind import EngineRewardConfig

Aggregate = Literal["min", "product", "mean", "last"]
_AGGREGATES: Mapping[Aggregate, Callable[[Sequence[float]], float]] = {
    "min": min,
    "product": math.prod,
    "mean": lambda steps: sum(steps) / len(steps),
    "last": lambda steps: steps[-1],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRewardConfig(EngineRewardConfig):
    """A process reward model, how a response is cut into steps for it, and what becomes of the steps' values."""

    kind: Literal["steps"] = "steps"
    placeholder: str
    """Special token behind each step at which the model was trained to judge it."""
    separator: str = "\n\n"
    """Text that ends a step of the response."""
    aggregate: Aggregate = "min"
    """Score of a response from those of its steps: `min` (Wang et al. 2024), `product` (Lightman et al. 2023),
    `mean`, `last`."""
    per_step: bool = False
    """Also say where the rewards fell: an equal share of the score's steps at the last token of each step (needs
    `mean`)."""

    def __post_init__(self) -> None:
        if self.aggregate not in _AGGREGATES:
            raise ConfigError(
                f"step reward: aggregate {self.aggregate!r} is unknown; write one of {', '.join(_AGGREGATES)}"
            )
        if not self.separator:
            raise ConfigError("step reward: the separator of steps is empty; write for instance '\\n\\n'")
        if self.per_step and self.aggregate != "mean":
            raise ConfigError(
                "step reward: only a mean is a sum of the steps' shares; write aggregate: mean, or per_step: false"
            )

    def make(self, engine: Scorer, *, name: str, tokenizer: Any, policy_tokenizer: Any) -> RewardFunction:
        """See EngineRewardConfig."""
        return StepReward(engine, tokenizer, self, policy_tokenizer=policy_tokenizer, name=name)


class StepReward:
    """RewardFunction from a process reward model, as `rlhf-algos` trains it (loss `process`).

    The model reads prompt and response with the placeholder behind every step; its value there, through a
    sigmoid, is the probability that the step is right. The text is tokenised for the model, whose tokenizer may be
    another than the policy's. A response without any text scores 0. Components: `min`, `mean`, `last`, `steps`.
    """

    def __init__(
        self,
        engine: Scorer,
        tokenizer: Any,
        config: StepRewardConfig,
        *,
        policy_tokenizer: Any = None,
        name: str = "steps",
    ) -> None:
        """`engine` has a scalar head (role `reward` or `critic`); `tokenizer` is the model's own.

        `policy_tokenizer` is the one that made `texts`, if it is another; only `per_step` needs it.
        """
        self.name = name
        self._policy_tokenizer = policy_tokenizer or tokenizer
        self._engine = JoinedScorer(engine)
        self._tokenizer = tokenizer
        self._config = config
        placeholder = tokenizer.convert_tokens_to_ids(config.placeholder)
        if placeholder is None or placeholder == tokenizer.unk_token_id:
            raise ConfigError(
                f"step reward: {config.placeholder!r} is no token of the model's tokenizer; write the placeholder "
                "that the model was trained with"
            )
        self._placeholder: int = placeholder

    async def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Score]:
        """See RewardFunction.

        Raises:
            RewardError: the model gave a value that is not finite.
        """
        if not trajectories:
            return []
        steps = [split_steps(text, self._config.separator) for text in texts]
        prompts = [str(trajectory.metadata.get("prompt", "")) for trajectory in trajectories]
        batch = await asyncio.to_thread(self._batch, prompts, steps)
        outputs = await self._engine.score(batch, ("values",))
        if outputs.values is None:
            raise TypeError(f"{self.name}: the engine gave no `values`; use one with a scalar head")
        scores = []
        for row, trajectory in enumerate(trajectories):
            values = outputs.values[row][batch.response_mask[row, : outputs.values.shape[1]]]
            scores.append(self._score(values.sigmoid().tolist(), steps[row], trajectory, texts[row]))
        check_scores(scores, trajectories, source=self.name)
        return scores

    def close(self) -> None:
        """End the thread that asks the model; the engine is left as it is."""
        self._engine.close()

    def _batch(self, prompts: Sequence[str], steps: Sequence[Sequence[str]]) -> Batch:
        """Rows with a True after each placeholder: there an engine says what the head gave at the placeholder."""
        rows, masks = [], []
        end = self._tokenizer.eos_token_id
        for prompt, parts in zip(prompts, steps, strict=True):
            row = self._tokenise(prompt) or [end]
            judged = set()
            for part in parts:
                row += [*self._tokenise(part), self._placeholder]
                judged.add(len(row))
            row.append(end)
            rows.append(row)
            masks.append([position in judged for position in range(len(row))])
        return Batch(
            token_ids=pad_rows(rows, value=end, dtype=torch.long),
            attention_mask=pad_rows([[True] * len(row) for row in rows], value=False, dtype=torch.bool),
            response_mask=pad_rows(masks, value=False, dtype=torch.bool),
        )

    def _tokenise(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _score(self, values: list[float], steps: Sequence[str], trajectory: Trajectory, text: str) -> Score:
        if not values:
            return Score(value=0.0, components={"steps": 0.0})
        rewards: Sequence[float] = ()
        if self._config.per_step:
            shares = [value / len(values) for value in values]
            rewards = self._place(shares, steps, trajectory)
        return Score(
            value=_AGGREGATES[self._config.aggregate](values),
            components={
                "min": min(values),
                "mean": sum(values) / len(values),
                "last": values[-1],
                "steps": float(len(values)),
            },
            rewards=rewards,
        )

    def _place(self, shares: Sequence[float], steps: Sequence[str], trajectory: Trajectory) -> list[float]:
        """Each share at the last sampled token of its step."""
        response = trajectory.response_token_ids.tolist()
        sampled = [i for i, counts in enumerate(trajectory.response_mask) if counts]
        rewards = [0.0] * len(trajectory.token_ids)
        end = 0
        for share, step in zip(shares, steps, strict=True):
            end += len(step)
            # The shortest beginning of the response whose text holds the step; text grows with the tokens.
            count = (
                bisect.bisect_left(range(1, len(response)), end, key=lambda n: len(self._decode(response[:n]))) + 1
            )
            position = trajectory.prompt_length + count - 1
            rewards[sampled[bisect.bisect_right(sampled, position) - 1]] += share
        return rewards

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._policy_tokenizer.decode(list(token_ids), skip_special_tokens=True)


def split_steps(text: str, separator: str) -> list[str]:
    """The steps of a text, each with its separator; a piece of nothing but space joins the step before it.

    >>> split_steps("a;b; ;", ";"), split_steps("  ", ";")
    (['a;', 'b; ;'], [])
    """
    pieces = text.split(separator)
    steps: list[str] = []
    for index, piece in enumerate(pieces):
        whole = piece + separator * (index + 1 < len(pieces))
        if steps and not piece.strip():
            steps[-1] += whole
        elif whole:
            steps.append(whole)
    return steps if any(step.replace(separator, "").strip() for step in steps) else []
