from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import rlhf_algos.offline.run_data
import torch
from rlhf_algos import (
    METHODS,
    CheckpointSchedule,
    DataSection,
    DataSource,
    LengthSection,
    ModelSection,
    OfflineAlgorithmSection,
    OfflineConfig,
    OfflineTrainSection,
    TorchEngine,
    collate_examples,
    read_metrics,
    train,
)
from rlhf_core import ConfigError, DataError, EngineConfig, LoraConfig, RewardScale, RunStopped, StopRequest
from rlhf_core.testing.tiny import save_tiny_model
from safetensors.torch import load_file

WORDS = ["alpha", "beta", "gamma", "delta", "omega", "sigma"]


def pair(index: int) -> dict:
    word = WORDS[index % len(WORDS)]
    return {
        "prompt": f"{index}: say {word}. ",
        "chosen": f"{word}!" * (1 + index % 3),
        "rejected": "no" * (1 + index % 4),
    }


def rows_of(method: str, count: int = 22) -> list[dict]:
    if method == "prm":
        return [
            {"prompt": f"p{i}", "completions": ["ok", "bad"], "labels": [True, i % 2 == 0]} for i in range(count)
        ]
    pairs = [pair(i) for i in range(count)]
    if method == "tpo":
        return [{**p, "reference": p["chosen"] + "."} for p in pairs]
    if method in ("sft", "distill"):
        return [{"prompt": p["prompt"], "completion": p["chosen"]} for p in pairs]
    return pairs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=32)


def changed(config, **fields):
    """The config with other values: `train__steps=1` for `train.steps`."""
    for name, value in fields.items():
        first, _, rest = name.partition("__")
        inner = changed(getattr(config, first), **{rest: value}) if rest else value
        config = replace(config, **{first: inner})
    return config


def evaluated(config):
    """Evaluated on what it is trained on."""
    return changed(config, evaluation__data=config.data.train)


@pytest.fixture
def make(tmp_path, model):
    """A function from fields to an OfflineConfig on a small dataset of the method."""

    def config(method: str = "dpo", **fields) -> OfflineConfig:
        data = tmp_path / f"{method}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows_of(method)))
        loss, loss_function = fields.pop("loss", {}), fields.pop("loss_function", None)
        if method == "distill" and not loss:
            loss = {"teacher": save_tiny_model(tmp_path / "teacher", hidden_size=48, seed=3), "top_k": 512}
        made = OfflineConfig(
            model=ModelSection(path=model),
            data=DataSection(train=(DataSource(path=str(data)),)),
            algorithm=OfflineAlgorithmSection(name=method, loss=loss, loss_function=loss_function),
            output=tmp_path / "out",
            reference_cache=tmp_path / "references",
            lengths=LengthSection(max_length=64),
            train=OfflineTrainSection(
                batch_size=4, optimizer=changed(OfflineTrainSection().optimizer, learning_rate=3e-3)
            ),
            tensorboard=False,
        )
        return changed(made, **fields)

    return config


def weights(path):
    return load_file(path / "model.safetensors")


def same(left, right) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_learns_its_data_and_writes_a_transformers_directory(make, method):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    config = make(method, train__epochs=4, train__batch_size=8)
    result = train(changed(evaluated(config), evaluation__every=4))
    rows = read_metrics(config.output / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, result.steps + 1))
    evaluations = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert evaluations[-1] < evaluations[0]
    auto = AutoModelForCausalLM if METHODS[method].role == "policy" else AutoModelForSequenceClassification
    auto.from_pretrained(result.model)
    assert AutoTokenizer.from_pretrained(result.model).chat_template
    assert result.best is not None


