"""Memory of one engine's rank: its states, and the peaks of its passes by micro-batch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlhf_algos import Recipe
from rlhf_core import CapabilityError, EngineConfig, ImaginedModel, ImaginedPass, RolloutConfig
from rlhf_train import PlannedStates, pass_peak, planned_states

from rlhf_launch.planning.trial_batch import RowShape, planned_loss, scored_outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePlan:
    """Bytes of one rank of a training engine."""

    states: PlannedStates
    step: int
    """Peak of a training step, states included; 0 for a frozen role."""
    score: int
    """Peak of a pass without gradients, states included."""
    tokens: int
    """Of the micro-batch: the setting, or a longer row."""
    model: ImaginedModel
    reason: str = ""
    """Why the passes are not known; then the peaks hold the states alone."""

    @property
    def trained_elements(self) -> int:
        """Of the model's parameters, those that are trained."""
        return sum(one.elements for one in self.model.parameters if one.trained)

    @property
    def resident(self) -> int:
        """Bytes between steps."""
        return self.states.device


Passes = tuple[ImaginedPass | None, ImaginedPass | None, str]
"""A pass with gradients, one without, and why there is none."""


class KnownModels:
    """Models, passes and peaks of one run that were imagined already: layouts differ in few of them."""

    def __init__(self) -> None:
        self._models: dict[str, ImaginedModel] = {}
        self.passes: dict[tuple[int, int], Passes] = {}
        """By the model, and the tokens of the micro-batch on a rank."""
        self.peaks: dict[tuple[int, str, bool], int] = {}
        """By the pass, the engine's options and whether it has several ranks."""

    def model(self, config: EngineConfig) -> ImaginedModel:
        """The model of an engine; what does not change it is passed over."""
        same = replace(config, options={}, max_tokens_per_micro_batch=1, sequence_parallel_size=1)
        key = repr(same)
        if key not in self._models:
            self._models[key] = ImaginedModel(config)
        return self._models[key]

    def of_rollout(self, config: RolloutConfig) -> ImaginedModel:
        """The model of a rollout engine."""
        return self.model(
            EngineConfig(model=config.model, dtype=config.dtype, trust_remote_code=config.trust_remote_code)
        )


class EnginePlanner:
    """Plans one engine for any number of tokens; the model is imagined once."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        ranks: int,
        rows: RowShape,
        recipe: Recipe | None = None,
        known: KnownModels | None = None,
    ) -> None:
        """Of one engine.

        Args:
            config: of every rank.
            ranks: of the engine.
            rows: the longest there can be.
            recipe: the algorithm of the run, for its losses.
            known: of the same run's other engines and layouts.

        Raises:
            ConfigError: the model's configuration is not at hand.
        """
        self.config, self.ranks, self._rows, self._recipe = config, ranks, rows, recipe
        self._known = known or KnownModels()
        self.model = self._known.model(config)
        self.states = planned_states(config, self.model.parameters, ranks=ranks)

    def plan(self, tokens: int) -> EnginePlan:
        """With micro-batches of so many tokens."""
        step, score, reason = self.passes(tokens)
        held = self.states.device + self.model.buffers
        step_peak = max(held + self.states.update, held + self._peak(step)) if self.config.trained else 0
        return EnginePlan(
            states=self.states,
            step=step_peak,
            score=held + self._peak(score),
            tokens=score.tokens if score is not None else tokens,
            model=self.model,
            reason=reason,
        )

    def passes(self, tokens: int) -> Passes:
        """Those of a micro-batch of so many tokens."""
        # A rank of a sequence group has a slice of every row.
        own = -(-tokens // self.config.sequence_parallel_size)
        key = (id(self.model), own)
        if key not in self._known.passes:
            self._known.passes[key] = self._imagined(own)
        return self._known.passes[key]

    def _imagined(self, own: int) -> Passes:
        role = self.config.role
        batch = self._rows.batch(own, one_row=self.config.device.startswith("cuda"))
        try:
            score = self.model.score(batch, scored_outputs(role))
            step = self.model.step(batch, planned_loss(role, self._recipe)) if self.config.trained else None
        except CapabilityError as error:
            return None, None, str(error)
        return step, score, ""

    def _peak(self, done: ImaginedPass | None) -> int:
        if done is None:
            return 0
        options = {name: value for name, value in self.config.options.items() if name != "offload_optimizer"}
        key = (id(done), repr(sorted(options.items(), key=str)), self.ranks > 1)
        if key not in self._known.peaks:
            self._known.peaks[key] = pass_peak(
                self.config, self.model.parameters, done, head=self.model.head, ranks=self.ranks
            )
        return self._known.peaks[key]
