"""The weights that a kept step began with: where they are, and how they get into another engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from rlhf_algos import CheckpointStore, manifest_problem
from rlhf_core import CheckpointError, ConfigError, DataError

from rlhf_launch.bundles.bundle import Bundle
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.placement.executor import LocalExecutor
from rlhf_launch.placement.plans import TrainRole, model_of, training_plans
from rlhf_launch.placement.resolve import ResolvedBackends
from rlhf_launch.workers.handles import close_workers
from rlhf_launch.workers.train_group import TrainGroup

MANIFEST = "manifest.json"
TRAINED: tuple[TrainRole, ...] = ("policy", "critic")


@dataclass(frozen=True, kw_only=True, slots=True)
class StartingWeights:
    """Weights before a step."""

    kind: Literal["state", "model", "beginning"]
    """What there is of each trained role: an engine's whole state, a Transformers directory, or nothing, as the run
    began with the models that its settings name."""
    folders: Mapping[TrainRole, Path] = field(default_factory=dict)
    """Where each trained role's are; empty at the beginning."""
    words: str
    """`the checkpoint of step 122`."""


def _weights(kind: Literal["state", "model"], folder: Path, words: str) -> StartingWeights:
    """What a folder with one for each role holds."""
    return StartingWeights(kind=kind, folders=_role_folders(folder), words=words)


def _role_folders(folder: Path) -> dict[TrainRole, Path]:
    return {role: folder / role for role in TRAINED if (folder / role).is_dir()}


def run_checkpoints(bundle: Bundle) -> CheckpointStore:
    """The checkpoints of a bundle's run: beside the folder of its bundles, or where the run wrote them."""
    beside = bundle.path.parent.parent / "checkpoints"
    return CheckpointStore(beside if beside.is_dir() else Path(bundle.origin.output) / "checkpoints")


def find_weights(bundle: Bundle, given: Path | None = None) -> StartingWeights:
    """Where the weights before a kept step are.

    Args:
        bundle: the step.
        given: a checkpoint or a Transformers directory to start from in any case.

    Raises:
        DataError: they are nowhere; says what there is and how to have them next time.
        CheckpointError: the checkpoint or the directory that they would be taken from is damaged.
    """
    if given is not None:
        return _given(given)
    before = bundle.step - 1
    if bundle.origin.weights == "state":
        return _weights("state", bundle.path / "state", "the bundle's own state")
    store = run_checkpoints(bundle)
    if before in store.steps():
        if (problem := manifest_problem(store.path(before))) is None:
            return _weights("state", store.path(before), f"the checkpoint of step {before}")
        if bundle.origin.weights == "none" and before:
            raise CheckpointError(f"the checkpoint {str(store.path(before))!r} is damaged: {problem}; {_ADVICE}")
    if before == 0:
        return StartingWeights(kind="beginning", words="the models that the run began with")
    if bundle.origin.weights == "model":
        return _weights("model", bundle.path / "model", "the bundle's own models")
    there = ", ".join(map(str, store.steps())) or "none"
    raise DataError(
        f"the weights that step {bundle.step} began with are nowhere: the bundle carries none, and there is no "
        f"checkpoint of step {before} in {str(store.folder)!r} (there are: {there}). {_ADVICE}"
    )


_ADVICE = (
    "Give a checkpoint or a model with --weights, whose numbers may part for being of another step; next time "
    "write bundles.weights: model (or state), or keep the checkpoint"
)


def _given(path: Path) -> StartingWeights:
    path = path.absolute()
    if (path / "config.json").exists():
        return StartingWeights(kind="model", folders={"policy": path}, words=f"the model {str(path)!r}")
    if not _role_folders(path):
        raise DataError(
            f"--weights {str(path)!r} is neither a checkpoint (a directory with policy/) nor a model (a directory "
            "with config.json)"
        )
    if (path / MANIFEST).exists() and (problem := manifest_problem(path)) is not None:
        raise CheckpointError(f"the checkpoint {str(path)!r} is damaged: {problem}; give another one")
    kind = "model" if (path / "policy" / "config.json").exists() else "state"
    return _weights(kind, path, repr(str(path)))


def check_convertible(bundle_config: OnlineConfig, start: StartingWeights, engine: str) -> None:
    """Refuse weights that another engine cannot take.

    Raises:
        ConfigError: a 4-bit policy with adapters, whose merged weights are no 4-bit weights any more.
    """
    lora = bundle_config.model.lora
    moved = start.kind == "model" or (start.kind == "state" and engine != bundle_config.train.engine)
    if moved and lora is not None and lora.quantize is not None:
        raise ConfigError(
            "adapters on 4-bit weights can be replayed on the run's own engine and from its state alone; write "
            f"train.engine={bundle_config.train.engine}, with a checkpoint or bundles.weights: state"
        )


@contextmanager
def local_roles(config: OnlineConfig, roles: Sequence[TrainRole]) -> Iterator[dict[TrainRole, TrainGroup]]:
    """Training engines of these roles, one rank each, in this process; closed when the block ends."""
    backends = ResolvedBackends(
        executor="local",
        engine=config.train.engine,
        backend=config.rollout.backend,
        device=config.placement.device,  # type: ignore[arg-type]
        dtype=config.model.dtype,  # type: ignore[arg-type]
        reasons=(),
    )
    plans = [training_plans(config, backends, role)[0] for role in roles]
    handles = LocalExecutor().place(plans)
    try:
        groups: dict[TrainRole, TrainGroup] = {
            role: TrainGroup(role, [handle]) for role, handle in zip(roles, handles, strict=True)
        }
        for group in groups.values():
            group.start()
        yield groups
    finally:
        close_workers(handles)


def export_state(config: OnlineConfig, folders: Mapping[TrainRole, Path], target: Path) -> dict[TrainRole, Path]:
    """Write the models of a checkpoint as Transformers directories, by an engine of the kind that wrote it.

    Args:
        config: the run's settings, for one process.
        folders: the checkpoint's, of each trained role.
        target: gets a folder for each of them.

    Returns:
        These folders.
    """
    for role in folders:
        with local_roles(config, [role]) as groups:
            groups[role].load(folders[role])
            groups[role].export(target / role)
    return _role_folders(target)


def starting_from(config: OnlineConfig, models: Mapping[TrainRole, Path]) -> OnlineConfig:
    """The settings with the trained roles' models taken from these directories, the reference's left as it was."""
    recipe, model = config.algorithm.recipe, config.model
    changes: dict[str, str | None] = {}
    if recipe.needs_reference:
        changes["reference"] = model.reference or model.path
    if recipe.needs_critic:
        # Without a critic of its own the run made one of a reward model or of the policy's model.
        changes["critic"] = str(models["critic"]) if "critic" in models else model_of(config, "critic")
    if "policy" in models:
        changes["path"] = str(models["policy"])
    return replace(config, model=replace(model, **changes))