def test_the_reference_is_scored_once_and_then_read_from_the_cache(make, monkeypatch):
    config = make("dpo")
    first = train(changed(config, train__steps=1))
    (cached,) = config.reference_cache.glob("*.safetensors")
    monkeypatch.setattr(
        "rlhf_algos.offline.reference.score_rows", lambda *args: pytest.fail("the reference was scored again")
    )
    again = train(changed(config, train__steps=1, output=config.output.with_name("again")))
    assert again.metrics["loss"] == first.metrics["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert list(config.reference_cache.glob("*.safetensors")) == [cached]


def test_evaluation_reports_how_far_the_policy_is_from_its_reference(make):
    config = make("dpo", train__optimizer__learning_rate=0.0, train__steps=1)
    result = train(evaluated(config))
    assert result.metrics["eval/kl"] == pytest.approx(0, abs=1e-4)
    moved = make("dpo", train__epochs=2, output=config.output.with_name("moved"))
    result = train(evaluated(moved))
    assert abs(result.metrics["eval/kl"]) > 0.1
    assert {"eval/accuracy", "eval/margin", "eval/loss"} <= set(result.metrics)


def test_other_data_or_another_reference_has_its_own_cache_entry(make, tmp_path):
    config = make("dpo", train__steps=1)
    train(config)
    other = save_tiny_model(tmp_path / "other", hidden_size=32, seed=1)
    loss = train(changed(config, model__reference=other, output=tmp_path / "b")).metrics["loss"]
    assert abs(loss - 0.6931) > 0.01
    train(changed(config, lengths__max_length=20, output=tmp_path / "c"))
    assert len(list(config.reference_cache.glob("*.safetensors"))) == 3


def test_packing_and_micro_batches_do_not_change_the_run(make, tmp_path):
    losses = []
    ways = [{}, {"train__packing": False}, {"train__max_tokens_per_micro_batch": 70}]
    for index, way in enumerate(ways):
        config = make("dpo", **way, output=tmp_path / f"{index}", reference_cache=tmp_path / f"r{index}")
        train(config)
        losses.append([row["loss"] for row in read_metrics(config.output / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0] == pytest.approx(losses[2], rel=1e-3)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_finds_the_size_of_its_micro_batches(make, tmp_path, method):
    said: list[str] = []
    auto = make(method, train__steps=2, train__max_tokens_per_micro_batch="auto")
    result = train(auto, say=said.append)
    (line,) = said
    assert line.startswith("micro-batches of 16,384 tokens: ")
    said.clear()
    written = changed(auto, train__max_tokens_per_micro_batch=16384, output=tmp_path / "written")
    assert train(written, say=said.append).metrics == result.metrics
    assert same(weights(auto.output / "model"), weights(written.output / "model"))
    assert not said


def test_a_resumed_run_keeps_the_size_of_its_micro_batches(make, tmp_path, monkeypatch):
    meminfo = tmp_path / "meminfo"
    monkeypatch.setattr("rlhf_core.training.memory_meter._MEMINFO", meminfo)
    lines: list[str] = []

    def available(mib):
        meminfo.write_text(f"MemTotal: 1048576 kB\nMemAvailable: {mib * 1024} kB\n")

    class Killed(Exception):
        pass

    def kill(kind, step, values):
        if kind == "train" and step == 3:
            raise Killed

    available(24)
    whole = make("sft", checkpoint__every=1, train__max_tokens_per_micro_batch="auto")
    train(whole, say=lines.append)
    broken = changed(whole, output=tmp_path / "broken")
    with pytest.raises(Killed):
        train(broken, on_event=kill, say=lines.append)
    available(200)
    train(broken, resume=True, say=lines.append)
    lines = [line for line in lines if line.startswith("micro-batches")]
    assert len(lines) == 3
    assert len(set(lines)) == 1, "also after the resume, when more is free"
    assert "of 16,384 tokens" not in lines[0]
    assert same(weights(whole.output / "model"), weights(broken.output / "model"))
    assert read_metrics(whole.output / "metrics.jsonl") == read_metrics(broken.output / "metrics.jsonl")


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(make, tmp_path, method):
    settings = {
        "train__epochs": 2,
        "checkpoint__every": 4,
        "train__max_tokens_per_micro_batch": 128,
        "evaluation__every": 5,
    }
    whole = make(method, output=tmp_path / "whole", **settings)
    whole = evaluated(whole)
    train(whole)
    broken = changed(whole, output=tmp_path / "broken")

    class Killed(Exception):
        pass

    def kill(kind, step, values):
        if step == 7 and kind == "train":
            raise Killed

    with pytest.raises(Killed):
        train(broken, on_event=kill)
    train(broken, resume=True)
    assert same(weights(whole.output / "model"), weights(broken.output / "model"))
    assert same(weights(whole.output / "best"), weights(broken.output / "best"))
    assert read_metrics(whole.output / "metrics.jsonl") == read_metrics(broken.output / "metrics.jsonl")


def test_checkpoints_are_kept_to_the_last_ones_and_not_overwritten_by_mistake(make):
    config = make("sft", checkpoint__every=1, checkpoint__keep=2)
    train(config)
    assert sorted(path.name for path in (config.output / "checkpoints").iterdir()) == ["step-000005", "step-000006"]
    with pytest.raises(ConfigError, match="--resume"):
        train(config)


def test_there_is_nothing_to_resume_in_an_empty_directory(make):
    config = make("sft", train__steps=2)
    with pytest.raises(DataError, match="nothing to resume"):
        train(config, resume=True)
    assert not config.output.exists()


def test_overwrite_moves_the_earlier_run_aside(make):
    config = make("sft", train__steps=2)
    said = []
    for _ in range(2):
        train(config, overwrite=True, say=said.append)
    aside = [path for path in config.output.parent.iterdir() if path.name.startswith("out.")]
    assert [(path / "model" / "config.json").exists() for path in aside] == [True]
    assert str(aside[0]) in said[0]


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(make):
    config = make("sft", checkpoint__every=1, train__steps=4)
    whole = weights(train(config).model)
    (config.output / "checkpoints" / "step-000004" / "engine" / "weights.safetensors").write_bytes(b"")
    said = []
    resumed = train(config, resume=True, say=said.append)
    assert resumed.steps == 4
    assert "step-000004" in said[0]
    assert "after step 3" in said[1]
    assert same(weights(resumed.model), whole)
    rows = read_metrics(config.output / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_checkpoints_come_by_time_too(make, monkeypatch):
    minutes = iter(range(0, 1000, 20))
    clocked = partial(CheckpointSchedule, clock=lambda: 60.0 * next(minutes))
    monkeypatch.setattr("rlhf_algos.offline.loop.CheckpointSchedule", clocked)
    config = make("sft", checkpoint__minutes=30, checkpoint__keep=9)
    train(config)
    # The clock is read at the start, after each step, and at each save: every second step is late.
    assert len(list((config.output / "checkpoints").iterdir())) == 3


def test_a_run_is_not_continued_under_another_plan(make):
    config = make("sft", checkpoint__every=1, train__steps=2)
    train(config)
    with pytest.raises(ConfigError, match="batch_size was 4, is 5"):
        train(changed(config, train__batch_size=5), resume=True)


def test_early_stopping_keeps_the_best_model(make):
    config = make(
        "dpo",
        train__epochs=20,
        train__optimizer__learning_rate=0.0,
        evaluation__every=1,
        evaluation__patience=3,
        evaluation__best_metric="accuracy",
    )
    result = train(evaluated(config))
    assert result.stopped_early
    assert result.steps == 4
    assert same(weights(result.best), weights(result.model))


def test_an_unknown_best_metric_names_the_known_ones(make):
    config = make("dpo", evaluation__every=1, evaluation__best_metric="acuracy")
    with pytest.raises(ConfigError, match="accuracy"):
        train(evaluated(config))


def test_mixed_datasets_follow_their_weights(make, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"prompt": f"x{i}", "completion": "y"}) + "\n" for i in range(22)))
    config = make("sft")
    mixed = changed(config, data__train=(replace(config.data.train[0], weight=9.0), DataSource(path=str(other))))
    data = rlhf_algos.offline.run_data.load_data(mixed)
    share = sum(index < 22 for epoch in range(10) for index in data.order(mixed, epoch)) / 440
    assert 0.85 < share < 0.95
    assert train(mixed).steps == 11


def test_a_share_of_the_rows_is_held_out(make):
    for method in ("dpo", "kto"):
        config = make(method, data__hold_out=0.2, output=make(method).output / method)
        data = rlhf_algos.offline.run_data.load_data(config)
        trained, held = ({e.row_name for e in part} for part in (data.train, data.eval))
        assert (len(trained), len(held)) == (18, 4)
        assert not trained & held
        assert [e.name for e in rlhf_algos.offline.run_data.load_data(config).eval] == [e.name for e in data.eval]
    assert "eval/loss" in train(changed(config, train__steps=1)).metrics
    with pytest.raises(ConfigError, match="leaves nothing to train on"):
        rlhf_algos.offline.run_data.load_data(make("dpo", data__hold_out=0.99))
    counted = rlhf_algos.offline.run_data.load_data(make("dpo", data__hold_out=3))
    assert (len(counted.train), len(counted.eval)) == (19, 3)


OWN_LOSSES = """
from dataclasses import dataclass
from rlhf_algos import DPOConfig
from rlhf_algos.losses.offline.preference import dpo
from rlhf_algos.losses.offline.sft import SFTConfig, sft


def doubled(outputs, batch, config: DPOConfig):
    terms = dpo(outputs, batch, config)
    return type(terms)(total=2 * terms.total, weight=terms.weight, metrics=terms.metrics)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledConfig:
    factor: float = 1.0


def scaled(outputs, batch, config: ScaledConfig):
    terms = sft(outputs, batch, SFTConfig())
    return type(terms)(total=config.factor * terms.total, weight=terms.weight)


def untyped(outputs, batch, config):
    return scaled(outputs, batch, ScaledConfig(**config))


def two(outputs, batch):
    return None
"""


def test_a_loss_function_of_ones_own(make, tmp_path, monkeypatch):
    (tmp_path / "own_losses.py").write_text(OWN_LOSSES)
    monkeypatch.syspath_prepend(tmp_path)

    def first_loss(method, **fields):
        return train(make(method, train__steps=1, output=tmp_path / f"{method} {fields}", **fields)).metrics["loss"]

    plain = first_loss("dpo")
    assert first_loss("dpo", loss_function="own_losses:doubled") == pytest.approx(2 * plain)
    plain = first_loss("sft")
    options = {"loss": {"factor": 3.0}}
    assert first_loss("sft", loss_function="own_losses:scaled", **options) == pytest.approx(3 * plain)
    assert first_loss("sft", loss_function="own_losses:untyped", **options) == pytest.approx(3 * plain)
    with pytest.raises(ConfigError, match=r"did you mean 'algorithm\.factor'"):
        make("sft", loss_function="own_losses:scaled", loss={"facto": 1})
    with pytest.raises(ConfigError, match="must take 3"):
        make("sft", loss_function="own_losses:two")
    with pytest.raises(ConfigError, match="is a type"):
        make("sft", loss_function="own_losses:ScaledConfig")


def test_lora_trains_adapters_and_writes_a_merged_model(make, model):
    result = train(make("dpo", model__lora=LoraConfig(rank=4)))
    before, after = weights(Path(model)), weights(result.model)
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert all("_proj" in name for name in changed)


def test_a_4_bit_policy_starts_from_its_own_reference(make, model, tmp_path):
    """The reference is quantised like the policy, so the first DPO loss is log 2; its scores are cached apart."""
    pytest.importorskip("bitsandbytes")
    lora = {"rank": 4, "quantize": "nf4"}
    train(make("dpo", train__steps=1, output=tmp_path / "plain"))
    result = train(make("dpo", train__steps=1, model__lora=LoraConfig(**lora)))
    assert result.metrics["loss"] == pytest.approx(math.log(2), abs=1e-5)
    before, after = weights(Path(model)), weights(result.model)
    assert {name: tensor.dtype for name, tensor in before.items()} == {n: t.dtype for n, t in after.items()}


def test_bfloat16_and_gradient_checkpointing_run(make):
    result = train(make("dpo", model__dtype="bfloat16", train__gradient_checkpointing=True))
    assert weights(result.model)["model.norm.weight"].dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("method", "loss"),
    [
        ("dpo", {"loss": "aot"}),
        ("dpo", {"loss": "aot_unpaired"}),
        ("dpo", {"sft_coef": 1.0, "sft_mean": "token"}),
        ("dpo", {"ld_alpha": 0.5}),
        ("dpo", {"weighted": True}),
        ("kto", {"loss": "bco"}),
        ("kto", {"baseline": "opposite"}),
        ("tpo", {"beta": 0.5}),
    ],
)
def test_losses_with_whole_batch_columns(make, method, loss):
    losses = []
    for tokens in (16384, 60):
        config = make(
            method,
            loss=loss,
            output=make(method).output / str(tokens),
            train__max_tokens_per_micro_batch=tokens,
        )
        train(config)
        losses.append([row["loss"] for row in read_metrics(config.output / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"train__batch_size": 0}, "train.batch_size"),
        ({"data__train": ()}, "data.train is empty"),
        ({"loss": {"betta": 1}}, "did you mean 'algorithm.beta'"),
        ({"loss": 3}, "DPOConfig"),
        ({"train__steps": 0}, "train.steps"),
        ({"data__hold_out": -1.0}, "data.hold_out"),
        ({"checkpoint__keep": 0}, "checkpoint.keep"),
        ({"model__critic": "x"}, "have no critic"),
    ],
)
def test_bad_configurations(make, fields, part):
    with pytest.raises(ConfigError, match=part):
        make("dpo", **fields)


