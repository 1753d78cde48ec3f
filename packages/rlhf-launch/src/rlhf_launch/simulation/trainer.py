"""The training side, made up: a rank that sends weights, a trainer that takes its time, rewards, checkpoints."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rlhf_algos import Unpublished
from rlhf_core import Batch, DroppedSample, EngineDiedError, Score, Trajectory, WeightManifest
from rlhf_rollout import ScoredGroup

from rlhf_launch.online.metrics import PhaseClock
from rlhf_launch.samples.groups import staleness
from rlhf_launch.simulation.engines import SimulatedWeights
from rlhf_launch.workers.handles import finished
from rlhf_launch.workers.pulse import Pulse
from rlhf_launch.workers.train_group import TrainGroup


class SimulatedRank:
    """The handle of the policy's rank."""

    def __init__(self, weights: SimulatedWeights) -> None:
        self.name = "policy"
        self.lost: str | None = None
        self._weights, self._clock = weights, weights.clock
        self._unanswered: set[Future[Any]] = set()
        self._moved = 0

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """See Handle."""
        if self.lost is not None:
            raise EngineDiedError(f"{self.name} is gone: {self.lost}")
        answer = getattr(self, f"_{method}")(*args)
        self._unanswered.add(answer)
        answer.add_done_callback(self._unanswered.discard)
        return answer

    def pulse(self) -> Future[Pulse]:
        """See Handle. It gets something done whenever it is asked while it works."""
        if self.lost is not None:
            raise EngineDiedError(f"{self.name} is gone: {self.lost}")
        self._moved += bool(self._unanswered)
        return finished(Pulse(progress={"micro-batches": self._moved}))

    def begin_close(self) -> Future[Any]:
        """See Handle."""
        return finished(None)

    def end(self) -> None:
        """See Handle."""

    def die(self, reason: str) -> None:
        """Lose the rank."""
        self.lost = reason
        for answer in list(self._unanswered):
            if not answer.done():
                answer.set_exception(EngineDiedError(f"{self.name}: {reason}"))

    def _work(self, seconds: float) -> Future[Any]:
        answer: Future[Any] = Future()

        def end() -> None:
            if not answer.done():
                answer.set_result(None)

        self._clock.loop.call_later(seconds, end)
        return answer

    def _capabilities(self) -> Future[Any]:
        return finished(None)

    def _shared_memory(self) -> Future[Any]:
        return finished(None)

    def _open_link(self, kind: str, receivers: int, *more: Any) -> Future[Any]:
        return finished(self._weights.open(kind, receivers))

    def _accept_link(self) -> Future[Any]:
        return self._weights.accept()

    def _manifest(self, version: int, bucket_bytes: int, adapters: bool) -> Future[Any]:
        return finished(WeightManifest(version=version, tensors=()))

    def _send(self, manifest: WeightManifest) -> Future[Any]:
        return self._weights.send(manifest)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSpeed:
    """Seconds of a step: `step_s`, and `token_s` for each response token."""

    step_s: float = 1.0
    token_s: float = 0.0


class SimulatedTrainer:
    """In the place of `rlhf_launch.online.trainer.Trainer`."""

    def __init__(self, policy: TrainGroup, speed: TrainSpeed, length_of: Callable[[str, int], float]) -> None:
        self.policy, self.critic, self.reference = policy, None, None
        self.trained = [policy]
        self._speed, self._length_of = speed, length_of

    def step(
        self, groups: Sequence[ScoredGroup], step: int, clock: PhaseClock, trace: object = None
    ) -> tuple[Batch, dict[str, float]]:
        """Take as long as a step of these groups takes."""
        lengths = [response_tokens(sample, self._length_of) for group in groups for sample in group.trajectories]
        with clock("train"):
            seconds = self._speed.step_s + self._speed.token_s * sum(lengths)
            calls = [handle.call("work", seconds) for handle in self.policy.handles]
            self.policy.begin(calls, "take a step", lambda done: None).result()
        mean = sum(lengths) / max(1, len(lengths))
        return _batch(), {"reward": 0.0, "response_length": mean} | staleness(groups, step)

    def take_idle_seconds(self) -> dict[str, float]:
        """See Trainer."""
        return {"policy": self.policy.take_idle_seconds()}


