"""What runs of our modules with tensors that claim to be on a GPU, module by module, with the CPU's numbers.

A CPU's tensor that meets a GPU's is an error there as it is on a GPU. docs/gpu.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import rlhf_algos
import torch
from claimed_cuda import FakeTensorDeviceMismatchError, claiming_cuda, on_cuda
from family_models import tiny_model
from family_verdicts import rows
from gpu_report import table
from rlhf_algos.testing import sample_batch
from rlhf_core import EngineConfig, FittedBudget, Loss, ModelOutputs, OneRank, model_outputs
from rlhf_core.testing.engine_ground import supervised_loss
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
Found = dict[str, Tensor]
Run = Callable[[Any, str], Found]
"""A module and a device to results by name."""
linear_head: Any = import_module("rlhf_core.model.linear_head")
log_probs: Any = import_module("rlhf_core.model.log_probs")


def batches(module: Any, device: str) -> Found:
    batch = rows().to(device)
    joined = module.concatenate([batch.select([2, 0]), batch])
    mean = module.masked_mean(joined.token_ids.float(), joined.response_mask)
    return {"ids": joined.token_ids, "mean": mean}


def packing(module: Any, device: str) -> Found:
    packed = module.pack(rows().to(device))
    return {"ids": packed.token_ids, "positions": packed.position_ids, "places": packed.places}


def states(device: str) -> tuple[Any, list[Tensor]]:
    """The layout of packed rows, and random queries, keys and values of its tokens."""
    layout = import_module("rlhf_core.model.packing").pack(rows()).layout
    random = torch.Generator().manual_seed(0)
    shape = (layout.segments[-1].stop, 16)
    return layout, [torch.randn(1, heads, *shape, generator=random).to(device) for heads in (4, 2, 2)]


def segments(module: Any, device: str) -> Found:
    found = {}
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]).to(device)
    for name, given in {
        "plain": {},
        "window": {"window": 3},
        "cap": {"soft_cap": 0.7},
        "sinks": {"sinks": sinks},
    }.items():
        layout, parts = states(device)
        found[name] = module.sdpa_segments(*parts, layout, module.AttentionTerms(scale=0.3, **given))
    return found


def varlen(module: Any, device: str) -> Found:
    """The kernel itself is a stand-in: what goes into it is ours."""
    layout, parts = states(device)
    terms = import_module("rlhf_core.model.attention.segments").AttentionTerms(scale=0.3)
    kept: list[Tensor] = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        kept.extend([key, value, rest[0], rest[1]])
        return query + key.sum() + value.sum() + rest[0].sum() + rest[1].sum()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "varlen_function", lambda: kernel)
        output = module.varlen_segments(*parts, layout, terms)
    return {"output": output, **{f"given {place}": tensor for place, tensor in enumerate(kept)}}


def heads(module: Any, device: str) -> Found:
    random = torch.Generator().manual_seed(0)
    weight, hidden = (torch.randn(shape, generator=random) for shape in ((97, 32), (40, 32)))
    head = torch.nn.Linear(32, 97, bias=False)
    head.weight = torch.nn.Parameter(weight)
    head = on_cuda(head) if device == "cuda" else head
    hidden, targets = hidden.to(device), (torch.arange(40) % 97).to(device)
    log_probs, entropy = module.chunked_log_probs(hidden, head, targets, with_entropy=True, chunk=16)
    top, ids = module.chunked_top_k(hidden, head, 3, chunk=16)
    picked = module.chunked_candidate_log_probs(hidden, head, ids, chunk=16)
    collision = module.chunked_log_collision(hidden, head, chunk=16)
    return {"log_probs": log_probs, "entropy": entropy, "top": top, "picked": picked, "collision": collision}


FAMILIES = ("qwen2", "gemma2", "minicpm3")


def models(device: str) -> list[Any]:
    """Families with windows, soft caps and compressed keys."""
    made = [tiny_model(family) for family in FAMILIES]
    return [on_cuda(model) if device == "cuda" else model for model in made]


def forward(module: Any, device: str) -> Found:
    found = {}
    packed = import_module("rlhf_core.model.attention.packed").register("sdpa")
    for family, model in zip(FAMILIES, models(device), strict=True):
        for attention in ("eager", packed):
            model.set_attn_implementation(attention)
            outputs = module.model_outputs(model, rows().to(device), ("log_probs", "entropy"))
            found |= {f"{family}, {attention}": outputs.log_probs, f"{family}, {attention}, H": outputs.entropy}
    return found


def trial(module: Any, device: str) -> Found:
    model = tiny_model("qwen2")
    model = on_cuda(model) if device == "cuda" else model
    module.try_model(model, "policy", packing=False)
    return {"log_probs": model_outputs(model, rows().to(device), ("log_probs",)).log_probs}


def accumulation(module: Any, device: str) -> Found:
    """All but the backward pass, over several micro-batches."""
    model = tiny_model("qwen2")
    model = on_cuda(model) if device == "cuda" else model
    totals: list[Tensor] = []
    done = module.accumulate(
        rows().to(device),
        Loss(function=supervised_loss),
        forward=partial(model_outputs, model),
        backward=lambda total, last: totals.append(total),
        max_tokens=24,
    )
    scored = module.score_in_micro_batches(
        rows().to(device), ("log_probs",), forward=partial(model_outputs, model), max_tokens=24
    )
    assert scored.log_probs.device.type == "cpu", "scores are handed out on the CPU"
    found = {f"part {place}": total for place, total in enumerate(totals)}
    return found | {"loss": torch.tensor(done.loss).to(device), "scores": scored.log_probs.to(device)}


LOSSES: dict[str, list[Loss]] = {}
for _name in rlhf_algos.POLICY_LOSSES:
    _loss = rlhf_algos.make_policy_loss(_name, {})
    LOSSES.setdefault(_loss.function.__module__, []).append(_loss)
for _function, _config in (
    (rlhf_algos.sft, rlhf_algos.SFTConfig()),
    (rlhf_algos.dpo, rlhf_algos.DPOConfig()),
    (rlhf_algos.simpo, rlhf_algos.SimPOConfig()),
    (rlhf_algos.cpo, rlhf_algos.CPOConfig()),
    (rlhf_algos.orpo, rlhf_algos.ORPOConfig()),
    (rlhf_algos.kto, rlhf_algos.KTOConfig()),
    (rlhf_algos.bradley_terry, rlhf_algos.BradleyTerryConfig()),
    (rlhf_algos.value_clip, rlhf_algos.ValueClipConfig()),
):
    LOSSES.setdefault(_function.__module__, []).append(Loss(function=_function, config=_config))


def losses(module: Any, device: str) -> Found:
    found = {}
    for loss in LOSSES[module.__name__]:
        batch, outputs = sample_batch(rows_per_unit=2)
        batch = rlhf_algos.with_sft_divisor(batch)
        if isinstance(loss.config, rlhf_algos.KLCovConfig | rlhf_algos.ClipCovConfig):
            batch = loss.config.add_columns(batch)
        known = {field.name for field in fields(ModelOutputs)}
        given = ModelOutputs(**{name: value.to(device) for name, value in outputs.items() if name in known})
        terms = loss.function(given, batch.to(device), loss.config)
        name = f"{loss.function.__name__} {type(loss.config).__name__}"
        # Counts without dimensions may stay on the CPU.
        found |= {f"{name} total": terms.total, f"{name} weight": terms.weight.to(device)}
    return found


CASES: dict[str, tuple[str, Run]] = {
    "rlhf_core.data.batch": ("moving, selecting, joining, masked means", batches),
    "rlhf_core.model.packing": ("packed rows and their places", packing),
    "rlhf_core.model.attention.segments": ("attention: plain, window, soft cap, sinks", segments),
    "rlhf_core.model.attention.cuda": ("what goes into the flash-attention kernel, with a stand-in for it", varlen),
    "rlhf_core.model.log_probs": (
        "linear head in chunks: log-probs, entropies, top k, candidates, collision",
        heads,
    ),
    "rlhf_core.model.forward": (f"outputs of {', '.join(FAMILIES)}, padded and packed", forward),
    "rlhf_core.model.trial": ("the trial of a model on padded rows", trial),
    "rlhf_core.training.accumulation": ("forward and loss over micro-batches; scores", accumulation),
    **{
        module: (", ".join(dict.fromkeys(loss.function.__name__ for loss in found)), losses)
        for module, found in sorted(LOSSES.items())
    },
}


@pytest.mark.parametrize("name", CASES)
def test_the_module_runs_with_tensors_on_a_gpu(name: str) -> None:
    module, run = import_module(name), CASES[name][1]
    with torch.no_grad():
        expected = run(module, "cpu")
    with claiming_cuda() as claiming, sdpa_kernel(SDPBackend.MATH):
        found = run(module, "cuda")
        assert {key: value.device.type for key, value in found.items()} == dict.fromkeys(expected, "cuda")
        numbers = {key: value.cpu() for key, value in found.items()}
    assert claiming.operations > 3
    for key, value in expected.items():
        torch.testing.assert_close(
            numbers[key], value, atol=2e-5, rtol=1e-4, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_a_tensor_on_the_wrong_device_is_an_error() -> None:
    with claiming_cuda():
        there, here = torch.ones(3).to("cuda"), torch.ones(3)
        assert there.is_cuda
        for meet in (lambda: there + here, lambda: torch.cat([there, here]), lambda: there.where(here > 0, there)):
            with pytest.raises(FakeTensorDeviceMismatchError):
                meet()
        with pytest.raises(FakeTensorDeviceMismatchError):
            there.masked_select(here > 0)
        batch = rows()
        with pytest.raises(FakeTensorDeviceMismatchError):
            batch.to("cuda").with_columns(late=torch.ones(4, 17))["late"] * batch.to("cuda").token_ids


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each chunk of a head, as they are run."""
    sizes: list[int] = []
    log_softmax: Any = linear_head._log_softmax

    def watched(hidden: Tensor, *rest: Any) -> Tensor:
        sizes.append(len(hidden))
        return log_softmax(hidden, *rest)

    monkeypatch.setattr(linear_head, "_log_softmax", watched)
    return sizes


