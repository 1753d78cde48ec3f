"""What the checks of a training engine stand on: fixtures, rows, losses, and a plain forward pass."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rlhf_core.data.batch import Batch, pad_rows
from rlhf_core.interfaces.engine_config import EngineConfig, OptimizerConfig, Role
from rlhf_core.interfaces.loss import LossTerms, ModelOutputs, mean_of
from rlhf_core.interfaces.training import TrainEngine
from rlhf_core.model.log_probs import entropy_from_logits, log_probs_from_logits
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_core.weight_sync.receive import receive_weights
from rlhf_core.weight_sync.send import send_weights
from rlhf_core.weight_sync.source import WeightSource
from rlhf_core.weight_sync.transports.transport import join_link, open_sender

SMOOTH = OptimizerConfig(learning_rate=0.3, eps=1.0, max_grad_norm=0.0)
"""With a large eps Adam's step is nearly proportional to the gradient, so rounding is not blown up to its sign."""


class EngineGround:
    """Class attributes adapt the checks to the engine under test."""

    vocab_size: ClassVar[int] = 512
    tolerance: ClassVar[float] = 1e-4
    """Largest difference allowed between a log-prob and that of the reference forward pass."""
    settings: ClassVar[dict[str, Any]] = {}
    """Fields of EngineConfig for every engine that the checks build; what a check sets itself goes before them."""

    # ------------------------------------------------------------ fixtures

    @pytest.fixture(scope="class")
    @classmethod
    def engine_factory(cls) -> Callable[[EngineConfig], TrainEngine]:
        """Override: return the engine's class, or a function from its config to a ready engine."""
        raise TypeError(f"{cls.__name__} must override the fixture engine_factory")

    @pytest.fixture(scope="class")
    @classmethod
    def model_path(cls, tmp_path_factory: pytest.TempPathFactory) -> str:
        """A tiny random causal Qwen2."""
        return save_tiny_model(tmp_path_factory.mktemp("policy"), vocab_size=cls.vocab_size)

    @pytest.fixture(scope="class")
    @classmethod
    def scalar_path(cls, tmp_path_factory: pytest.TempPathFactory) -> str:
        """A tiny random Qwen2 with a scalar head."""
        return save_tiny_model(tmp_path_factory.mktemp("scalar"), head="scalar", vocab_size=cls.vocab_size)

    @pytest.fixture
    def make(
        self, engine_factory: Callable[[EngineConfig], TrainEngine], model_path: str, scalar_path: str
    ) -> Iterator[Callable[..., TrainEngine]]:
        """`make(**fields_of_EngineConfig)` starts an engine; at the end each is closed twice."""
        engines: list[TrainEngine] = []

        def start(role: Role = "policy", **fields: Any) -> TrainEngine:
            engines.append(engine_factory(self.engine_config(model_path, scalar_path, role, **fields)))
            return engines[-1]

        yield start
        for engine in engines:
            engine.close()
            engine.close()

    # ------------------------------------------------------------ tools of the checks

    def engine_config(
        self, model_path: str, scalar_path: str, role: Role = "policy", **fields: Any
    ) -> EngineConfig:
        """The configuration of an engine of this role, with `settings` and the fields that a check sets."""
        path = model_path if role in ("policy", "reference") else scalar_path
        options = {**self.settings.get("options", {}), **fields.pop("options", {})}
        return EngineConfig(**{**self.settings, "model": path, "role": role, "options": options, **fields})


def rows(seed: int = 0, *, lengths: Sequence[int] = (9, 14, 5, 12, 7, 10), vocab_size: int = 512) -> Batch:
    """Random rows of unequal length whose last two thirds count; their names are `row-0`, `row-1`, ..."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(5, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return Batch(
        token_ids=pad_rows(ids, value=0, dtype=torch.long),
        attention_mask=pad_rows([[True] * n for n in lengths], value=False, dtype=torch.bool),
        response_mask=pad_rows([[i >= n // 3 for i in range(n)] for n in lengths], value=False, dtype=torch.bool),
        sample_ids=tuple(f"row-{index}" for index in range(len(lengths))),
    )


def poisoned() -> Batch:
    """`rows()` with the column `poison` set on row 1."""
    batch = rows()
    return batch.with_columns(poison=torch.arange(batch.rows) == 1)


def supervised_loss(outputs: ModelOutputs, batch: Batch, config: Any) -> LossTerms:
    """Negative log-likelihood, mean over the tokens that count."""
    if outputs.log_probs is None:
        raise ValueError("supervised_loss needs the output log_probs")
    nll = -outputs.log_probs.masked_fill(~batch.response_mask, 0)
    return LossTerms(
        total=nll.sum(),
        weight=batch.response_mask.sum().float(),
        metrics={"nll": mean_of(nll, batch.response_mask)},
    )


def faulty_loss(outputs: ModelOutputs, batch: Batch, config: str) -> LossTerms:
    """`supervised_loss` that is NaN (`loss`), or has a NaN gradient (`gradient`), for poisoned rows."""
    terms = supervised_loss(outputs, batch, None)
    if not batch["poison"].any():
        return terms
    # The square root has an infinite slope at 0, which times 0 is NaN in the backward pass alone.
    fault = terms.total * math.nan if config == "loss" else (terms.total * 0).sqrt()
    return replace(terms, total=terms.total + fault)


def forward(model_path: str, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies by a plain Transformers forward pass, row by row; [rows, length], 0 off the mask."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    log_probs, entropy = torch.zeros(batch.token_ids.shape), torch.zeros(batch.token_ids.shape)
    with torch.no_grad():
        for row, length in enumerate(batch.lengths.tolist()):
            ids = batch.token_ids[row, :length]
            logits = model(ids[None]).logits[0, :-1] / batch.temperature
            log_probs[row, 1:length] = log_probs_from_logits(logits, ids[1:])
            entropy[row, 1:length] = entropy_from_logits(logits)
    return log_probs * batch.response_mask, entropy * batch.response_mask


def received_weights(engine: TrainEngine) -> dict[str, Tensor]:
    """The engine's weights as they arrive at the other end of a local link."""
    return received(engine.weights())


def received(source: WeightSource) -> dict[str, Tensor]:
    """What arrives at the other end of a local link."""
    manifest = source.manifest(1, bucket_bytes=32 << 10)
    sender = open_sender("local", receivers=1, timeout_s=60)
    arrived: dict[str, Tensor] = {}

    def load(weights: Any) -> None:
        arrived.update({name: tensor.clone() for name, tensor in weights})

    def receive() -> None:
        # Joining waits for the sender to accept, so it happens on this side.
        receive_weights(manifest, join_link(sender.link, 0), load)

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        sender.accept()
        send_weights(source, manifest, sender)
    finally:
        thread.join(60)
        sender.close()
    return arrived


def gap(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Largest absolute difference between two sets of weights of the same names."""
    if set(left) != set(right):
        raise ValueError(f"weights differ in name: {sorted(set(left) ^ set(right))[:5]}")
    return max(float((left[name].float() - right[name].float()).abs().max()) for name in left)