@pytest.mark.stack
def test_a_student_comes_to_say_what_its_teacher_says(make):
    config = make("distill", train__epochs=30, train__optimizer__learning_rate=1e-2)
    train(config)
    rows = read_metrics(config.output / "metrics.jsonl")
    assert rows[0]["kd_loss"] > 0.3
    assert rows[-1]["kd_loss"] < 0.3 * rows[0]["kd_loss"]
    assert list(config.reference_cache.glob("teacher-*.safetensors"))
    itself = make(
        "distill", loss={"teacher": config.model.path, "kd_coef": 0.5, "temperature": 2.0}, train__steps=1
    )
    result = train(changed(itself, output=config.output.with_name("itself")))
    assert result.metrics["kd_loss"] == pytest.approx(0, abs=1e-5)
    assert result.metrics["sft_loss"] > 1


def test_a_process_reward_model_with_a_language_model_head(make, tmp_path):
    from transformers import AutoModelForCausalLM

    rows = [{"input": f"p{i} ok# bad#", "label": ["+", "-"]} for i in range(12)]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make(
        "prm",
        loss={"label_tokens": ["+", "-"]},
        data__step_placeholder="#",
        train__epochs=8,
        train__optimizer__learning_rate=1e-2,
    )
    result = train(changed(config, data__train=(DataSource(path=str(tmp_path / "steps.jsonl")),)))
    assert result.metrics["step_accuracy"] == 1
    AutoModelForCausalLM.from_pretrained(result.model)


