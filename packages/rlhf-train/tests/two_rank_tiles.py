"""Checks for two_ranks.py: MLPs over tiles, and rows shared by ranks, against one process that has neither."""

from __future__ import annotations

from typing import Any

import torch
from rlhf_core import Batch, LoraConfig, Loss, accumulate, model_outputs
from rlhf_core.testing.engine_ground import gap, rows, supervised_loss
from rlhf_train import DeepSpeedEngine, engine
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from two_rank_features import VALUE, half, samples, weights_of

NLL = Loss(function=supervised_loss)
TILE = 7
FROZEN = ["model.embed_tokens.*", "model.layers.0.self_attn.*", "model.layers.0.*layernorm.*"]


class GradientsOf:
    """A context that keeps the whole gradients of an engine's steps, by parameter, as the optimizer finds them."""

    def __enter__(self) -> list[dict[str, torch.Tensor]]:
        from deepspeed.utils import safe_get_full_grad

        found: list[dict[str, torch.Tensor]] = []
        self._before: Any = engine.update_weights

        def watched(wrapped: Any, module: Any, **given: Any) -> Any:
            named = dict(module.model.named_parameters())
            grads = {name: safe_get_full_grad(one) for name, one in named.items() if one.requires_grad}
            found.append({name: one.float().clone() for name, one in grads.items() if one is not None})
            return self._before(wrapped, module, **given)

        engine.update_weights = watched
        return found

    def __exit__(self, *error: object) -> None:
        engine.update_weights = self._before