def test_chunks_of_the_head_are_large_on_a_gpu(chunks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With limits a hundred times smaller, and a vocabulary to match."""
    monkeypatch.setitem(log_probs._CHUNK_ELEMENTS, "cuda", (5 << 26) // 100)
    monkeypatch.setattr(log_probs, "_ON_HOSTS", (1 << 24) // 100)
    vocabulary, hidden = 1519, torch.randn(5000, 4)
    targets = torch.arange(5000) % vocabulary
    head = torch.nn.Linear(4, vocabulary, bias=False)
    with torch.no_grad():
        expected, _ = log_probs.chunked_log_probs(hidden, head, targets)
    assert set(chunks[:-1]) == {110}
    chunks.clear()
    with claiming_cuda():
        found, _ = log_probs.chunked_log_probs(hidden.to("cuda"), on_cuda(head), targets.to("cuda"))
        assert chunks == [2208, 2208, 584]
        torch.testing.assert_close(found.cpu(), expected)


class GpuMeter:
    """A GPU on which a pass takes 1 MiB, and 10 KiB for each token."""

    device, place, size = torch.device("cuda"), "there", 80 << 30

    def free(self) -> int:
        return 40 << 30

    def peak(self, run: Callable[[], None]) -> int:
        run()
        return (1 << 20) + 10240 * self.tokens

    def give_back(self) -> None:
        pass

    tokens = 0


def test_a_trial_on_a_gpu_runs_small_chunks_and_adds_what_a_full_one_takes(chunks: list[int]) -> None:
    model, meter = tiny_model("qwen2"), GpuMeter()
    config = EngineConfig(model="m", max_tokens_per_micro_batch="auto", longest_row=400)
    budget = FittedBudget(config, OneRank(), meter, to_come=lambda: 0)  # type: ignore[arg-type]

    def forward(batch: Any, outputs: Any) -> ModelOutputs:
        meter.tokens = batch.tokens
        return model_outputs(model, batch, outputs)

    with claiming_cuda():
        model.set_attn_implementation("eager")
        on_cuda(model)
        budget.for_scores(model, rows(), ("log_probs",), forward)
    vocabulary = model.config.vocab_size
    assert max(chunks) == 128
    assert budget.found["score"].per_token == 10240
    full = log_probs.head_chunk(vocabulary, "cuda")
    assert budget.found["score"].fixed == (1 << 20) + log_probs.chunk_bytes(vocabulary, full - 128)


def test_the_table_in_the_docs_is_fresh() -> None:
    expected = table(("module", "what runs"), [(f"`{name}`", what) for name, (what, _) in CASES.items()])
    assert expected in PAGE.read_text(), f"docs/gpu.md should have this table:\n{expected}"
