"""The offline methods: how rows become examples, which loss on which model, and what a batch still needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rlhf_core import Batch, ConfigError, Loss, LossFunction, Role, did_you_mean, load_object
from torch import Tensor

from rlhf_algos.data.encoding import TokenRow
from rlhf_algos.data.examples import Encode, Example
from rlhf_algos.data.readers import (
    preference_examples,
    step_examples,
    supervised_examples,
    triple_examples,
    unpaired_examples,
)
from rlhf_algos.losses.offline.kto import (
    KTOConfig,
    bco_shift,
    kl_baseline,
    kto,
    opposite_baselines,
    with_kl_baseline,
)
from rlhf_algos.losses.offline.pairwise import aot_partners
from rlhf_algos.losses.offline.preference import DPOConfig, dpo, with_sft_divisor
from rlhf_algos.losses.offline.reference_free import (
    CPOConfig,
    ORPOConfig,
    SimPOConfig,
    TPOConfig,
    cpo,
    orpo,
    simpo,
    tpo,
)
from rlhf_algos.losses.offline.reward_model import (
    BradleyTerryConfig,
    ProcessRewardLossConfig,
    bradley_terry,
    process_reward_loss,
)
from rlhf_algos.losses.offline.sft import SFTConfig, sft
from rlhf_algos.offline.reference import PARTNER
from rlhf_algos.offline.teacher import DistillConfig, distill
from rlhf_algos.own_function import load_own_function

RowScorer = Callable[[Sequence[TokenRow]], Tensor]
"""Log-probs of responses, summed over their tokens, under the current policy: [rows] float32."""

Prepare = Callable[[Batch, Sequence[Example], RowScorer, Any], Batch]
"""Adds the columns that are statistics of the whole global batch, before it is cut into ranks and micro-batches."""


def _nothing(batch: Batch, examples: Sequence[Example], scorer: RowScorer, config: Any) -> Batch:
    return batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One offline method; the training loop is the same for all."""

    encode: Encode
    """Rows to examples."""
    function: LossFunction
    """The loss."""
    config: type
    """The class of the loss's config."""
    role: Role = "policy"
    """Which kind of model is trained, unless the loss's config says so itself (attribute `role`)."""
    needs_reference: Callable[[Any], bool] = lambda config: False
    """Whether, under this config, examples need the reference's log-probs (column `ref_log_probs_sum`)."""
    needs_partners: Callable[[Any], bool] = lambda config: False
    """Whether examples need another example's response to their own prompt."""
    teacher: Callable[[Any], str | None] = lambda config: None
    """The model whose distribution the examples need, if any."""
    prepare: Prepare = _nothing
    """See `Prepare`."""
    outputs: tuple[str, ...] = ("log_probs",)
    """Fields of ModelOutputs that the loss reads, unless its config says so itself."""
    best_metric: str = "loss"
    """Metric by which the best model is chosen unless another one is asked for."""
    learning_rate: float = 1e-6
    """Where the configuration names none; of full training, low-rank adapters take more."""

    def role_for(self, config: Any) -> Role:
        """Which kind of model is trained under this config."""
        return getattr(config, "role", self.role)

    def loss(self, config: Any) -> Loss:
        """The loss as the engine takes it."""
        return Loss(function=self.function, config=config, outputs=tuple(getattr(config, "outputs", self.outputs)))


def _prepare_pairs(batch: Batch, examples: Sequence[Example], scorer: RowScorer, config: Any) -> Batch:
    wanted = getattr(config, "sft_coef", 1.0) and getattr(config, "sft_mean", "") == "token"
    return with_sft_divisor(batch) if wanted else batch


def _prepare_triples(batch: Batch, examples: Sequence[Example], scorer: RowScorer, config: TPOConfig) -> Batch:
    return with_sft_divisor(batch, place=2) if config.needs_sft_divisor else batch


def _prepare_dpo(batch: Batch, examples: Sequence[Example], scorer: RowScorer, config: DPOConfig) -> Batch:
    batch = _prepare_pairs(batch, examples, scorer, config)
    if config.loss in ("aot", "aot_unpaired"):
        policy = scorer([row for example in examples for row in example.rows])
        reference = batch["ref_log_probs_sum"] if config.needs_reference else torch.zeros_like(policy)
        batch = batch.with_columns(aot_partner=aot_partners(policy, reference, paired=config.loss == "aot"))
    return batch


def _prepare_kto(batch: Batch, examples: Sequence[Example], scorer: RowScorer, config: KTOConfig) -> Batch:
    if config.needs_partners:
        policy = scorer([example.partner for example in examples if example.partner is not None])
        return with_kl_baseline(batch, kl_baseline(policy, batch[PARTNER + "ref_log_probs_sum"]))
    if config.loss == "apo_zero":
        return batch
    log_ratio = scorer([example.rows[0] for example in examples]) - batch["ref_log_probs_sum"]
    if config.needs_kl_baseline:
        return with_kl_baseline(batch, opposite_baselines(log_ratio, batch["desirable"].bool()))
    shift = torch.full((batch.rows,), bco_shift(log_ratio, config.beta))
    return batch.with_columns(reward_shift=shift)


def _prepare_distill(batch: Batch, examples: Sequence[Example], scorer: RowScorer, config: DistillConfig) -> Batch:
    return replace(batch, temperature=config.temperature)


