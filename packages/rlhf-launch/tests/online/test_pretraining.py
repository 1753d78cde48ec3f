"""Text that a policy learns beside its samples: whole runs in this process, with the torch engine."""

import json

import pytest
import torch
import yaml
from rlhf_algos import (
    LengthSection,
    OfflineConfig,
    SFTConfig,
    TorchEngine,
    from_mapping,
    load_config,
    make_recipe,
    mix_pretraining,
    policy_weight,
    sft,
)
from rlhf_algos import train as train_offline
from rlhf_core import Batch, ConfigError, DataError, EngineConfig, Loss, OptimizerConfig, RaggedBatch
from rlhf_launch.bundles.bundle import read_bundle
from rlhf_launch.config.data import OnlineDataSection
from rlhf_launch.config.generate import GenerateConfig, ignored_by_generation
from rlhf_launch.online.run import train
from rlhf_launch.replay.rerun import replay_step
from rlhf_launch.samples.pretraining import PretrainingStream, PretrainingText, load_pretraining, text_rows
from transformers import AutoTokenizer

TEXTS = [f"{mark * 6}{other * 4}" for mark in "!?.,;:-" for other in "#*+"]


@pytest.fixture(scope="module")
def knowing(folder, tmp_path_factory):
    """A folder with a policy that knows a text, and the text."""
    inside = tmp_path_factory.mktemp("knowing")
    (inside / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    settings = {
        "model": str(folder / "policy"),
        "data": {"train": str(inside / "text.jsonl")},
        "algorithm": "sft",
        "train": {"batch_size": len(TEXTS), "epochs": 40, "optimizer": {"learning_rate": 3e-3}},
        "placement": {"device": "cpu"},
        "tensorboard": False,
        "output": str(inside / "sft"),
    }
    train_offline(from_mapping(OfflineConfig, settings, source="test"))
    return inside


def text_loss(model, folder):
    """Mean negative log-likelihood of the text's tokens."""
    data = from_mapping(OnlineDataSection, {"train": "none", "pretrain": str(folder / "text.jsonl")}, source="test")
    text = load_pretraining(data, AutoTokenizer.from_pretrained(model), LengthSection(), max_length=40)
    batch = text_rows(text.examples).padded()
    engine = TorchEngine(EngineConfig(model=str(model), role="reference", dtype="float32", device="cpu"))
    terms = Loss(function=sft, config=SFTConfig())(engine.score(batch, ("log_probs",)), batch)
    engine.close()
    return float(terms.total / terms.weight)


def pulling_away(settings, knowing, **more):
    """A run whose reward is for what the text has none of."""
    changed = json.loads(json.dumps(settings))
    changed["model"] = str(knowing / "sft" / "model")
    changed["train"] |= {"steps": 8, "prompts_per_step": 4, "optimizer": {"learning_rate": 3e-3}}
    changed["train"]["max_tokens_per_micro_batch"] = 512  # a plan of large ones would take most of the time
    changed["data"]["hold_out"] = 0
    return changed | {"tensorboard": False} | more


def with_text(settings, knowing, coef=1.0):
    algorithm = {**settings.get("algorithm", {"name": "grpo"}), "ptx_coef": coef}
    data = {**settings["data"], "pretrain": str(knowing / "text.jsonl")}
    return {**settings, "algorithm": algorithm, "data": data}


def metric_rows(run):
    rows = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "reward" in row]


@pytest.mark.stack
def test_text_beside_the_samples_is_not_forgotten(settings, knowing, make_config, tmp_path):
    settings = pulling_away(settings, knowing, algorithm={"name": "ppo"})
    alone = train(make_config(settings, output=str(tmp_path / "alone")))
    beside = train(make_config(with_text(settings, knowing), output=str(tmp_path / "beside")))
    known, forgotten, kept = (text_loss(model, knowing) for model in (settings["model"], alone.model, beside.model))
    assert forgotten > known + 0.3
    assert kept < known + 0.1
    rows = metric_rows(beside)
    assert rows[0]["ptx_loss"] == pytest.approx(known, abs=0.1)
    assert rows[-1]["ptx_passes"] == pytest.approx(8 * 16 / len(TEXTS))
    assert all("ptx_loss" not in row for row in metric_rows(alone))


