"""Which steps of a run are kept, and how: written under another name, renamed when complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from rlhf_algos import flush_folder, write_manifest
from rlhf_core import RunStopped
from rlhf_rollout import ScoredGroup

from rlhf_launch.bundles.bundle import STORY, Origin, WhyKept, write_bundle
from rlhf_launch.bundles.trace import StepTrace
from rlhf_launch.config.bundles import KeptWeights
from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.workers.train_group import TrainGroup

FOLDER = "bundles"


class KLState(Protocol):
    """What is asked of the controller of the KL coefficient."""

    def state_dict(self) -> Mapping[str, Any]:
        """What a replay must start from."""
        ...


class BundleKeeper:
    """Keeps steps of a run as bundles in `<output>/bundles`, as the section `bundles` says.

    A bundle exists if its directory has its final name. One that cannot be written, for lack of room say, is told
    of, and the run goes on.
    """

    def __init__(
        self,
        config: OnlineConfig,
        engines: Sequence[TrainGroup],
        kl: KLState,
        *,
        newest: Callable[[], int],
        say: Callable[[str], None],
    ) -> None:
        """Keep steps of this run.

        Args:
            config: the run's, with every `auto` resolved.
            engines: those whose weights change.
            kl: the controller of the KL coefficient.
            newest: gives the step of the newest complete checkpoint, 0 without one.
            say: is told what was kept because something was wrong, and what could not be kept.
        """
        self.folder = config.output / FOLDER
        self._config, self._engines, self._kl = config, engines, kl
        self._newest, self._say = newest, say

    @contextmanager
    def step(self, step: int, groups: Sequence[ScoredGroup]) -> Iterator[StepTrace]:
        """A block that takes a step and fills the trace; afterwards the step is kept, if it is one of those."""
        section = self._config.bundles
        why = section.why_kept(step)
        trace = StepTrace(step=step, groups=groups, kl_state=dict(self._kl.state_dict()))
        origin = Origin(
            run_id=self._run_id(),
            output=str(self._config.output),
            newest_checkpoint=self._newest(),
            weights=section.weights if why is not None else "none",
        )
        self._clear()
        if origin.weights != "none":
            self._save_weights(step, origin.weights)
        try:
            yield trace
        except RunStopped:
            raise
        except Exception as error:
            trace.error = error
            if section.on_fault or why is not None:
                self._keep(trace, why or "fault", origin, f"{type(error).__name__}")
            raise
        if why is not None:
            self._keep(trace, why, origin)
        elif section.on_fault and (faults := trace.faults):
            self._keep(trace, "fault", origin, faults[0])

    def _keep(self, trace: StepTrace, why: WhyKept, origin: Origin, fault: str = "") -> None:
        """Write the bundle, tell of it if something was wrong, and delete those that are too many."""
        try:
            unfinished = self._unfinished(trace.step)
            unfinished.mkdir(parents=True, exist_ok=True)
            write_bundle(unfinished, trace, why, self._config, origin)
            target = self._publish(trace.step)
            self._delete_old()
        except (OSError, ValueError, TypeError) as problem:
            self._say(f"step {trace.step} could not be kept as a bundle: {type(problem).__name__}: {problem}")
            return
        if fault:
            self._say(f"step {trace.step} is kept in {str(target)!r} ({fault}); `rlhf replay` takes it again")

    def _save_weights(self, step: int, kind: KeptWeights) -> None:
        for engine in self._engines:
            folder = self._unfinished(step) / kind / engine.name
            if kind == "state":
                engine.save(folder)
            else:
                engine.export(folder)

    def _publish(self, step: int) -> Path:
        target, replaced = self.folder / f"step-{step:06d}", self.folder / f".replaced-step-{step:06d}"
        write_manifest(self._unfinished(step))
        shutil.rmtree(replaced, ignore_errors=True)
        if target.exists():
            target.rename(replaced)
        self._unfinished(step).rename(target)
        flush_folder(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        return target

    def _delete_old(self) -> None:
        kept: dict[str, list[Path]] = {}
        for path in sorted(self.folder.glob("step-[0-9]*")):
            why = json.loads((path / STORY).read_text(encoding="utf-8"))["why"]
            kept.setdefault(why, []).append(path)
        for why in ("scheduled", "fault"):
            for path in kept.get(why, [])[: -self._config.bundles.keep]:
                shutil.rmtree(path)

    def _unfinished(self, step: int) -> Path:
        return self.folder / f".unfinished-step-{step:06d}"

    def _clear(self) -> None:
        """Remove what an interrupted step left."""
        for left in self.folder.glob(".unfinished-*"):
            shutil.rmtree(left, ignore_errors=True)

    def _run_id(self) -> str:
        try:
            return json.loads((self._config.output / "run.json").read_text(encoding="utf-8"))["run_id"]
        except (OSError, ValueError, KeyError):  # a loop of one's own keeps no record
            return ""


def kept_step(keeper: BundleKeeper | None, step: int, groups: Sequence[ScoredGroup]) -> Any:
    """A block that takes a step, whose trace the keeper keeps if it is one of those; without a keeper none is."""
    return nullcontext(StepTrace(step=step, groups=groups)) if keeper is None else keeper.step(step, groups)