METHODS: Mapping[str, Method] = {
    "dpo": Method(
        encode=preference_examples,
        function=dpo,
        config=DPOConfig,
        needs_reference=lambda config: config.needs_reference,
        prepare=_prepare_dpo,
        learning_rate=5e-7,  # Tunstall et al. 2023 (Zephyr), OpenRLHF
    ),
    "kto": Method(
        encode=unpaired_examples,
        function=kto,
        config=KTOConfig,
        needs_reference=lambda config: True,
        needs_partners=lambda config: config.needs_partners,
        prepare=_prepare_kto,
        learning_rate=1e-6,  # TRL KTOConfig
    ),
    "simpo": Method(
        encode=preference_examples,
        function=simpo,
        config=SimPOConfig,
        prepare=_prepare_pairs,
        learning_rate=1e-6,  # Meng et al. 2024 (3e-7 to 1e-6)
    ),
    "cpo": Method(
        encode=preference_examples,
        function=cpo,
        config=CPOConfig,
        prepare=_prepare_pairs,
        learning_rate=1e-6,  # TRL CPOConfig
    ),
    "tpo": Method(
        encode=triple_examples,
        function=tpo,
        config=TPOConfig,
        prepare=_prepare_triples,
        learning_rate=1e-6,
    ),
    "orpo": Method(
        encode=preference_examples,
        function=orpo,
        config=ORPOConfig,
        prepare=_prepare_pairs,
        learning_rate=8e-6,  # Hong et al. 2024
    ),
    "sft": Method(
        encode=supervised_examples,
        function=sft,
        config=SFTConfig,
        learning_rate=2e-5,  # TRL SFTConfig; Alpaca
    ),
    "rm": Method(
        encode=preference_examples,
        function=bradley_terry,
        config=BradleyTerryConfig,
        role="reward",
        outputs=("scores",),
        learning_rate=9e-6,  # OpenRLHF train_rm
        best_metric="accuracy",
    ),
    "prm": Method(
        encode=step_examples,
        function=process_reward_loss,
        config=ProcessRewardLossConfig,
        role="reward",
        outputs=("values",),
        learning_rate=1e-6,  # OpenRLHF train_prm
        best_metric="step_accuracy",
    ),
    "distill": Method(
        encode=supervised_examples,
        function=distill,
        config=DistillConfig,
        teacher=lambda config: config.teacher,
        prepare=_prepare_distill,
        learning_rate=2e-5,  # TRL GKDConfig, which is SFTConfig's
    ),
}
"""Name to method."""


def find_method(name: str) -> Method:
    """The method of that name, or a user's own at `module:attribute`.

    Raises:
        ConfigError: there is none.
        PluginError: the user's own cannot be imported.
    """
    if ":" in name:
        found = load_object(name, what="method")
        if not isinstance(found, Method):
            raise ConfigError(f"method {name!r} is a {type(found).__name__}; write a rlhf_algos.Method")
        return found
    if name not in METHODS:
        raise ConfigError(
            f"method {name!r} is unknown; {did_you_mean(name, METHODS)}write one of {', '.join(sorted(METHODS))}, "
            "or module:attribute"
        )
    return METHODS[name]


def with_own_loss(method: Method, path: str) -> Method:
    """The method with the loss function at `module:function` in place of its own; rows and model stay the method's.

    The function is `(outputs, batch, config) -> LossTerms`. Its config is the dataclass that annotates its third
    parameter, else the mapping of the configuration as it is. A config derived from the method's own keeps what the
    method does with it; any other one may have attributes `outputs`, `needs_reference` and `role`.

    Raises:
        PluginError: it cannot be imported.
        ConfigError: it is no function.
    """
    function, own = load_own_function(
        path, what="algorithm.loss_function", parameters=("outputs", "batch", "config")
    )
    kind = own or dict
    outputs = tuple(getattr(function, "outputs", method.outputs))
    if issubclass(kind, method.config):
        return replace(method, function=function, config=kind, outputs=outputs)
    return Method(
        encode=method.encode,
        learning_rate=method.learning_rate,
        function=function,
        config=kind,
        role=method.role,
        outputs=outputs,
        needs_reference=lambda config: bool(getattr(config, "needs_reference", False)),
    )


def with_partners(
    examples: Sequence[Example], order: Sequence[int], *, group: int, max_length: int
) -> list[Example]:
    """Give each example the response of the one before it in `order`, within groups of `group`.

    With the groups being the batches this is TRL's mismatching; a partner is fixed for the whole run, so its
    reference log-probs are computed only once. Examples of a last group of one get their own response, whose KL
    estimate is then the example's own.
    """
    result = list(examples)
    for start in range(0, len(order), group):
        members = order[start : start + group]
        for place, member in enumerate(members):
            own, other = examples[member].rows[0], examples[members[place - 1]].rows[0]
            tokens = (own.token_ids[: own.prompt_length] + other.token_ids[other.prompt_length :])[:max_length]
            mask = (False,) * own.prompt_length + other.response_mask[other.prompt_length :]
            partner = TokenRow(token_ids=tokens, response_mask=mask[:max_length], images=own.images)
            result[member] = replace(examples[member], partner=partner)
    return result