def relative(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm, of all tensors together."""
    assert found.keys() == expected.keys()
    squares = [
        (float((found[n] - expected[n]).square().sum()), float(expected[n].square().sum())) for n in expected
    ]
    apart, whole = (sum(column) for column in zip(*squares, strict=True))
    return (apart / whole) ** 0.5


def plain_model(path: Any, role: str) -> Any:
    """An ordinary model in eval mode, its head as a critic starts with."""
    if role in ("policy", "reference"):
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, num_labels=1)
    return model.eval()


def plain_gradients(model: Any, batch: Batch, loss: Loss) -> dict[str, torch.Tensor]:
    """Of the loss of all rows at once."""
    accumulate(
        batch,
        loss,
        forward=lambda piece, fields: model_outputs(model, piece, fields),
        backward=lambda total, last: total.backward(),
        max_tokens=1 << 20,
    )
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def uneven(step: int = 0) -> Batch:
    """Eight rows of which the first half is far longer: one rank has many tiles where the other has few."""
    return rows(step, lengths=(70, 50, 90, 31, 4, 5, 4, 6))


class TileChecks:
    """See FeatureChecks."""

    work: Any
    rank: int
    start: Any

    def tiled_mlps(self) -> dict[str, Any]:
        """Gradients, norms and scores of tiled engines beside one process that runs everything whole."""
        found = {}
        sharing: dict[str, Any] = {"sequence_parallel_size": 2}
        for name, role, fields in (
            ("0", "policy", {"options": {"stage": 0}}),
            ("2", "policy", {"options": {"stage": 2}}),
            ("3", "policy", {"options": {"stage": 3}}),
            ("3-cut", "policy", {"options": {"stage": 3}, "max_tokens_per_micro_batch": 60}),
            ("3-offloaded", "policy", {"options": {"stage": 3, "offload_parameters": True}}),
            ("3-checkpointing", "policy", {"options": {"stage": 3}, "gradient_checkpointing": True}),
            ("2-sequence", "policy", {"options": {"stage": 2}, **sharing}),
            ("3-sequence", "policy", {"options": {"stage": 3}, **sharing}),
            (
                "3-sequence-checkpointing",
                "policy",
                {"options": {"stage": 3}, "gradient_checkpointing": True, **sharing},
            ),
            ("0-critic", "critic", {"options": {"stage": 0}}),
            ("3-critic", "critic", {"options": {"stage": 3}}),
            ("3-critic-sequence", "critic", {"options": {"stage": 3}, **sharing}),
        ):
            # A head that was trained: a fresh one is zero, and so are the gradients below it.
            kind, loss = ("untied", NLL) if role == "policy" else ("scalar", VALUE)
            outputs = ("log_probs",) if role == "policy" else ("values",)
            batch, plain = uneven(), plain_model(self.work / kind, role)
            with torch.no_grad():
                outside = getattr(model_outputs(plain, half(batch, self.rank), outputs), outputs[0])
            expected = plain_gradients(plain, batch, loss)
            started = self.start(kind, role=role, max_tokens_per_mlp_tile=TILE, **fields)
            scored = getattr(started.score(half(batch, self.rank), outputs), outputs[0])
            with GradientsOf() as gradients:
                report = started.step(half(batch, self.rank), loss)
            again = started.step(half(uneven(1), self.rank), loss)
            norm = float(sum(one.square().sum() for one in expected.values()) ** 0.5)
            found[name] = {
                "gradients": relative(gradients[0], expected),
                "norm": abs(report.grad_norm - norm) / norm,
                "scores": float((scored - outside).norm() / outside.norm()),
                "packing": started.packing,
                "goes_on": not again.skipped,
            }
            started.close()
        return found

    def tiled_mlps_in_part(self) -> dict[str, Any]:
        """With adapters and with frozen layers: three steps beside an engine that is the same but for the tiles."""
        found = {}
        for name, fields in {
            "0-lora": {"options": {"stage": 0}, "lora": LoraConfig(rank=4)},
            "3-lora": {"options": {"stage": 3}, "lora": LoraConfig(rank=4)},
            "3-lora-mlp": {"options": {"stage": 3}, "lora": _of_mlps()},
            "3-lora-mlp-checkpointing": {
                "options": {"stage": 3},
                "lora": _of_mlps(),
                "gradient_checkpointing": True,
            },
            "2-frozen": {"options": {"stage": 2, "freeze": FROZEN}},
            "3-frozen": {"options": {"stage": 3, "freeze": FROZEN}},
        }.items():
            runs: list[dict[str, torch.Tensor]] = []
            for tile in (None, TILE):
                started: DeepSpeedEngine = self.start("untied", max_tokens_per_mlp_tile=tile, **fields)
                before = weights_of(started)
                for step in range(3):
                    started.step(half(uneven(step), self.rank), NLL)
                runs.append(weights_of(started))
                started.close()
            first = [name for name in before if name.startswith("model.layers.0.mlp.")]
            found[name] = {
                "gap": gap(runs[1], runs[0]),
                "moved": min(float((runs[1][one] - before[one]).abs().max()) for one in first),
            }
        return found

    def tiled_frozen_roles(self) -> dict[str, Any]:
        """Scores of references and reward models, sharded or not, on rows of their own or shared ones."""
        found = {}
        for role, kind, output in (("reference", "untied", "log_probs"), ("reward", "scalar", "scores")):
            plain = plain_model(self.work / kind, role)
            mine = half(samples(), self.rank)
            with torch.no_grad():
                expected = getattr(model_outputs(plain, mine, (output,)), output)
            for stage in (0, 3):
                for size in (1, 2):
                    started = self.start(
                        kind,
                        role=role,
                        optimizer=None,
                        max_tokens_per_mlp_tile=TILE,
                        sequence_parallel_size=size,
                        options={"stage": stage},
                    )
                    scored = getattr(started.score(mine, (output,)), output)
                    found[f"{role}-{stage}-{size}"] = float((scored - expected).norm() / expected.norm())
                    started.close()
        return found


def _of_mlps() -> LoraConfig:
    """Adapters of MLPs alone: no input of the first one has a gradient."""
    return LoraConfig(rank=4, target_modules=("gate_proj", "up_proj", "down_proj"))
