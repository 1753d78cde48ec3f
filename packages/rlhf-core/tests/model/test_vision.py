"""Rows with images: our numbers beside the model's own forward pass over what its processor makes."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from rlhf_core import (
    Batch,
    CapabilityError,
    ConfigError,
    EngineConfig,
    RaggedBatch,
    RowImages,
    concatenate,
    image_row,
    load_processor,
    load_role,
    model_outputs,
    try_model,
)
from rlhf_core.model import hidden_states, trial
from rlhf_core.model.vision import Vision
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_core.testing.vision import save_tiny_vision_model
from rlhf_core.training.micro_batches import TokenBudget, cut_batch

pytest.importorskip("torchvision")

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "gemma3", "idefics3")


def picture(seed, size=(56, 84)):
    return np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A tried model in eval mode, its processor, and rows with one image, with none and with two."""
    path = save_tiny_vision_model(tmp_path_factory.mktemp(request.param), request.param)
    model, _ = load_role(EngineConfig(model=path, images=True), extra="")
    found = try_model(model, "policy")
    assert found.images
    assert found.packing
    assert "run padded" in found.notice
    return model.eval(), load_processor(path), path


def shown(processor):
    """(text, images) of three rows."""
    mark = processor.image_token
    return [
        (f"{mark} what is it?", [picture(0)]),
        ("no image at all, but a longer text", []),
        (f"left {mark} right {mark}!", [picture(1, (84, 56)), picture(2)]),
    ]


def rows_of(processor):
    parts = []
    for text, images in shown(processor):
        ids, seen = image_row(processor, text, images) if images else (processor.tokenizer(text)["input_ids"], None)
        ids = torch.tensor([ids + processor.tokenizer("an answer")["input_ids"]])
        mask = torch.ones_like(ids).bool()
        counted = torch.zeros_like(mask)
        counted[:, -9:] = True
        parts.append(
            Batch(token_ids=ids, attention_mask=mask, response_mask=counted, images=(seen,) if seen else ())
        )
    return concatenate(parts)


@torch.no_grad()
def own_log_probs(model, processor):
    """By the model's forward pass over the processor's output, a row at a time."""
    found = []
    for text, images in shown(processor):
        inputs = dict(
            processor(text=[text + "an answer"], images=[images] if images else None, return_tensors="pt")
        )
        if images and type(processor).__name__.startswith(("Qwen", "Gemma")):
            assert {"mm_token_type_ids", "token_type_ids"} & set(inputs)
        log_probs = model(**inputs).logits[0, :-1].log_softmax(-1)
        found.append(log_probs.gather(-1, inputs["input_ids"][0, 1:, None])[-9:, 0])
    return torch.stack(found)


def log_probs_of(model, batch):
    found = model_outputs(model, batch, ("log_probs",)).log_probs
    return found[batch.response_mask].view(batch.rows, -1)


def test_log_probs_are_those_of_the_models_own_forward_pass(family):
    model, processor, _ = family
    batch = rows_of(processor)
    expected = own_log_probs(model, processor)
    with torch.no_grad():
        torch.testing.assert_close(log_probs_of(model, batch), expected, atol=1e-5, rtol=0)
        # A row's numbers do not depend on what shares its micro-batch.
        for row in range(3):
            alone = log_probs_of(model, batch.select([row]))
            torch.testing.assert_close(alone[0], expected[row], atol=1e-5, rtol=0)
        swapped = replace(batch, images=(batch.images[0], None, None)).select([0])
        other = replace(swapped, images=(image_row(processor, processor.image_token, [picture(9)])[1],))
        assert (log_probs_of(model, other) - expected[0]).abs().max() > 1e-3


