"""What a step does with its samples: score them, estimate advantages, take the optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from rlhf_algos import PAIR_SIDE, KLController, LearnsFromPairs, LearnsText, Recipe, mix_pretraining
from rlhf_core import CapabilityError, Metric, RaggedBatch, RaggedColumn, StepReport, order_in_groups
from rlhf_rollout import ScoredGroup

from rlhf_launch.bundles.trace import Order, StepTrace
from rlhf_launch.config.placement import TEACHER
from rlhf_launch.online.metrics import PhaseClock, comparable, sample_metrics, step_metrics
from rlhf_launch.samples.groups import rows_of_groups, staleness
from rlhf_launch.samples.pretraining import PretrainingStream
from rlhf_launch.samples.several_teachers import joined_judgements, rows_of_teachers
from rlhf_launch.samples.teacher_prompts import TaughtRows, TeacherPrompts
from rlhf_launch.workers.begun import Begun, results_of
from rlhf_launch.workers.devices import in_turns
from rlhf_launch.workers.episodes import EPISODES
from rlhf_launch.workers.prepare import columns_of_rows, in_parts, prepare_rows
from rlhf_launch.workers.train_group import RowColumns, TrainGroup

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdatePlan:
    """How often the samples of a step are trained on, and in which portions."""

    minibatches: int = 1
    """Optimizer steps per pass."""
    epochs: int = 1
    """Passes over the samples."""
    critic_warmup_steps: int = 0
    """Steps at the start of the run in which only the critic is trained."""
    seed: int = 0
    """Seed of the order of the samples."""
    score_always: bool = False
    """Ask the policy for the log-probs of its samples before every update, also where the update can take its own
    (see `Trainer.asked_before`)."""

    def order(self, groups: Sequence[int], step: int, *, ranks: int) -> Order:
        """The rows (or pairs of rows, where `groups` are theirs) of each optimizer step of all passes, for the
        samples of the step after `step` steps.

        Rows of one group, which share a prompt, are in one portion wherever there are enough groups: the prompt is
        run once for them. Where there is no row, there is no portion.
        """
        if not groups:
            return []
        drawn: Order = []
        for epoch in range(self.epochs):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step * 101 + epoch)
            order = torch.randperm(len(groups), generator=generator).tolist()
            # A step that dynamic sampling left short has fewer minibatches, so that every rank has a row in each.
            parts = max(1, min(self.minibatches, len(groups) // ranks))
            drawn += order_in_groups(groups, parts, order)
        return drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """The training engines of a run and the algorithm that they follow."""

    policy: TrainGroup
    critic: TrainGroup | None = None
    reference: TrainGroup | None = None
    reference_is_policy: bool = False
    """The reference is the policy with its adapters off, on the policy's own ranks."""
    teacher: TrainGroup | None = None
    teachers: Mapping[str, TrainGroup] = field(default_factory=dict)
    """Several teachers, by name, each of which judges the rows whose prompts name it."""
    teacher_prompts: TeacherPrompts | None = None
    """What the teacher is shown in the place of the samples' own prompts."""
    recipe: Recipe
    kl: KLController
    plan: UpdatePlan = field(default_factory=UpdatePlan)
    rewards: tuple[TrainGroup, ...] = ()
    """Reward models, which score samples as they come; here for their idle seconds."""
    pretraining: PretrainingStream | None = None
    """Text that the policy learns beside its samples."""
    scored: bool = True
    """Whether the samples have scores of a reward."""
    one_at_a_time: bool = False
    """Whether all roles share the cores of one process, so that nothing is won by working at the same time."""

    @property
    def trained(self) -> list[TrainGroup]:
        """The engines whose weights change."""
        return [self.policy, *([self.critic] if self.critic is not None else [])]

    def step(
        self, groups: Sequence[ScoredGroup], step: int, clock: PhaseClock, trace: StepTrace | None = None
    ) -> tuple[RaggedBatch, dict[str, float]]:
        """Train on the groups of a step; returns the batch with all its columns, and the step's metrics.

        Nothing is done here for each token: ranks score rows, prepare them and train on them, and what they give
        goes on to others in the memory that it came in. Only an algorithm that looks at all rows of a step at once,
        other than to whiten advantages (see `in_parts`), prepares them in this process.

        Args:
            groups: the samples with their scores.
            step: completed steps.
            clock: measures the phases.
            trace: gets what is known as soon as it is known; if it has an order of the rows, that is followed.
        """
        trace = trace or StepTrace(step=step + 1, groups=groups)
        self._check_meanings(groups)
        batch = trace.batch = rows_of_groups(groups)
        if asked := self.asked_before(step):
            with clock("score"):
                taught = None if self.teacher_prompts is None else self.teacher_prompts.taught(groups)
                judged = rows_of_teachers(groups) if self.teachers else {}
                batch = trace.batch = self.score(batch, asked, taught, judged)
        kl_coef = trace.kl_coef = self.kl.value
        batch, prepared = self.prepare(batch, kl_coef)
        trace.batch = batch
        with clock("train"):
            measured = step_metrics(self.update(batch, step, trace))
        before = {name: metric.value for name, metric in prepared.items()}
        if not comparable(groups):
            for found in (before, measured):
                found.pop("mismatch/log_prob_max", None)
        self.kl.update(_kl_of(before, measured), batch.rows)
        metrics = (
            sample_metrics(groups, scored=self.scored)
            | staleness(groups, step)
            | before
            | measured
            | self.memory()
            | ({} if self.pretraining is None else {"ptx_passes": self.pretraining.passes(step + 1)})
            | {"kl_coef": kl_coef, "scoring_pass": float("policy" in asked)}
            | self.pair_metrics(batch, len(groups))
        )
        trace.metrics = metrics
        return batch, metrics

    def _check_meanings(self, groups: Sequence[ScoredGroup]) -> None:
        """Refuse samples whose form a program has asked for, where their log-probs are set beside the trainer's.

        What a configuration says of sampling was looked at before the run; this a program says in its requests.
        """
        compared = bool(getattr(self.recipe, "off_policy", ())) or "log_probs" not in self.recipe.old_outputs
        if self.learns_from_pairs or not compared:
            return
        for trajectory in (one for group in groups for one in group.trajectories):
            if trajectory.meaning.constrained:
                raise CapabilityError(
                    f"sample {trajectory.sample_id!r} was kept to a JSON Schema (`response_format`), so that its "
                    "log-probs are of another distribution than the trained one, and this run compares them with "
                    "the trainer's. Leave the form out of the program's requests, or write "
                    "algorithm.old_log_probs: trainer and rollout.overlap.off_policy_correction: false"
                )

    def asked_before(self, step: int) -> dict[str, tuple[str, ...]]:
        """What each role is asked about the samples before they are trained on, after `step` steps: the policy for
        `old_<field>`, the reference for `ref_log_probs`, the teacher for `teacher_log_probs`, the critic for
        `values`.

        Where the samples are trained on once, all together, the update's own log-probs are the old ones, and the
        policy is asked for nothing, unless the algorithm must know them before.
        """
        asked: dict[str, tuple[str, ...]] = {}
        outputs, plan = self.recipe.old_outputs, self.plan
        one_update = plan.minibatches * plan.epochs == 1 and step >= plan.critic_warmup_steps
        spared = one_update and outputs == ("log_probs",) and not self.recipe.needs_old_log_probs
        if outputs and (plan.score_always or not spared):
            asked["policy"] = outputs
        if self.reference is not None or self.reference_is_policy:
            asked["reference"] = ("log_probs",)
        if self.teacher is not None:
            asked["teacher"] = ("log_probs",)
        asked |= {TEACHER + name: ("log_probs",) for name in self.teachers}
        if self.critic is not None:
            asked["critic"] = ("values",)
        return asked

    def prepare(self, batch: RaggedBatch, kl_coef: float) -> tuple[RaggedBatch, dict[str, Metric]]:
        """The batch with the columns that the losses read, and metrics; see `Recipe.prepare`."""
        if in_parts(self.recipe) is not None:
            columns, metrics = self.policy.prepare(batch, self.recipe, kl_coef=kl_coef)
            return batch.with_columns(**columns), metrics
        prepared = prepare_rows(batch, self.recipe, kl_coef)
        columns = columns_of_rows([prepared.columns], [range(batch.rows)], batch.rows)
        return batch.with_columns(**columns), dict(prepared.metrics)

    def score(
        self,
        batch: RaggedBatch,
        asked: Mapping[str, tuple[str, ...]],
        taught: TaughtRows | None = None,
        judged: Mapping[str, Sequence[int]] | None = None,
    ) -> RaggedBatch:
        """Add what the roles are asked for (see `asked_before`); those with devices of their own work at the same
        time. With `taught` the teacher reads these rows in the place of the batch's; of several teachers each reads
        its own (`judged`)."""
        groups = {
            "policy": self.policy,
            "reference": self.reference,
            "teacher": self.teacher,
            "critic": self.critic,
        } | {TEACHER + name: group for name, group in self.teachers.items()}
        judged = judged or {}

        def begin(role: str) -> Begun[RowColumns]:
            if role == "reference" and self.reference_is_policy:
                return self.policy.begin_score_rows(batch, asked[role], adapters=False)
            group, rows = groups[role], batch
            if role == "teacher" and taught is not None and taught.rows is not None:
                rows = taught.rows
            if role.startswith(TEACHER):
                rows = batch.select(judged[role.removeprefix(TEACHER)])
            if group is None:
                raise RuntimeError(f"the run has no {role} to ask for {', '.join(asked[role])}")
            return group.begin_score_rows(rows, asked[role])

        # A teacher of which no prompt of the step is has nothing to do.
        idle = {TEACHER + name for name in self.teachers if name not in judged}
        asked = {role: outputs for role, outputs in asked.items() if role not in idle}
        said: dict[str, RaggedColumn] = {}
        if taught is not None and taught.rows is None:
            del asked["teacher"]
            batch = batch.with_columns(**taught.columns(None, batch.lengths))
        for role, found in self._together(list(asked), begin).items():
            if role.startswith(TEACHER):
                said[role.removeprefix(TEACHER)] = _by_token(found["log_probs"])
                continue
            prefix = {"policy": "old_", "reference": "ref_", "teacher": "teacher_", "critic": ""}[role]
            if missing := set(asked[role]) - set(found):
                raise RuntimeError(f"the {role} was asked for {', '.join(sorted(missing))} and did not return it")
            if role == "teacher" and taught is not None:
                batch = batch.with_columns(**taught.columns(_by_token(found["log_probs"]), batch.lengths))
                continue
            columns = {f"{prefix}{name}": found[name] for name in asked[role]}
            if "routed_experts" in found:  # routing replay: the update takes the same experts
                columns["routed_experts"] = found["routed_experts"]
            batch = batch.with_columns(**columns)
        return batch.with_columns(**joined_judgements(said, judged, batch.rows)) if said else batch

    @property
    def learns_from_pairs(self) -> bool:
        """Whether the algorithm trains on pairs of rows."""
        return isinstance(self.recipe, LearnsFromPairs) and self.recipe.learns_from_pairs

    def units(self, batch: RaggedBatch) -> list[list[int]]:
        """What is trained on, each unit's rows in the order of the loss: single rows, or chosen and rejected.

        Raises:
            CapabilityError: an episode of several rows cannot be half of a pair.
        """
        if not self.learns_from_pairs:
            return [[row] for row in range(batch.rows)]
        if EPISODES in batch.per_row:
            raise CapabilityError(
                "episodes of several trajectories cannot be paired: a preference loss takes one row for each "
                "response; use an agent whose episodes are one trajectory, or another algorithm"
            )
        sides, groups = batch[PAIR_SIDE].tolist(), batch["group_ids"].tolist()
        chosen, rejected = ({groups[row]: row for row, side in enumerate(sides) if side == s} for s in (1, 2))
        return [[row, rejected[group]] for group, row in chosen.items()]

    def pair_metrics(self, batch: RaggedBatch, prompts: int) -> dict[str, float]:
        """`pairs` that are trained on, and `ties`: prompts of the step that gave none."""
        if not self.learns_from_pairs:
            return {}
        pairs = len(self.units(batch))
        return {"pairs": float(pairs), "ties": float(prompts - pairs)}

    def update(self, batch: RaggedBatch, step: int, trace: StepTrace | None = None) -> dict[str, list[StepReport]]:
        """All optimizer steps of one batch of samples; reports by role, which the trace has as they come.

        Critic and policy take their steps of a minibatch at once, unless they share devices.
        """
        trace = trace or StepTrace(step=step + 1, groups=())
        losses = {"critic": self.recipe.value_loss(), "policy": self.recipe.policy_loss(self.kl.value)}
        trained = {"critic": self.critic, "policy": self.policy if step >= self.plan.critic_warmup_steps else None}
        work = {
            role: (group, loss)
            for role, group in trained.items()
            if group is not None and (loss := losses[role]) is not None
        }
        units = self.units(batch)
        if trace.order is None:
            groups = batch["group_ids"].tolist()
            drawn = self.plan.order([groups[unit[0]] for unit in units], step, ranks=self.policy.ranks)
            trace.order = [[row for unit in portion for row in units[unit]] for portion in drawn]
        if trace.pretraining is None and self.pretraining is not None and "policy" in work:
            trace.pretraining = self.pretraining.of_step(step)
        together = 2 if self.learns_from_pairs else 1
        # Where they share devices, each takes all its steps in one turn: to change places costs seconds.
        apart = not self.one_at_a_time and "policy" not in self.policy.devices.neighbours("critic")
        for turn in [list(work)] if apart else [[role] for role in work]:
            for place, rows in enumerate(trace.order):
                minibatch = replace(batch.select(rows), rows_per_unit=together)

                def begin(role: str, place: int = place, minibatch: RaggedBatch = minibatch) -> Begun[StepReport]:
                    group, loss = work[role]
                    if role == "policy":
                        minibatch = self._with_text(minibatch, trace.pretraining, place)
                    return group.begin_step(minibatch, loss)

                for role, report in self._together(turn, begin).items():
                    trace.reports.setdefault(role, []).append(report)
        return trace.reports

    def _with_text(self, minibatch: RaggedBatch, text: RaggedBatch | None, place: int) -> RaggedBatch:
        """The samples of an optimizer step, of several of a step of the loop, with its share of the step's text."""
        if text is None or not isinstance(self.recipe, LearnsText):
            return minibatch
        share = text.rows // (self.plan.minibatches * self.plan.epochs)
        rows = text.select(range(place * share, (place + 1) * share))
        return mix_pretraining(minibatch, rows, self.recipe.ptx_coef, self.recipe.policy_loss().config)

    def _together(self, roles: Sequence[str], begin: Callable[[str], Begun[T]]) -> dict[str, T]:
        """Results of work of all roles, by role: at the same time, in turns where they share devices."""
        found: dict[str, T] = {}
        devices = self.policy.devices
        # A reference that is the policy with its adapters off is wherever the policy is.
        engines = {role: "policy" if role == "reference" and self.reference_is_policy else role for role in roles}
        shared = [[role for role in roles if engines[role] in names] for names in devices.shared]
        for turn in in_turns(roles, [roles] if self.one_at_a_time else shared):
            with devices.at_work(*dict.fromkeys(engines[role] for role in turn)):
                found |= zip(turn, results_of([begin(role) for role in turn]), strict=True)
        return found

    def take_idle_seconds(self) -> dict[str, float]:
        """Seconds since the last call in which a role had nothing to do, by role."""
        groups = [self.policy, self.critic, self.reference, self.teacher, *self.teachers.values(), *self.rewards]
        # The reward of a part is called `reward <part>`, one of several teachers `teacher <name>`.
        return {group.name.replace(" ", "/"): group.take_idle_seconds() for group in groups if group is not None}

    def memory(self) -> dict[str, float]:
        """GiB of the rank with most, by role: what it holds, and the peak of each phase; where the engine says."""
        return {
            f"memory/{group.name}/{what}": size / 2**30
            for group in self.trained
            for what, size in group.memory().items()
        }


def _kl_of(before: Mapping[str, float], measured: Mapping[str, float]) -> float:
    """KL to the reference per token with the weights before the update, which the update has measured where the
    policy was not scored before it; NaN (which controllers ignore) without a reference."""
    reference = before.get("reference_kl", measured.get("reference_kl", math.nan))
    return before.get("kl", reference)


def _by_token(column: RaggedColumn | torch.Tensor) -> RaggedColumn:
    if not isinstance(column, RaggedColumn):
        raise RuntimeError("the teacher did not say the log-prob of each token")
    return column