def test_a_teacher_with_another_vocabulary_is_refused(make, tmp_path):
    other = save_tiny_model(tmp_path / "other", vocab_size=300)
    with pytest.raises(ConfigError, match="300 tokens, the student's 512"):
        train(make("distill", loss={"teacher": other}))


def test_a_teacher_whose_ids_mean_other_tokens_is_refused(make, tmp_path):
    """Its vocabulary has the same size."""
    other = save_tiny_model(tmp_path / "other")
    file = tmp_path / "other" / "tokenizer.json"
    tokens = json.loads(file.read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokens))
    with pytest.raises(ConfigError, match=r"id \d+ is '[ab]' for the student and '[ab]' for the teacher"):
        train(make("distill", loss={"teacher": other}))


@pytest.mark.stack
@pytest.mark.parametrize("method", ["dpo", "kto", "distill"])
def test_two_processes_under_torchrun_equal_one(make, tmp_path, method):
    from rlhf_algos.config.loader import dump_config

    config = make(method, output=tmp_path / "two")
    config = evaluated(config)
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*command, "-m", "rlhf_algos.command", method, str(file)],
        check=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    train(changed(config, output=tmp_path / "one"))
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for name in ("loss", "grad_norm", "tokens", "eval/loss"):
        assert [row[name] for row in two if name in row] == pytest.approx(
            [row[name] for row in one if name in row], rel=1e-3
        ), name


