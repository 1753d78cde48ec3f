"""Offline runs on rows with images: what is learnt, and the numbers beside those computed by hand."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from rlhf_algos import (
    DataSection,
    DataSource,
    LengthSection,
    ModelSection,
    OfflineAlgorithmSection,
    OfflineConfig,
    OfflineTrainSection,
    OptimizerSection,
    read_metrics,
    train,
)
from rlhf_core import ConfigError, DataError, LoraConfig
from rlhf_core.testing.vision import save_tiny_vision_model

pytest.importorskip("torchvision")

MARK = "<|vision_start|><|image_pad|><|vision_end|>"
COLOURS = {"r": (210, 30, 30), "b": (30, 30, 210)}


def colour_file(folder, index: int, name: str) -> str:
    """A noisy picture of one colour."""
    noise = np.random.default_rng(index).integers(-30, 30, (56, 56, 3))
    pixels = np.clip(np.array(COLOURS[name]) + noise, 0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(folder / f"{index}.png")
    return f"{index}.png"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two of one shape."""
    return [save_tiny_vision_model(tmp_path_factory.mktemp("vl"), seed=seed) for seed in range(2)]


@pytest.fixture
def make(tmp_path, models):
    def made(rows, method="sft", *, loss=None, reference=None, **train_fields) -> OfflineConfig:
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        fields = {"batch_size": 8, "optimizer": OptimizerSection(learning_rate=3e-3), **train_fields}
        return OfflineConfig(
            model=ModelSection(path=models[0], reference=reference),
            data=DataSection(train=(DataSource(path=str(data)),)),
            algorithm=OfflineAlgorithmSection(name=method, loss=loss or {}),
            output=tmp_path / "out",
            reference_cache=tmp_path / "references",
            lengths=LengthSection(max_length=128),
            train=OfflineTrainSection(**fields),
            tensorboard=False,
        )

    return made


def coloured(folder, count: int) -> list[dict]:
    names = random.Random(0).choices("rb", k=count)
    return [
        {"prompt": f"{MARK} colour? ", "completion": name, "image": colour_file(folder, index, name)}
        for index, name in enumerate(names)
    ]


@pytest.mark.stack
def test_a_colour_is_learnt_from_the_pixels_and_not_from_the_text(make, tmp_path):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    rows = coloured(tmp_path, 64)
    seeing = make(rows, epochs=8)
    seeing = replace(seeing, data=replace(seeing.data, hold_out=16))
    result = train(seeing)
    # One bit of two tokens is all there is to learn: ln 2 / 2 = 0.35 nats for each without the picture.
    assert result.metrics["eval/loss"] < 0.1
    # The export is a directory that Transformers opens with its processor; it names colours it has not seen.
    model = AutoModelForImageTextToText.from_pretrained(result.model).eval()
    processor = AutoProcessor.from_pretrained(result.model)
    letters = processor.tokenizer.convert_tokens_to_ids(list(COLOURS))
    right = 0
    for index in range(20):
        name = "rb"[index % 2]
        seen = Image.open(tmp_path / colour_file(tmp_path, 1000 + index, name))
        inputs = processor(text=[f"{MARK} colour? "], images=[[seen]], return_tensors="pt")
        with torch.no_grad():
            logits = model(**inputs).logits[0, -1, letters]
        right += "rb"[int(logits.argmax())] == name
    assert right >= 19

    blind = [{"prompt": "colour? ", "completion": row["completion"]} for row in rows]
    blind_run = make(blind, epochs=8)
    blind_run = replace(blind_run, data=replace(blind_run.data, hold_out=16), output=tmp_path / "blind")
    assert train(blind_run).metrics["eval/loss"] > 0.3


def own_log_prob(model, processor, prompt: str, answer: str, image) -> torch.Tensor:
    """Of an answer, by the model's own forward pass over its processor's output."""
    inputs = processor(text=[prompt + answer + "<|im_end|>"], images=[[image]], return_tensors="pt")
    answered = len(processor.tokenizer(answer + "<|im_end|>")["input_ids"])
    log_probs = model(**inputs).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(-1, inputs["input_ids"][0, 1:, None])[-answered:].sum()


