"""A language model on ranks of its own as the judge: how probable is it that it answers so, and not so."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from rlhf_core import (
    Batch,
    ConfigError,
    DataError,
    RewardError,
    RewardFunction,
    Role,
    Score,
    Trajectory,
    check_scores,
    pad_rows,
)

from rlhf_rollout.rewards.batched_scorer import JoinedScorer, Scorer
from rlhf_rollout.rewards.kind import EngineRewardConfig
from rlhf_rollout.rewards.template import fill, template_columns

GENERATIVE_TEMPLATE = """\
[Question]
{prompt}

[Response]
{completion}

Is the response good? Answer Yes or No."""
PAIRWISE_TEMPLATE = """\
[Question]
{prompt}

[Response A]
{completion_a}

[Response B]
{completion_b}

Which response is better? Answer A or B."""


@dataclass(frozen=True, kw_only=True)
class _AskedModelConfig(EngineRewardConfig):
    """A causal language model that is asked a question with two answers."""

    __slots__ = ()

    role: ClassVar[Role] = "reference"
    responses: ClassVar[frozenset[str]]
    """Fields of the template in which responses stand."""

    template: str
    answers: tuple[str, str]
    chat: bool

    def __post_init__(self) -> None:
        what = f"{self.kind} reward"  # type: ignore[attr-defined]
        for name in sorted(self.responses):
            if "{" + name + "}" not in self.template:
                raise ConfigError(f"{what}: the template does not show the response; write {{{name}}} in it")
        if self.answers[0] == self.answers[1] or not all(self.answers):
            raise ConfigError(f"{what}: answers must be two different texts, got {list(self.answers)}")

    @property
    def columns(self) -> frozenset[str]:
        """See EngineRewardConfig."""
        return template_columns(self.template, self.responses)

    def check(self, tokenizer: Any, *, name: str) -> None:
        """See EngineRewardConfig."""
        if self.chat and getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError(
                f"reward {name!r}: the tokenizer of {self.path!r} has no chat template; write chat: false"
            )
        for answer in self.answers:
            if (found := len(_tokens_of(tokenizer, answer))) != 1:
                raise ConfigError(
                    f"reward {name!r}: the answer {answer!r} is {found} tokens to {self.path!r}; write answers "
                    "that are one token each"
                )

    def question(self, values: Mapping[str, Any], sample: str) -> str | list[dict[str, str]]:
        """What the model is asked: text, or messages."""
        text = fill(self.template, values, sample)
        return [{"role": "user", "content": text}] if self.chat else text


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerativeRewardConfig(_AskedModelConfig):
    """A causal language model as a judge: the probability of its first answer after a template, against the
    second's (GenRM, Zhang et al. 2024, 2408.15240)."""

    responses: ClassVar[frozenset[str]] = frozenset({"completion"})

    kind: Literal["generative"] = "generative"
    template: str = GENERATIVE_TEMPLATE
    """What it is asked; `{prompt}`, `{completion}` and any column of the data are filled in."""
    answers: tuple[str, str] = ("Yes", "No")
    """The good answer and the bad one, a token of the model each."""
    chat: bool = True
    """Ask in the model's chat template, as a user."""

    def __post_init__(self) -> None:
        _AskedModelConfig.__post_init__(self)

    def make(self, engine: Scorer, *, name: str, tokenizer: Any, policy_tokenizer: Any) -> RewardFunction:
        """See EngineRewardConfig."""
        return GenerativeReward(engine, tokenizer, self, name=name)

    def rows(self, row: Mapping[str, Any], place: str) -> Iterator[dict[str, Any]]:
        """Rows for supervised training of the judge: of a pair two, of a labelled answer one.

        Args:
            row: `prompt` and columns, and `chosen` and `rejected`, or `completion` and `label`.
            place: of the row, for messages.

        Raises:
            DataError: it has neither.
        """
        if "chosen" in row and "rejected" in row:
            judged = [(row["chosen"], 0), (row["rejected"], 1)]
        elif "completion" in row and isinstance(row.get("label"), bool):
            judged = [(row["completion"], 0 if row["label"] else 1)]
        else:
            raise DataError(f"{place} has neither chosen and rejected nor completion and label (true or false)")
        for text, answer in judged:
            question = self.question({**row, "completion": text}, place)
            yield _training_row(question, self.answers[answer])


