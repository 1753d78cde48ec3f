"""Bundles: a training step with all that it worked on, as a directory of safetensors and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rlhf_algos import dump_config, installed_versions, load_config, manifest_problem
from rlhf_core import Batch, CheckpointError, DataError, RaggedBatch, StepReport, naming_damage
from rlhf_rollout import ScoredGroup
from safetensors.torch import load_file, save_file

from rlhf_launch.bundles.batches import pack_batch, unpack_batch
from rlhf_launch.bundles.trace import Order, StepTrace
from rlhf_launch.config.bundles import KeptWeights
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.samples.saved_groups import can_be_saved, pack_groups, unpack_groups

FORMAT = 1
"""Rises when a bundle of today could not be read by yesterday's code."""
STORY = "bundle.json"
CONFIG = "config.yaml"
GROUPS = "groups.safetensors"
BATCH = "batch.safetensors"
PRETRAINING = "pretraining.safetensors"

WhyKept = Literal["named", "scheduled", "fault"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Where a bundle comes from."""

    run_id: str
    output: str
    """The run's directory, absolute."""
    newest_checkpoint: int
    """Step of the newest complete checkpoint when the step began; 0 without one."""
    weights: KeptWeights = "none"
    """What the bundle itself carries of the weights before the step, in `model/<role>` or `state/<role>`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A kept step. The samples and their columns are read from the disk when they are asked for."""

    path: Path
    step: int
    """The step, counted from 1: the weights that it began with are those after `step - 1` steps."""
    why: WhyKept
    origin: Origin
    kl_state: Mapping[str, Any]
    kl_coef: float | None
    """None if the step did not come so far."""
    order: Order | None
    """The rows of each minibatch; None if the step did not come so far."""
    reports: Mapping[str, Sequence[StepReport]]
    """Of the optimizer steps that were taken, by role."""
    metrics: Mapping[str, float]
    """Of the step, without those that measure time; empty if it ended in an error."""
    faults: Sequence[str] = ()
    """What was wrong with its numbers, in words."""
    error: str | None = None
    """What ended it."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the packages that it ran with."""
    temperature: float = 1.0
    sample_ids: Sequence[str] = ()
    scored: bool = False
    """Whether the step came so far that there is a batch."""
    images: bool = False
    """Whether its prompts had images, which a bundle does not hold: the step cannot be taken again."""

    def config(self, overrides: Sequence[str] = ()) -> OnlineConfig:
        """The run's settings with every `auto` resolved, and `dotted.key=value` on top.

        Another algorithm by name (`algorithm=dapo`) begins with its own settings, not with those of the run's.

        Raises:
            ConfigError: an override is not understood.
        """
        named = {override.partition("=")[0].strip() for override in overrides}
        ignored = ("algorithm",) if named & {"algorithm", "algorithm.name"} else ()
        return load_config(OnlineConfig, self.path / CONFIG, overrides, ignore=ignored)

    def groups(self) -> list[ScoredGroup]:
        """The samples with their scores, as they came to the step."""
        with naming_damage(f"the bundle {str(self.path)!r}", self.path / GROUPS):
            return unpack_groups(load_file(self.path / GROUPS))

    def batch(self) -> Batch | None:
        """The samples with all columns that the step gave them: `old_log_probs`, `values`, `advantages`, ...; None
        if it ended before it had scored them."""
        if not self.scored:
            return None
        with naming_damage(f"the bundle {str(self.path)!r}", self.path / BATCH):
            packed = load_file(self.path / BATCH)
        return unpack_batch(packed, temperature=self.temperature, sample_ids=self.sample_ids)

    def pretraining(self) -> RaggedBatch | None:
        """The text that the step had beside its samples; None without any."""
        if not (self.path / PRETRAINING).exists():
            return None
        with naming_damage(f"the bundle {str(self.path)!r}", self.path / PRETRAINING):
            packed = load_file(self.path / PRETRAINING)
        return RaggedBatch.of(unpack_batch(packed, temperature=1.0, sample_ids=()))


def read_bundle(path: Path) -> Bundle:
    """Read what a bundle says of its step, after a look at whether it is whole.

    Args:
        path: the bundle's directory, `<output>/bundles/step-000123`.

    Raises:
        DataError: there is no bundle, or one of another version.
        CheckpointError: it is damaged.
    """
    path = Path(path).absolute()
    if not (path / STORY).exists():
        raise DataError(f"no bundle in {str(path)!r}: {STORY} is missing; {_hint(path)}")
    if (problem := manifest_problem(path)) is not None:
        raise CheckpointError(f"the bundle {str(path)!r} is damaged: {problem}; take another one")
    story = json.loads((path / STORY).read_text(encoding="utf-8"))
    if (found := story.pop("format", None)) != FORMAT:
        raise DataError(
            f"the bundle {str(path)!r} has format {found!r}, this version of rlhf-launch reads format {FORMAT}; "
            f"use the version that wrote it ({story.get('versions', {}).get('rlhf-launch', 'unknown')})"
        )
    reports = {role: tuple(map(_report, some)) for role, some in story.pop("reports").items()}
    metrics = {name: _number(value) for name, value in story.pop("metrics").items()}
    return Bundle(path=path, origin=Origin(**story.pop("origin")), reports=reports, metrics=metrics, **story)


def write_bundle(folder: Path, trace: StepTrace, why: WhyKept, config: OnlineConfig, origin: Origin) -> None:
    """Fill a folder with a step; whoever calls lists its files and gives it its name.

    Args:
        folder: exists; may hold weights.
        trace: the step.
        why: why it is kept.
        config: the run's settings with every `auto` resolved.
        origin: where it comes from.
    """
    batch = trace.batch
    story = {
        "format": FORMAT,
        "step": trace.step,
        "why": why,
        "origin": asdict(origin),
        "kl_state": dict(trace.kl_state),
        "kl_coef": trace.kl_coef,
        "order": trace.order,
        "reports": {role: [_plain_report(report) for report in some] for role, some in trace.reports.items()},
        "metrics": {name: _json_number(value) for name, value in trace.metrics.items()},
        "faults": trace.faults,
        "error": None if trace.error is None else f"{type(trace.error).__name__}: {trace.error}",
        "versions": installed_versions(),
        "temperature": 1.0 if batch is None else batch.temperature,
        "sample_ids": () if batch is None else batch.sample_ids,
        "scored": batch is not None,
    }
    if any(one.shown is not None for group in trace.groups for one in group.trajectories):
        story["images"] = True
    (folder / STORY).write_text(json.dumps(story, indent=1) + "\n", encoding="utf-8")
    (folder / CONFIG).write_text(dump_config(config), encoding="utf-8")
    save_file(pack_groups([_savable(group) for group in trace.groups]), folder / GROUPS)
    if batch is not None:
        save_file(pack_batch(batch), folder / BATCH)
    if trace.pretraining is not None:
        save_file(pack_batch(trace.pretraining), folder / PRETRAINING)


def _hint(path: Path) -> str:
    """What there is instead of a bundle."""
    for folder in (path, path / "bundles"):
        if found := sorted(inner.name for inner in folder.glob("step-*") if (inner / STORY).exists()):
            return f"{str(folder)!r} has {', '.join(found)}; give one of them"
    return "give a directory like <output>/bundles/step-000010; the section `bundles` says which steps are kept"


def _savable(group: ScoredGroup) -> ScoredGroup:
    """The group without what a file cannot hold: images (see `Bundle.images`), and metadata, which no training
    reads."""
    if can_be_saved(group):
        return group
    bare = tuple(replace(one, images=(), shown=None, metadata={}) for one in group.trajectories)
    return replace(group, trajectories=bare)


def _plain_report(report: StepReport) -> dict[str, Any]:
    plain = asdict(report)
    for name in ("loss", "grad_norm", "learning_rate"):
        plain[name] = _json_number(plain[name])
    return plain | {"metrics": {name: _json_number(value) for name, value in report.metrics.items()}}


def _report(plain: Mapping[str, Any]) -> StepReport:
    numbers = {name: _number(plain[name]) for name in ("loss", "grad_norm", "learning_rate")}
    metrics = {name: _number(value) for name, value in plain["metrics"].items()}
    return StepReport(**{**plain, **numbers, "metrics": metrics, "bad_sample_ids": tuple(plain["bad_sample_ids"])})


def _json_number(value: float) -> float | None:
    """JSON has no number that is not finite."""
    return float(value) if math.isfinite(value) else None


def _number(value: float | None) -> float:
    """Inverse of `_json_number`."""
    return math.nan if value is None else value