def test_a_micro_batch_of_text_runs_the_encoder_where_other_ranks_may_and_nothing_changes(family, monkeypatch):
    model, processor, path = family
    batch = rows_of(processor).select([1])
    encoder = [p for n, p in model.named_parameters() if "vis" in n]
    expected = log_probs_of(model, batch)
    for module in (hidden_states, trial):
        monkeypatch.setattr(module, "sees_in_every_pass", lambda model: True)
    model.zero_grad()
    found = log_probs_of(model, batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    found.sum().backward()
    # A gradient there is, as on the ranks with images; it is zero.
    some = [p.grad for p in encoder if p.grad is not None]
    assert len(some) > len(encoder) / 2
    assert all(not grad.any() for grad in some)
    model.zero_grad()
    fresh, _ = load_role(EngineConfig(model=path, images=True), extra="")
    again = try_model(fresh, "policy")
    assert not again.packing
    assert "every micro-batch" in again.declined


def test_gradients_do_not_depend_on_micro_batches(family):
    model, processor, _ = family
    batch = rows_of(processor)

    def gradients(parts):
        model.zero_grad()
        for part in parts:
            (-log_probs_of(model, batch.select(part)).sum()).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    whole, single = gradients([[0, 1, 2]]), gradients([[0], [1], [2]])
    assert whole.keys() == single.keys()
    assert any("vis" in name for name in whole)
    for name, gradient in whole.items():
        scale = max(1e-6, float(gradient.abs().max()))
        torch.testing.assert_close(single[name], gradient, atol=2e-4 * scale + 1e-6, rtol=0, msg=name)


def test_rows_with_images_are_cut_by_padded_tokens_and_others_as_ever(family):
    model, processor, _ = family
    batch = rows_of(processor)
    budget = TokenBudget(tokens=int(batch.tokens), counts="packed")
    assert cut_batch(replace(batch, images=()), budget) == [[2, 0, 1]] or len(cut_batch(batch, budget)) == 2
    assert len(cut_batch(batch, budget)) == 2  # padded, all three are more
    assert TokenBudget.of(model, 64).counts == "shared"


def test_a_model_that_was_loaded_for_text_refuses_images(family):
    model, processor, path = family
    batch = rows_of(processor)
    blind, _ = load_role(EngineConfig(model=path), extra="")
    assert type(blind) is type(model)
    assert not try_model(blind, "policy").images
    with pytest.raises(CapabilityError, match=r"EngineConfig\.images"):
        model_outputs(blind, batch, ("log_probs",))


class TestRefusals:
    def test_a_text_model_for_rows_with_images(self, tmp_path):
        path = save_tiny_model(tmp_path, hidden_size=32)
        with pytest.raises(ConfigError, match="no vision-language model"):
            load_role(EngineConfig(model=path, images=True), extra="")

    def test_a_model_without_its_processor(self, tmp_path):
        path = save_tiny_vision_model(tmp_path)
        for name in ("processor_config.json", "preprocessor_config.json"):
            (tmp_path / name).unlink(missing_ok=True)
        with pytest.raises(ConfigError, match="no processor for images"):
            load_role(EngineConfig(model=path, images=True), extra="")

    def test_a_family_whose_numbers_with_images_are_not_its_own(self, tmp_path, monkeypatch):
        model, _ = load_role(EngineConfig(model=save_tiny_vision_model(tmp_path), images=True), extra="")
        vision = Vision.of(model)
        assert vision is not None
        forward = type(model.model).forward

        def blurred(self, input_ids=None, pixel_values=None, **kwargs):
            if pixel_values is not None and len(input_ids) > 1:  # only where rows run together
                pixel_values = pixel_values * 0.5
            return forward(self, input_ids=input_ids, pixel_values=pixel_values, **kwargs)

        monkeypatch.setattr(model.model, "forward", blurred.__get__(model.model))
        with pytest.raises(ConfigError, match="rows with images differ"):
            try_model(model, "policy")

    def test_a_model_that_does_not_look(self, tmp_path, monkeypatch):
        model, _ = load_role(EngineConfig(model=save_tiny_vision_model(tmp_path), images=True), extra="")
        features = type(model.model).get_image_features

        def same(self, pixel_values, *args, **kwargs):
            return features(self, torch.ones_like(pixel_values), *args, **kwargs)

        monkeypatch.setattr(model.model, "get_image_features", same.__get__(model.model))
        with pytest.raises(ConfigError, match="the same of other images"):
            try_model(model, "policy")

    @pytest.mark.parametrize(
        "fields",
        [
            {"role": "critic"},
            {"max_tokens_per_micro_batch": "auto"},
            {"sequence_parallel_size": 2},
            {"max_tokens_per_mlp_tile": 64},
            {"routing_replay": True},
        ],
    )
    def test_settings_that_do_not_go_with_images(self, fields):
        with pytest.raises(ConfigError, match="images"):
            EngineConfig(model="m", images=True, **fields)


class TestBatches:
    def test_rows_take_their_images_along(self):
        one, two = (
            RowImages(tensors={"pixel_values": torch.full((n, 3), float(n))}, token_ids=(9,)) for n in (1, 2)
        )
        ids = torch.arange(12).view(4, 3)
        batch = Batch(
            token_ids=ids,
            attention_mask=ids > -1,
            response_mask=ids > 3,
            rows_per_unit=2,
            images=(one, one, None, None),
        )
        assert batch.select([2, 3]).images == ()
        assert batch.select_units([1, 0]).images == (None, None, one, one)
        assert batch.to("cpu").images == batch.images
        assert concatenate([batch.select([2, 3]), batch]).images == (None, None, *batch.images)
        ragged = RaggedBatch.of(batch)
        assert ragged.select([1, 2]).images == (one, None)
        assert ragged.padded().images == batch.images
        for copied in (pickle.loads(pickle.dumps(one_batch, protocol=5)) for one_batch in (batch, ragged)):
            first, second, *rest = copied.images
            assert first is second
            assert rest == [None, None]
            assert torch.equal(first.tensors["pixel_values"], one.tensors["pixel_values"])
        with pytest.raises(ValueError, match="images of 1 rows for 4 rows"):
            replace(batch, images=(two,))
        with pytest.raises(ValueError, match="images of 1 rows for 4 rows"):
            replace(ragged, images=(two,))