@dataclass(frozen=True, kw_only=True, slots=True)
class PairwiseRewardConfig(_AskedModelConfig):
    """A causal language model that says which of two responses to a prompt is better. A sample scores how often it
    is preferred to the other samples of its prompt, in both orders, as models prefer places (Zheng et al. 2023,
    2306.05685). A lone sample scores 1/2."""

    responses: ClassVar[frozenset[str]] = frozenset({"completion_a", "completion_b"})
    compares_samples: ClassVar[bool] = True

    kind: Literal["pairwise"] = "pairwise"
    template: str = PAIRWISE_TEMPLATE
    """What it is asked; `{prompt}`, `{completion_a}`, `{completion_b}` and any column of the data are filled in."""
    answers: tuple[str, str] = ("A", "B")
    """The names of the two responses, a token of the model each."""
    chat: bool = True
    """Ask in the model's chat template, as a user."""
    against: int | None = None
    """With at least how many others each sample is compared; null for all, whose cost grows with the square of the
    samples."""

    def __post_init__(self) -> None:
        _AskedModelConfig.__post_init__(self)
        if self.against is not None and self.against < 1:
            raise ConfigError(f"pairwise reward: against must be at least 1, got {self.against}")

    def make(self, engine: Scorer, *, name: str, tokenizer: Any, policy_tokenizer: Any) -> RewardFunction:
        """See EngineRewardConfig."""
        return PairwiseReward(engine, tokenizer, self, name=name)

    def rows(self, row: Mapping[str, Any], place: str) -> Iterator[dict[str, Any]]:
        """Two rows for supervised training of the judge, one for each order of a pair.

        Raises:
            DataError: the row is no pair.
        """
        if "chosen" not in row or "rejected" not in row:
            raise DataError(f"{place} has no chosen and rejected, and a pairwise judge learns from pairs")
        better, worse = row["chosen"], row["rejected"]
        for first, second, answer in ((better, worse, 0), (worse, better, 1)):
            question = self.question({**row, "completion_a": first, "completion_b": second}, place)
            yield _training_row(question, self.answers[answer])


def _training_row(question: str | list[dict[str, str]], answer: str) -> dict[str, Any]:
    said: Any = answer if isinstance(question, str) else [{"role": "assistant", "content": answer}]
    return {"prompt": question, "completion": said}


class GenerativeReward:
    """RewardFunction from what a causal language model answers about each response. Component: `log_odds`."""

    def __init__(self, engine: Scorer, tokenizer: Any, config: GenerativeRewardConfig, *, name: str) -> None:
        """`engine` has a language-model head (role `reference`); `tokenizer` is the model's own."""
        self.name, self._config = name, config
        self._asked = _AskedModel(engine, tokenizer, config, name)

    async def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Score]:
        """See RewardFunction.

        Raises:
            RewardError: a question is longer than the model takes; names the sample.
            DataError: the template names a column that a sample does not have.
        """
        questions = [
            self._config.question({**trajectory.metadata, "completion": text}, trajectory.sample_id)
            for trajectory, text in zip(trajectories, texts, strict=True)
        ]
        odds = await self._asked.log_odds(questions, [trajectory.sample_id for trajectory in trajectories])
        scores = [Score(value=_sigmoid(value), components={"log_odds": value}) for value in odds]
        check_scores(scores, trajectories, source=self.name)
        return scores

    def close(self) -> None:
        """End the thread that asks the model; the engine is left as it is."""
        self._asked.close()


