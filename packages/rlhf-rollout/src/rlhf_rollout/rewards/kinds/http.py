"""Scores from a service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_core import ConfigError, RewardError, RewardFunction, Score, Trajectory, check_scores

from rlhf_rollout.concurrency import gather_or_cancel
from rlhf_rollout.rewards.endpoints import Endpoints, EndpointsConfig
from rlhf_rollout.rewards.kind import RewardConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class HTTPRewardConfig(RewardConfig):
    """A service that scores; see HTTPReward for the messages."""

    kind: Literal["http"] = "http"
    endpoints: EndpointsConfig
    """The servers, and how patiently they are asked."""
    batch_size: int = 0
    """Samples per request; 0 gives every server one equal share of a batch."""
    columns: tuple[str, ...] = ()
    """Columns that the service counts on: a row without one is refused at the start. It gets all columns anyway."""

    def __post_init__(self) -> None:
        if self.batch_size < 0:
            raise ConfigError(f"HTTP reward: batch_size must be 0 or positive, got {self.batch_size}")

    @property
    def servers(self) -> tuple[str, ...]:
        """See RewardConfig."""
        return self.endpoints.urls

    def make(self, name: str) -> tuple[RewardFunction, frozenset[str]]:
        """The reward and the columns of the data that it needs."""
        return HTTPReward(self, name=name), frozenset(self.columns)


class HTTPReward:
    """RewardFunction that asks servers. Needs the extra `http`.

    A request is a POST of

        {"sample_ids": [...], "completions": [...], "prompts": [...], "columns": {name: [...], ...}}

    and the answer `{"scores": [...]}` (or `{"rewards": [...]}`, or the list itself): per sample, in order, a number
    or an object whose `score` is the number and whose other entries are components.
    """

    def __init__(self, config: HTTPRewardConfig, *, name: str = "http") -> None:
        self.name = name
        self._config = config
        self._endpoints = Endpoints(config.endpoints, name=name)

    async def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Score]:
        """See RewardFunction.

        Raises:
            RewardError: a request had no usable answer; the others of this batch are given up.
        """
        size = self._config.batch_size or -(-len(trajectories) // len(self._config.endpoints.urls))
        starts = range(0, len(trajectories), size) if trajectories else ()
        async with self._endpoints.connections() as servers:

            async def ask(start: int) -> list[Score]:
                part = trajectories[start : start + size]
                names = tuple(trajectory.sample_id for trajectory in part)
                answer = await servers.post(request_body(part, texts[start : start + size]), sample_ids=names)
                scores = read_scores(answer, part, source=self.name)
                check_scores(scores, part, source=self.name)
                return scores

            parts = await gather_or_cancel(ask(start) for start in starts)
        return [score for part in parts for score in part]


def request_body(trajectories: Sequence[Trajectory], texts: Sequence[str]) -> dict[str, Any]:
    """The body that a service gets. Columns that are not plain data are left out."""
    names = {name for t in trajectories for name, value in t.metadata.items() if _is_plain(value)} - {"prompt"}
    return {
        "sample_ids": [trajectory.sample_id for trajectory in trajectories],
        "completions": list(texts),
        "prompts": [trajectory.metadata.get("prompt") for trajectory in trajectories],
        "columns": {name: [t.metadata.get(name) for t in trajectories] for name in sorted(names)},
    }


def read_scores(answer: Any, trajectories: Sequence[Trajectory], *, source: str) -> list[Score]:
    """Scores from a service's answer; their number and finiteness are left to `check_scores`.

    Raises:
        RewardError: the answer has another form.
    """
    rows = answer
    if isinstance(answer, Mapping):
        rows = answer.get("scores", answer.get("rewards"))
    names = tuple(trajectory.sample_id for trajectory in trajectories)
    if not isinstance(rows, list):
        raise RewardError(
            f"reward {source} answered {repr(answer)[:200]}; answer {{'scores': [one per sample]}}",
            sample_ids=names,
        )
    scores = []
    for index, row in enumerate(rows):
        parts = row if isinstance(row, Mapping) else {"score": row}
        try:
            numbers = {name: float(part) for name, part in parts.items()}
            scores.append(Score(value=numbers.pop("score"), components=numbers))
        except (TypeError, ValueError, KeyError) as error:
            raise RewardError(
                f"reward {source} answered {repr(row)[:200]} for one sample; answer a number, or an object "
                "of numbers with the key 'score'",
                sample_ids=names[index : index + 1],
            ) from error
    return scores


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(part) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float, bool))