@pytest.mark.stack
def test_dpo_is_what_a_hand_computes(make, tmp_path, models):
    from transformers import AutoModelForImageTextToText, AutoProcessor

    rows = [
        {
            "prompt": f"{MARK} {index}? ",
            "chosen": "red" * (1 + index % 2),
            "rejected": "blue",
            "images": [colour_file(tmp_path, index, "rb"[index % 2])],
        }
        for index in range(4)
    ]
    config = make(rows, "dpo", loss={"beta": 0.2}, reference=models[1], batch_size=4, steps=1)
    train(config)
    (found,) = read_metrics(config.output / "metrics.jsonl")
    policy, reference = (AutoModelForImageTextToText.from_pretrained(path).eval() for path in models)
    processor = AutoProcessor.from_pretrained(models[0])
    losses = []
    for row in rows:
        image = Image.open(tmp_path / row["images"][0])
        gains = []
        for answer in (row["chosen"], row["rejected"]):
            own, other = (
                own_log_prob(model, processor, row["prompt"], answer, image) for model in (policy, reference)
            )
            gains.append(own - other)
        losses.append(-torch.nn.functional.logsigmoid(0.2 * (gains[0] - gains[1])))
    torch.stack(losses).mean().backward()
    assert found["loss"] == pytest.approx(float(torch.stack(losses).mean()), abs=1e-5)
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    assert found["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert any(p.grad is not None and p.grad.any() for n, p in policy.named_parameters() if "visual" in n)


@pytest.mark.stack
def test_micro_batches_and_rows_of_text_between_change_nothing(make, tmp_path):
    rows = coloured(tmp_path, 12)
    rows[3::4] = [{"prompt": "no picture here: ", "completion": "fine"} for _ in rows[3::4]]
    found = []
    for number, most in enumerate((16384, 1)):
        config = make(rows, batch_size=6, steps=2, max_tokens_per_micro_batch=most)
        train(replace(config, output=tmp_path / f"out-{number}"))
        found.append(read_metrics(tmp_path / f"out-{number}" / "metrics.jsonl"))
    for whole, single in zip(*found, strict=True):
        assert single["loss"] == pytest.approx(whole["loss"], abs=1e-5)
        assert single["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)


@pytest.mark.stack
def test_kto_scores_partners_with_the_images_of_their_prompt(make, tmp_path, models):
    rows = [{**row, "label": index % 2 == 0} for index, row in enumerate(coloured(tmp_path, 8))]
    config = make(rows, "kto", reference=models[1], batch_size=4, steps=2)
    train(config)
    for found in read_metrics(config.output / "metrics.jsonl"):
        # Without its images a partner would have places for them and nothing to put there: the model refuses that.
        assert found["kl_baseline"] >= 0
        assert found["grad_norm"] > 0


@pytest.mark.stack
def test_adapters_of_the_language_model_train_and_leave_the_encoder_alone(make, tmp_path, models):
    from safetensors.torch import load_file

    pytest.importorskip("peft")
    config = make(coloured(tmp_path, 8), steps=2)
    lora = LoraConfig(rank=4, target_modules=r".*language_model.*\.(q_proj|v_proj)")
    result = train(replace(config, model=replace(config.model, lora=lora)))
    before, after = (load_file(f"{path}/model.safetensors") for path in (models[0], result.model))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.endswith(("q_proj.weight", "v_proj.weight")) and "visual" not in name for name in changed)


class TestRefusals:
    def test_a_damaged_image_is_named_before_a_model_is_loaded(self, make, tmp_path, monkeypatch):
        rows = coloured(tmp_path, 3)
        (tmp_path / "1.png").write_bytes(b"no image")
        monkeypatch.setattr("rlhf_algos.torch_engine.engine.load_model", None)
        with pytest.raises(DataError, match=r"rows\.jsonl row 2, image 1 cannot be decoded"):
            train(make(rows))

    def test_images_for_a_reward_model_and_a_teacher(self, make, tmp_path, models):
        rows = [{**row, "chosen": "a", "rejected": "b"} for row in coloured(tmp_path, 4)]
        with pytest.raises(ConfigError, match="policy or a reference"):
            train(make(rows, "rm"))
        with pytest.raises(ConfigError, match="teacher"):
            train(make(rows, "distill", loss={"teacher": models[1]}))