class PairwiseReward:
    """RewardFunction from comparisons of the samples of each prompt.

    Components: `compared` (with how many others), `first` (mean probability of the response that stands first: 1/2
    of a judge that does not look at the place).
    """

    def __init__(self, engine: Scorer, tokenizer: Any, config: PairwiseRewardConfig, *, name: str) -> None:
        """`engine` has a language-model head (role `reference`); `tokenizer` is the model's own."""
        self.name, self._config = name, config
        self._asked = _AskedModel(engine, tokenizer, config, name)

    async def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Score]:
        """See RewardFunction; samples are compared with those of their `group_id` in the same call.

        Raises:
            RewardError: a question is longer than the model takes; names the sample.
            DataError: the template names a column that a sample does not have.
        """
        pairs = [*_pairs([trajectory.group_id for trajectory in trajectories], self._config.against)]
        questions, names = [], []
        for one, other in pairs:
            values, name = trajectories[one].metadata, trajectories[one].sample_id
            for first, second in ((one, other), (other, one)):
                shown = {**values, "completion_a": texts[first], "completion_b": texts[second]}
                questions.append(self._config.question(shown, name))
                names.append(name)
        odds = await self._asked.log_odds(questions, names)
        wins: list[list[float]] = [[] for _ in trajectories]
        first_place: list[list[float]] = [[] for _ in trajectories]
        for place, (one, other) in enumerate(pairs):
            ahead, behind = (_sigmoid(value) for value in odds[2 * place : 2 * place + 2])
            won = (ahead + 1 - behind) / 2
            wins[one].append(won)
            wins[other].append(1 - won)
            for row in (one, other):
                first_place[row].append((ahead + behind) / 2)
        scores = [
            Score(
                value=math.fsum(found) / len(found) if found else 0.5,
                components={
                    "compared": float(len(found)),
                    "first": math.fsum(placed) / len(placed) if placed else 0.5,
                },
            )
            for found, placed in zip(wins, first_place, strict=True)
        ]
        check_scores(scores, trajectories, source=self.name)
        return scores

    def close(self) -> None:
        """End the thread that asks the model; the engine is left as it is."""
        self._asked.close()


def _pairs(groups: Sequence[str], against: int | None) -> Iterator[tuple[int, int]]:
    """Which rows are compared: all of a group, or each with the next ones around the circle.

    >>> list(_pairs(["a", "a", "b", "a"], None)), list(_pairs(["a", "a", "a", "a"], 1))
    ([(0, 1), (0, 3), (1, 3)], [(0, 1), (1, 2), (2, 3), (0, 3)])
    """
    members: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    for rows in members.values():
        size = len(rows)
        # Around the circle: each row is compared with those that are at most so many places away.
        away = size // 2 if against is None else min(-(-against // 2), size // 2)
        found = {
            (min(one, other), max(one, other))
            for place, one in enumerate(rows)
            for other in (rows[(place + step) % size] for step in range(1, away + 1))
        }
        yield from sorted(found)


class _AskedModel:
    """Log-odds of the first answer against the second, after each of many questions."""

    def __init__(self, engine: Scorer, tokenizer: Any, config: _AskedModelConfig, name: str) -> None:
        config.check(tokenizer, name=name)
        self._tokenizer, self._name = tokenizer, name
        self._answers = [_tokens_of(tokenizer, answer)[0] for answer in config.answers]
        self._longest = int(getattr(tokenizer, "model_max_length", None) or 1 << 60)
        self._engine = JoinedScorer(engine)

    async def log_odds(self, questions: Sequence[str | list[dict[str, str]]], names: Sequence[str]) -> list[float]:
        """Of each question; `names` are those of the samples that it is about."""
        if not questions:
            return []
        batch = await asyncio.to_thread(self._batch, questions, names)
        found = (await self._engine.score(batch, ("log_probs",))).log_probs
        if found is None:
            raise TypeError(f"{self._name}: the engine gave no log-probs; use one with a language-model head")
        said = found[torch.arange(batch.rows), batch.lengths - 1].double().view(-1, 2)
        return (said[:, 0] - said[:, 1]).tolist()

    def close(self) -> None:
        """See JoinedScorer."""
        self._engine.close()

    def _batch(self, questions: Sequence[str | list[dict[str, str]]], names: Sequence[str]) -> Batch:
        rows = []
        for question, name in zip(questions, names, strict=True):
            tokens = self._tokens(question)
            if len(tokens) >= self._longest:
                raise RewardError(
                    f"reward {self._name}: the question about sample {name!r} has {len(tokens)} tokens, and the "
                    f"model takes {self._longest}",
                    sample_ids=(name,),
                )
            rows += [[*tokens, answer] for answer in self._answers]
        masks = [[False] * (len(row) - 1) + [True] for row in rows]
        return Batch(
            token_ids=pad_rows(rows, value=self._answers[0], dtype=torch.long),
            attention_mask=pad_rows([[True] * len(row) for row in rows], value=False, dtype=torch.bool),
            response_mask=pad_rows(masks, value=False, dtype=torch.bool),
        )

    def _tokens(self, question: str | list[dict[str, str]]) -> list[int]:
        if isinstance(question, str):
            return _tokens_of(self._tokenizer, question, add_special_tokens=True)
        text = self._tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        return _tokens_of(self._tokenizer, text)


def _tokens_of(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))
