"""Verifying syncs: a probe that rollout engines answer, the policy's answer, and how far they may differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rlhf_core import (
    Precision,
    ProbeGap,
    ProbeLimit,
    TokenRows,
    WeightSyncError,
    coarser,
    probe_limit,
    probe_tokens,
    tokens_for_experts,
)

from rlhf_launch.config.weight_sync import WeightSyncSection
from rlhf_launch.workers.probe import ProbeCheck, ProbedModel, ProbeReport, Scores
from rlhf_launch.workers.rollout_pool import RolloutPool
from rlhf_launch.workers.train_group import TrainGroup

AS_LOADED = -1
"""Stands for the version of the weights that policy and engines were loaded with, before any sync."""

_ROW_LENGTH = 32
_NOTICEABLE = 10.0
"""A change of the policy's log-probs counts if it is so many times what scoring them twice differs by."""


class ProbeFailed(WeightSyncError):
    """Engines hold weights that are not the policy's, though the transfer itself went well."""

    def __init__(self, version: int, faults: Sequence[tuple[int, ProbeReport]]) -> None:
        super().__init__("; ".join(f"rollout engine {engine}: {report.fault}" for engine, report in faults))
        self.version = version
        self.engines = tuple(engine for engine, _ in faults)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Probe:
    """What is the same for a whole run."""

    rows: TokenRows
    precision: Precision
    shows_changes: bool
    """Whether a change of the policy's weights changes some bit of an engine's."""


class SyncVerification:
    """Chooses a probe for a run, asks the policy for its answer, and remembers what right answers looked like.

    The first probe is held to what rounding explains for any model (`probe_limit`); once it was passed, later ones
    to four times the largest gap that was passed before, and never to more than the first.
    """

    def __init__(self, policy: TrainGroup, pool: RolloutPool, options: WeightSyncSection) -> None:
        self._policy = policy
        self._pool = pool
        self._options = options
        self._probe: _Probe | None = None
        self._limit: ProbeLimit | None = None
        self._seen: ProbeGap | None = None
        self._repeats = 0.0
        """By how much two answers of the policy with the same weights differ, on average."""
        self._asked: tuple[int, Scores] | None = None
        """The version that the policy was asked about last, with its answer."""
        self._passed: tuple[int, Scores] | None = None
        """The last version that all engines passed a probe of, with the policy's answer."""
        self._since = 0
        """Syncs since the last one that was verified."""

    @property
    def active(self) -> bool:
        """Whether syncs are verified at all."""
        return self._options.probe_every > 0 and self._pool.token_scores is not None

    def due(self) -> bool:
        """Whether the next sync is one to verify."""
        return self.active and self._since + 1 >= self._options.probe_every

    def check(self, version: int) -> ProbeCheck:
        """The probe of a version, with the policy's answer.

        The policy must have the weights of this version now.
        """
        probe = self._probe = self._probe or self._choose()
        if self._asked is None or self._asked[0] != version:
            answer = self._policy.score_tokens(probe.rows)
            if self._asked is None:
                again = self._policy.score_tokens(probe.rows)
                self._repeats = ProbeGap.between(answer, again).mean
            self._asked = (version, answer)
        answer = self._asked[1]
        since, before = self._passed or (version, answer)
        return ProbeCheck(
            version=version,
            rows=probe.rows,
            expected=answer,
            limit=self._limit_now(probe.precision),
            since=since,
            moved=_moved(before, answer, self._repeats) if probe.shows_changes else 0.0,
        )

    def accept(self, version: int, check: ProbeCheck | None, reports: Iterable[tuple[int, ProbeReport]]) -> None:
        """Note what the engines answered after a sync.

        Raises:
            ProbeFailed: some of them hold wrong weights.
        """
        if check is None:
            self._since += 1
            return
        found = list(reports)
        if faults := [(engine, report) for engine, report in found if report.fault is not None]:
            raise ProbeFailed(version, faults)
        self._since = 0
        self._passed = (version, check.expected)
        worst = max((report.gap for _, report in found), key=lambda gap: gap.mean)
        if self._seen is not None:
            worst = ProbeGap(
                mean=max(worst.mean, self._seen.mean),
                median=max(worst.median, self._seen.median),
                largest=max(worst.largest, self._seen.largest),
                tokens=worst.tokens,
            )
        self._seen = worst

    def _limit_now(self, precision: Precision) -> ProbeLimit:
        if (given := self._options.probe_limit) is not None:
            return ProbeLimit(mean=given, median=given)
        absolute = probe_limit(precision)
        return absolute if self._seen is None else absolute.calibrated(self._seen, precision)

    def _choose(self) -> _Probe:
        model: ProbedModel = self._policy.describe_model()
        engines = self._pool.token_scores
        if engines is None:
            raise WeightSyncError("a rollout engine cannot score given tokens, so no probe can be made for it")
        tokens = self._options.probe_tokens
        if model.experts:
            tokens = max(tokens, tokens_for_experts(model.experts, model.experts_per_token))
        rows = probe_tokens(
            model.vocab_size,
            tokens=tokens,
            row_length=max(2, min(_ROW_LENGTH, tokens, self._pool.max_model_len - 1)),
            avoid=model.reserved,
        )
        # Coarser numbers, or adapters merged into weights, may round a small change away.
        merged = model.adapters and self._options.adapters == "merged"
        return _Probe(
            rows=rows,
            precision=coarser(model.precision, engines),
            shows_changes=engines == model.precision and not merged,
        )


def _moved(before: Scores, now: Scores, repeats: float) -> float:
    """By how much the policy's answer has changed on average; 0 if that is too little to count."""
    change = ProbeGap.between(before, now)
    known = math.isfinite(change.mean) and change.median > 0
    return change.mean if known and change.mean > _NOTICEABLE * repeats else 0.0