RESUMED = """
import sys
from pathlib import Path
import rlhf_algos.offline.loop as offline
from rlhf_algos import CheckpointSection, OfflineConfig, load_config, train
from dataclasses import replace

config = load_config(OfflineConfig, Path(sys.argv[1]))
train(config)

stopped = replace(config, output=config.output.with_name("stopped"), checkpoint=CheckpointSection(every=2))
save = offline.save_checkpoint


def save_and_stop(directory, engine, state, **settings):
    save(directory, engine, state, **settings)
    if state.step == 4:
        raise KeyboardInterrupt


offline.save_checkpoint = save_and_stop
try:
    train(stopped)
except KeyboardInterrupt:
    pass
offline.save_checkpoint = save
train(stopped, resume=True)
"""


@pytest.mark.stack
def test_two_processes_resume_bit_for_bit(make, tmp_path):
    from rlhf_algos.config.loader import dump_config

    config = make("dpo", output=tmp_path / "whole")
    (tmp_path / "run.yaml").write_text(dump_config(config))
    (tmp_path / "resumed.py").write_text(RESUMED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*command, str(tmp_path / "resumed.py"), str(tmp_path / "run.yaml")],
        check=True,
        timeout=300,
        # Should a rank abort, its stacks say where.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"},
    )
    whole, stopped = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "stopped"))
    assert len(whole) == 6
    assert [row["loss"] for row in stopped] == [row["loss"] for row in whole]
    assert same(weights(tmp_path / "whole" / "model"), weights(tmp_path / "stopped" / "model"))