def response_tokens(sample: Trajectory, length_of: Callable[[str, int], float]) -> float:
    """How long a sample is that stands for its tokens by a few."""
    label, index = sample.sample_id.rsplit("/", 1)
    return length_of(label, int(index))


def _batch() -> Batch:
    row = torch.ones(1, 2, dtype=torch.bool)
    return Batch(token_ids=row.long(), attention_mask=row, response_mask=row)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardSpeed:
    """How long a reward takes, and what becomes of its samples."""

    seconds: float = 0.0
    """Mean over the groups; single ones by chance, most far below and some far above it."""
    drop: float = 0.0
    """Share of the groups of which no sample gets a score."""
    steady: bool = False
    """Every group takes the mean."""
    flat: float = 0.0
    """Share of the groups whose samples get equal scores."""


class SimulatedReward:
    """Scores by chance, which follows from the seed and the group alone."""

    name = "simulated"

    def __init__(self, speed: RewardSpeed, seed: int) -> None:
        self._speed, self._seed = speed, seed

    async def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Score | DroppedSample]:
        """See RewardFunction."""
        group, speed = trajectories[0].group_id, self._speed
        chance = random.Random(f"{self._seed}/{group}")
        draw = chance.random()
        if speed.seconds:
            await asyncio.sleep(speed.seconds * (1.0 if speed.steady else chance.expovariate(1.0) ** 2 / 2))
        if draw < speed.drop:
            return [DroppedSample(sample_id=t.sample_id, reason="the verdict is missing") for t in trajectories]
        flat = draw < speed.drop + speed.flat
        return [Score(value=0.0 if flat else float(index)) for index in range(len(trajectories))]


class NoTokenizer:
    """In the place of a tokenizer: the texts of simulated samples are empty."""

    def batch_decode(self, rows: Sequence[Any], **options: Any) -> list[str]:
        """An empty text for each row."""
        return [""] * len(rows)


@dataclass(frozen=True, slots=True)
class StoredState:
    """A checkpoint in memory."""

    step: int
    state: Mapping[str, Any]
    held: Mapping[str, Any]
    path: Path = field(default_factory=lambda: Path("simulated"))

    def tensors(self) -> Mapping[str, Any]:
        """See Checkpoint."""
        return self.held


class SimulatedStore:
    """In the place of a `CheckpointStore`: it keeps the newest checkpoint in memory."""

    def __init__(self) -> None:
        self.newest: StoredState | None = None

    def steps(self) -> list[int]:
        """See CheckpointStore."""
        return [] if self.newest is None else [self.newest.step]

    def improves(self, score: float) -> bool:
        """See CheckpointStore."""
        return False

    def begin(self, step: int, state: Mapping[str, Any], tensors: Mapping[str, Any] | None = None) -> Unpublished:
        """See CheckpointStore."""
        return Unpublished(step=step, folder=Path("simulated"), state=state, tensors=tensors or {})

    def publish(self, filled: Unpublished) -> Path:
        """See CheckpointStore. The state must be what JSON can hold."""
        self.newest = StoredState(filled.step, json.loads(json.dumps(dict(filled.state))), filled.tensors)
        return filled.folder


class SimulatedReporter:
    """In the place of a `Reporter`: it keeps what it is told."""

    def __init__(self) -> None:
        self.latest: dict[str, float] = {}
        self.rows: list[dict[str, float]] = []
        self.prompts: list[Mapping[str, Any]] = []
        """What became of every prompt; see `PromptAccount`."""

    def step(self, step: int, metrics: Mapping[str, float], prompts: Sequence[Mapping[str, Any]] = ()) -> None:
        """See Reporter."""
        self.rows.append({"step": float(step), **metrics})
        self.prompts += [{"step": step, **entry} for entry in prompts]
        self.latest |= metrics

    def measured(self, name: str, step: int) -> float | None:
        """See Reporter."""
        return self.latest.get(name)

    def evaluation(self, evaluation: Any) -> None:
        """See Reporter."""

    def flush_to_disk(self) -> None:
        """See Reporter."""

    def say(self, text: str) -> None:
        """See Reporter."""
