"""The producer of groups: generates and scores on a thread of its own, whatever the trainer does."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rlhf_core import ConfigError, RewardError, StopRequest
from rlhf_rollout import ScoredGroup

from rlhf_launch.samples.account import PromptAccount
from rlhf_launch.samples.groups import GroupMaker
from rlhf_launch.samples.ledger import Ledger
from rlhf_launch.samples.prompts import Prompt, PromptStream
from rlhf_launch.workers.waits import Waits

_log = logging.getLogger(__name__)

During = Literal["rest", "pause", "run"]
"""What generation does while the policy is trained: `rest` has none under way, `pause` lets it stand still, `run`
lets it continue."""


class Engines(Protocol):
    """What the producer needs of the rollout engines besides samples."""

    def pause(self) -> None:
        """Let running requests stand still."""
        ...

    def resume(self) -> None:
        """Let them continue."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ProducerConfig:
    """How a producer makes groups of prompts."""

    samples: int
    """Samples per prompt."""
    during_training: During = "rest"
    filter_flat: bool = False
    """Replace groups whose scores are all equal by new prompts (DAPO, Yu et al. 2025, section 3.2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectReport:
    """What happened until the groups of a step were there."""

    seconds: Mapping[str, float]
    """How long the step had to wait: `rollout` until the last sample was generated, `reward` beyond that."""
    counts: Mapping[str, float]
    """The ledger: prompts started, used, filtered and dropped since the last step; in flight and waiting now. And
    what a curriculum says of them."""
    prompts: Sequence[Mapping[str, Any]]
    """What became of each prompt that was settled since the last step; see `PromptAccount`."""


class Producer:
    """Starts prompts as far as the ledger has room, and hands over the groups of one step at a time.

    One mechanism for all modes: alternation, partial rollouts and asynchronous generation differ by the ledger's
    limits and by what happens between `pause` and `resume`.
    """

    def __init__(
        self,
        make: GroupMaker,
        prompts: PromptStream,
        ledger: Ledger,
        engines: Engines,
        config: ProducerConfig,
        waits: Waits,
        stop: StopRequest | None = None,
    ) -> None:
        """Make groups of these prompts; `stop` may end the waits of `collect`."""
        self.ledger = ledger
        self._stop = stop or StopRequest()
        self._make, self._prompts, self._engines, self._config = make, prompts, engines, config
        self._waits = waits
        self._lock = threading.Lock()
        self._awaited: Future[None] | None = None
        """What `collect` waits for: that the step can be taken, or an error."""
        self._open = False
        self._error: BaseException | None = None
        self._last_generated = 0.0
        self._reported: Counter[str] = Counter()
        self._account = PromptAccount(prompts)
        self._thread = waits.clock.loop_thread("rollouts")

    def collect(self) -> tuple[list[ScoredGroup], CollectReport]:
        """The groups of the next step, as soon as there are enough and all that is due is among them.

        Raises:
            DeadlineExceeded: nothing has moved for too long; names how many prompts were unfinished.
            RunStopped: the run was asked to end; generation goes on until `close`.
            RewardError: a reward failed and its failure handling says to stop, or no prompt has a usable score.
            RLHFError: whatever else ended generation.
        """
        begin = self._waits.clock.now()
        with self._lock:
            self._open = True
            self._fill()
            awaited = self._awaited = Future()
            self._tell()
        with self._stop.interruptible():
            self._waits.gather([awaited], what=self._describe)
        with self._lock:
            self._open = self._config.during_training == "run"
            groups = self.ledger.take()
            counts, settled = self._new_counts(), self._account.settle(groups)
            counts |= self._prompts.settle(entry["position"] for entry in settled)
            self._fill()
        if not groups:
            raise RewardError(
                f"step {self.ledger.step - 1}: no sample of {counts['prompts/dropped']:g} prompts has a score; see "
                "the warnings above"
            )
        end = self._waits.clock.now()
        generated = min(max(self._last_generated, begin), end)
        seconds = {"rollout": generated - begin, "reward": end - generated}
        return groups, CollectReport(seconds=seconds, counts=counts, prompts=settled)

    def _describe(self) -> str:
        with self._lock:
            step, unfinished, waiting = self.ledger.step, self.ledger.unfinished, self.ledger.waiting
        return f"the samples of step {step} ({unfinished} prompts are unfinished, {waiting} groups are there)"

    @property
    def rests(self) -> bool:
        """Whether nothing is generated while the policy is trained."""
        return self._config.during_training == "rest"

    def pause(self) -> None:
        """Let generation stand still, if it must not overlap training: the policy is about to be trained."""
        if self._config.during_training == "pause":
            self._engines.pause()

    def resume(self, version: int) -> None:
        """Let generation continue: the engines have the weights of `version`."""
        if self._config.during_training == "pause":
            self._engines.resume()
        with self._lock:
            self.ledger.version = version
            self._open = self._config.during_training != "rest"
            self._fill()

    def state(self) -> tuple[dict[str, Any], list[ScoredGroup]]:
        """The state that a checkpoint holds: position and accounts, and the groups that wait."""
        with self._lock:
            accounts, groups = self.ledger.state()
            plain = {
                "prompt_position": self._prompts.position,
                "curriculum": self._prompts.state(),
                "ledger": accounts,
                "reported": dict(self._reported),
                "unused": self._account.state(),
            }
            return plain, groups

    def restore(self, state: Mapping[str, Any], groups: Sequence[ScoredGroup], *, step: int) -> None:
        """Continue from a saved state, before `step`, with the engines at that version; what runs is given up.

        Raises:
            ConfigError: prompts are under way that were drawn with a curriculum and it is gone, or the reverse:
                their positions would stand for others.
        """
        with self._lock:
            self._open = False
        self._thread.cancel_all()
        with self._lock:
            self._prompts.position = state["prompt_position"]
            before = state.get("curriculum")
            under_way = state["ledger"]["in_flight"] or state["ledger"]["finished"]
            if under_way and (before is None) != (self._prompts.state() is None):
                raise ConfigError(
                    "data.curriculum cannot begin or end at this checkpoint, at which prompts were under way: "
                    f"resume {'without it' if before is None else 'with it'}, or begin a new run"
                )
            self._prompts.restore(before)
            self.ledger.restore(state["ledger"], groups, step=step)
            self._reported = Counter(state["reported"])
            self._account.restore(state["unused"])
            self._error = None

    def close(self) -> None:
        """Give up what is under way; may be called twice."""
        if self._thread.running:
            with self._lock:
                self._open = False
            self._thread.close()

    # ------------------------------------------------------------ under the lock, on any thread

    def _fill(self) -> None:
        """Start what there is room for."""
        while self._open and self._error is None and self.ledger.room:
            position = self.ledger.again()
            if repeated := position is not None:
                prompt = self._prompts.at(position)
            else:
                position = self._prompts.position
                (prompt,) = self._prompts.take(1)
            self.ledger.start(position, repeated=repeated)
            self._thread.start(self._produce(position, prompt))

    def _tell(self) -> None:
        """Tell `collect`, if it waits, that it need not any longer."""
        if self._awaited is None or self._awaited.done():
            return
        if self._error is not None:
            self._awaited.set_exception(self._error)
        elif self.ledger.ready:
            self._awaited.set_result(None)

    def _new_counts(self) -> dict[str, float]:
        """What happened since the last step, and how it stands."""
        now = Counter(self.ledger.counts)
        new = {name: float(now[name] - self._reported[name]) for name in now}
        self._reported = now
        return {
            "prompts/started": new["dispatched"],
            "prompts/used": new["consumed"],
            "prompts/filtered": new["filtered"],
            "prompts/dropped": new["dropped"],
            "prompts/in_flight": float(self.ledger.unfinished),
            "prompts/waiting": float(self.ledger.waiting),
            "dropped_samples": new["dropped_samples"],
        }

    # ------------------------------------------------------------ on the event loop

    async def _produce(self, position: int, prompt: Prompt) -> None:
        def generated() -> None:
            self._last_generated = self._waits.clock.now()

        try:
            group = await self._make.group(prompt, str(position), self._config.samples, generated=generated)
            with self._lock:
                self._record(position, group)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
                self._tell()

    def _record(self, position: int, group: ScoredGroup) -> None:
        ledger = self.ledger
        ledger.counts["dropped_samples"] += len(group.dropped)
        if group.scores:
            self._prompts.note(position, [score.value for score in group.episode_scores])
        if not group.trajectories:
            reason = group.dropped[0].reason
            _log.warning("prompt %d is dropped, no sample has a score: %s", position, reason)
            ledger.drop(position, reason)
            self._account.note(position, group, "dropped")
        elif self._config.filter_flat and not group.scores_differ:
            ledger.filter(position, group)
            self._account.note(position, group, "filtered")
        else:
            ledger.finish(position, group)
        self._fill()
        self._tell()