@pytest.mark.stack
def test_a_resumed_run_has_the_text_of_an_uninterrupted_one_and_a_bundle_that_of_its_step(
    settings, knowing, make_config, tmp_path
):
    settings = with_text(pulling_away(settings, knowing, algorithm={"name": "ppo"}), knowing)
    settings["train"] |= {
        "steps": 4,
        "minibatches": 2,
        "epochs_per_step": 2,
        "pretrain_rows": 5,
        "prompts_per_step": 2,
    }
    settings |= {"checkpoint": {"every": 1, "keep": 9}, "bundles": {"every": 1}}
    whole = train(make_config(settings, output=str(tmp_path / "whole")))
    part = make_config(settings, output=str(tmp_path / "part"))
    train(make_config(settings, train__steps=2, output=str(tmp_path / "part")))
    resumed = train(part, resume=True)
    for name in ("loss", "ptx_loss", "ptx_passes", "grad_norm"):
        assert [row[name] for row in metric_rows(resumed)] == [row[name] for row in metric_rows(whole)], name
    kept = read_bundle(whole.folder / "bundles" / "step-000003").pretraining()
    assert kept is not None
    assert kept.rows == 5 * 4
    replay = replay_step(whole.folder / "bundles" / "step-000003")
    assert replay.equal
    losses = [parting for parting in replay.partings if "ptx_loss" in parting.name]
    assert losses
    without = ["algorithm.ptx_coef=0", "data.pretrain=[]", "train.pretrain_rows=null"]
    left_out = replay_step(whole.folder / "bundles" / "step-000003", without)
    assert any(parting.name == "policy/loss" and not parting.equal for parting in left_out.partings)
    (knowing / "other.jsonl").write_text(
        (knowing / "text.jsonl").read_text() + json.dumps({"text": "=" * 9}) + "\n"
    )
    other = make_config(settings, data__pretrain=str(knowing / "other.jsonl"), output=str(tmp_path / "part"))
    with pytest.raises(ConfigError, match=r"data\.pretrain\[0\]\.\w+ was|data\.pretrain\[0\]"):
        train(other, resume=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": {"name": "grpo", "ptx_coef": 0.1}}, "there is none; write data.pretrain"),
        ({"data__pretrain": "text.jsonl"}, r"algorithm\.ptx_coef is 0; write e\.g\."),
        ({"train__pretrain_rows": 4}, r"rows of data\.pretrain, which is not set"),
        ({"train__pretrain_rows": 0, "data__pretrain": "text.jsonl"}, "must be at least 1, got 0"),
        (
            {
                "data__pretrain": "text.jsonl",
                "algorithm": {"name": "ppo", "ptx_coef": 0.1},
                "rollout__sampling": {"max_tokens": 8, "temperature": 0.7},
            },
            r"temperature=0\.7; write 1",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(settings, make_config, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_config(settings, **changes)


def test_a_bad_row_is_refused_before_anything_is_started(settings, make_config, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"words": "bad"}\n')
    config = make_config(
        settings, data__pretrain=str(tmp_path / "bad.jsonl"), algorithm={"name": "grpo", "ptx_coef": 0.1}
    )
    with pytest.raises(DataError, match=r"bad\.jsonl.* row 2"):
        train(config)


def test_generation_passes_over_the_text(settings, tmp_path):
    settings["data"]["pretrain"] = "text.jsonl"
    settings["algorithm"] = {"name": "grpo", "ptx_coef": 0.1}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    found = load_config(
        GenerateConfig,
        tmp_path / "run.yaml",
        [f"output={tmp_path / 'samples.jsonl'}"],
        ignore=[*ignored_by_generation()],
    )
    assert found.data.train


class TestPretrainingStream:
    def stream(self, folder, **more):
        (folder / "answers.jsonl").write_text(
            "".join(json.dumps({"prompt": f"{n} is ", "completion": "x" * n}) + "\n" for n in range(1, 8))
        )
        settings = {"train": "none", "pretrain": str(folder / "answers.jsonl")}
        data = from_mapping(OnlineDataSection, settings, source="test")
        tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
        text = load_pretraining(data, tokenizer, LengthSection(), max_length=8)
        assert isinstance(text, PretrainingText)
        return text, PretrainingStream(text, seed=1, **more)

    def test_every_row_comes_once_a_pass_whatever_the_step(self, folder):
        _, stream = self.stream(folder, rows=2, updates=2)
        names = [name for step in range(7) for name in stream.of_step(step).sample_ids]
        assert len(names) == 28
        for start in range(0, 28, 7):
            assert len(set(names[start : start + 7])) == 7
        assert names[:7] != names[7:14]
        again = [name for step in (3, 0) for name in stream.of_step(step).sample_ids]
        assert again == [*names[12:16], *names[:4]]
        assert stream.passes(7) == 4

    def test_answers_count_and_long_rows_are_cut(self, folder):
        text, stream = self.stream(folder, rows=7, updates=1)
        rows = stream.of_step(0)
        assert isinstance(rows, RaggedBatch)
        assert max(rows.lengths) == 8
        assert "truncated" in str(text)
        by_length = dict(zip(rows.lengths, rows.padded().response_mask.sum(dim=1).tolist(), strict=True))
        assert by_length[8] == 3  # five tokens of prompt
        assert all(counted == length - 5 for length, counted in by_length.items())


def test_the_weight_is_that_of_the_whole_step_however_it_is_cut(folder):
    """The same loss and gradient in one micro-batch, and with text and samples in micro-batches of their own."""
    recipe = make_recipe("grpo", {"ptx_coef": 0.5, "kl_coef": 0.0})
    tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 0]])
    samples = Batch(
        token_ids=tokens,
        attention_mask=tokens > 0,
        response_mask=torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]]).bool(),
        columns={"advantages": torch.tensor([1.0, -1.0])},
    )
    text = torch.arange(10, 34).view(2, 12)
    counted = torch.ones_like(text).bool()
    counted[:, 0] = False
    rows = Batch(token_ids=text, attention_mask=torch.ones_like(counted), response_mask=counted)
    loss = recipe.policy_loss()
    assert policy_weight(samples, loss.config) == 2
    found = []
    for most in (4, 1000):
        config = EngineConfig(
            model=str(folder / "policy"), optimizer=OptimizerConfig(), max_tokens_per_micro_batch=most
        )
        engine = TorchEngine(config)
        report = engine.step(mix_pretraining(samples, rows, 0.5, loss.config), loss)
        found.append((report.loss, report.grad_norm, report.metrics["ptx_loss"]))
        engine.close()
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0][0] == pytest.approx(0.5 * found[0][2], rel=1e-4)  # advantages cancel: the text alone is left
