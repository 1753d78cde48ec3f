"""A language model as the judge, asked through any server with OpenAI's chat completions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlhf_core import ConfigError, RewardError, RewardFunction, Score, Trajectory

from rlhf_rollout.concurrency import gather_or_cancel
from rlhf_rollout.rewards.endpoints import EndpointConnections, Endpoints, EndpointsConfig
from rlhf_rollout.rewards.kind import RewardConfig
from rlhf_rollout.rewards.template import fill, template_columns

TEMPLATE = """\
You judge how well a response does what was asked.

[Question]
{prompt}

[Response]
{completion}

Weigh correctness, helpfulness and form in a few sentences. Then, on a line of its own, write
Rating: N
where N is a number from 1 (useless) to 10 (perfect)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeRewardConfig(RewardConfig):
    """A language model as the judge: where it is, what it is asked, and how its rating is read."""

    kind: Literal["judge"] = "judge"
    endpoints: EndpointsConfig
    """Base addresses of the servers, up to and including `/v1`."""
    model: str
    """The judge's name on the servers."""
    template: str = TEMPLATE
    """The message to the judge; `{prompt}`, `{completion}` and any column of the data are filled in."""
    system: str | None = None
    """A system message before it."""
    pattern: str = r"Rating:\s*\**\s*(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the rating; its last match in the answer counts."""
    scale: tuple[float, float] = (1.0, 10.0)
    """Ratings that become the scores 0 and 1. One outside is a failure, not clipped."""
    max_tokens: int = 512
    temperature: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the request."""

    def __post_init__(self) -> None:
        if not self.scale[0] < self.scale[1]:
            raise ConfigError(f"judge: scale must be (low, high) with low < high, got {self.scale}")
        if "{completion}" not in self.template:
            raise ConfigError("judge: the template does not show the response; write {completion} in it")
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ConfigError(f"judge: pattern {self.pattern!r} is no regular expression: {error}") from error
        if groups < 1:
            raise ConfigError(f"judge: pattern {self.pattern!r} has no group; put the rating in parentheses")

    @property
    def servers(self) -> tuple[str, ...]:
        """See RewardConfig."""
        return self.endpoints.urls

    def make(self, name: str) -> tuple[RewardFunction, frozenset[str]]:
        """The reward and the columns of the data that it needs: those that the template names."""
        return JudgeReward(self, name=name), template_columns(self.template)


class JudgeReward:
    """RewardFunction from a judge's ratings, one request per sample. Needs the extra `http`.

    Component: `rating`, on the judge's own scale. A response that talks the judge into a rating is a known way to
    cheat: the last rating of the *answer* counts, and the response stands before the instructions.
    """

    def __init__(self, config: JudgeRewardConfig, *, name: str = "judge") -> None:
        self.name = name
        self._config = config
        self._endpoints = Endpoints(config.endpoints, name=name)

    async def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Score]:
        """See RewardFunction.

        Raises:
            RewardError: the judge did not answer, or gave no rating on the scale; names the sample.
            DataError: the template names a column that a sample does not have.
        """
        async with self._endpoints.connections() as servers:
            calls = [self._judge(servers, t, text) for t, text in zip(trajectories, texts, strict=True)]
            return await gather_or_cancel(calls)

    async def _judge(self, servers: EndpointConnections, trajectory: Trajectory, text: str) -> Score:
        config, names = self._config, (trajectory.sample_id,)
        messages = [
            {
                "role": "user",
                "content": fill(config.template, {**trajectory.metadata, "completion": text}, trajectory.sample_id),
            }
        ]
        if config.system is not None:
            messages.insert(0, {"role": "system", "content": config.system})
        body = {
            "model": config.model,
            "messages": messages,
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
            **config.options,
        }
        answer = await servers.post(body, path="/chat/completions", sample_ids=names)
        try:
            said = answer["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError) as error:
            raise RewardError(
                f"reward {self.name}: this is no chat completion: {str(answer)[:200]!r}", sample_ids=names
            ) from error
        return self._read(said, trajectory.sample_id)

    def _read(self, said: str, sample_id: str) -> Score:
        low, high = self._config.scale
        matches = list(re.finditer(self._config.pattern, said))
        try:
            rating = float(matches[-1].group(1))
        except (IndexError, ValueError, TypeError) as error:
            raise RewardError(
                f"reward {self.name}: no rating (pattern {self._config.pattern!r}) for sample {sample_id!r} in "
                f"{said[-200:]!r}",
                sample_ids=(sample_id,),
            ) from error
        if not low <= rating <= high:
            raise RewardError(
                f"reward {self.name}: rating {rating:g} for sample {sample_id!r} is outside the scale {low:g} to "
                f"{high:g}",
                sample_ids=(sample_id,),
            )
        return Score(value=(rating - low) / (high - low), components={"rating": rating})