def test_a_run_that_is_asked_to_end_saves_and_equals_an_uninterrupted_one(make, tmp_path):
    whole = train(make("dpo", train__steps=5, output=tmp_path / "whole"))
    stop = StopRequest()

    def on_event(kind, step, values):
        if kind == "train" and step == 2:
            stop.ask("the budget is spent")

    config = make("dpo", train__steps=5, output=tmp_path / "stopped")
    with pytest.raises(RunStopped, match="the budget is spent") as caught:
        train(config, on_event=on_event, stop=stop)
    assert caught.value.__notes__ == ["the newest checkpoint is that of step 2 of 5; --resume continues from it"]
    resumed = train(config, resume=True)
    assert resumed.steps == 5
    assert same(weights(resumed.model), weights(whole.model))


SIGNALLED = """
import os, signal, sys
from pathlib import Path
from rlhf_algos import OfflineConfig, load_config, train

def on_event(kind, step, values):
    if kind == "train" and step == 2:
        os.kill(os.getpid(), signal.SIGTERM)

config = load_config(OfflineConfig, Path(sys.argv[1]))
try:
    train(config, on_event=on_event)
except Exception as error:
    (Path(sys.argv[1]).parent / f"rank-{os.environ['RANK']}.txt").write_text(f"{type(error).__name__}: {error}")
"""


@pytest.mark.stack
def test_processes_stop_together_when_one_is_asked_to(make, tmp_path):
    from rlhf_algos.config.loader import dump_config

    (tmp_path / "run.yaml").write_text(dump_config(make("sft", output=tmp_path / "out")))
    (tmp_path / "signalled.py").write_text(SIGNALLED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run(
        [*command, str(tmp_path / "signalled.py"), str(tmp_path / "run.yaml")],
        check=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (tmp_path / "rank-0.txt").read_text() == "RunStopped: SIGTERM was received"
    assert (tmp_path / "rank-1.txt").read_text() == "RunStopped: another process of the run was asked to end"
    assert [path.name for path in (tmp_path / "out" / "checkpoints").glob("step-*")] == ["step-000002"]


@pytest.mark.parametrize("held_out", [0, 6])
def test_a_reward_model_keeps_the_scale_of_its_scores(make, held_out):
    """Answers of the pairs it was measured on have mean 0 and deviation 1, and again if it is trained on."""
    config = make("rm", loss={"keep_scale": True}, data__hold_out=held_out, data__shuffle=False)
    result = train(config)
    further = changed(
        config, model__path=str(result.model), output=config.output.with_name("further"), train__steps=1
    )
    for trained in (result, train(further)):
        settings = json.loads((trained.model / "config.json").read_text())
        scale = RewardScale.of_config(settings)
        assert scale is not None
        data = rlhf_algos.offline.run_data.load_data(config)
        assert len(data.eval) == held_out
        engine = TorchEngine(EngineConfig(model=str(trained.model), role="reward", device="cpu"))
        batch = collate_examples(data.eval or data.train, pad_token_id=data.encoder.pad_token_id)
        scores = engine.score(batch, ("scores",)).scores
        assert scores.mean().item() == pytest.approx(0, abs=1e-4)
        assert scores.std(correction=0).item() == pytest.approx(1, abs=1e-4)
        engine.close()
    plain = train(make("rm", output=config.output.with_name("plain"), train__steps=1))
    assert RewardScale.of_config(json.loads((plain.model / "config.json").read_text())) is None
