from __future__ import annotations

import json
import sys

import pytest
import yaml
from rlhf_algos import command
from rlhf_algos.offline.methods import METHODS
from rlhf_core.testing.tiny import byte_tokenizer, save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), hidden_size=16)


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run the command in an empty directory; gives (exit code, output, errors)."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rlhf-algos", *arguments])
        with pytest.raises(SystemExit) as caught:
            sys.exit(command.main())
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def forbid_model_loading(monkeypatch):
    import rlhf_algos.torch_engine.engine

    def refuse(*_):
        pytest.fail("a model was loaded before the mistake was found")

    monkeypatch.setattr(rlhf_algos.torch_engine.engine, "load_model", refuse)


def write(tmp_path, model, **changes):
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps({"prompt": f"q{i} ", "chosen": "yes", "rejected": "no"}) + "\n" for i in range(8))
    )
    settings = {"model": model, "data": {"train": "pairs.jsonl"}, "output": "out", "reference_cache": "refs"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings | changes))
    return "run.yaml"


def test_every_method_is_a_command():
    assert set(command._SUMMARIES) == {*METHODS, "train"}


def test_training_from_a_file_with_overrides(call, tmp_path, model):
    code, out, _ = call("dpo", write(tmp_path, model), "train.batch_size=4", "train.optimizer.learning_rate=1e-4")
    assert code == 0
    assert "2 steps" in out
    assert (tmp_path / "out" / "model" / "config.json").exists()
    assert list((tmp_path / "out").glob("events.*"))


def test_training_from_overrides_alone(call, tmp_path, model):
    write(tmp_path, model)
    code, _, _ = call(
        "kto", f"model={model}", "data.train=pairs.jsonl", "output=out", "reference_cache=r", "train.steps=1"
    )
    assert code == 0


def test_print_config_shows_every_default_and_can_be_read_again(call, tmp_path, model):
    code, out, _ = call("dpo", write(tmp_path, model), "algorithm.beta=0.3", "--print-config")
    assert code == 0
    printed = yaml.safe_load(out)
    assert printed["algorithm"]["beta"] == 0.3
    assert printed["train"]["optimizer"]["warmup"] == 0.03
    assert not (tmp_path / "out").exists()
    (tmp_path / "again.yaml").write_text(out)
    assert yaml.safe_load(call("dpo", "again.yaml", "--print-config")[1]) == printed


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["train.optimizer.lerning_rate=1"], ["run.yaml", "optimizer.lerning_rate'", "optimizer.learning_rate'"]),
        (["algorithm.betta=1"], ["'algorithm.betta'", "'algorithm.beta'"]),
        (["train.batch_size=many"], ["train.batch_size must be a whole number", "'many'"]),
        (["data.train=nowhere.jsonl"], ["'nowhere.jsonl' does not exist"]),
        (["data.train=bad.jsonl"], ["bad.jsonl row 2", "not valid JSON"]),
        (["data.train=columns.jsonl"], ["columns.jsonl row 1", "no column 'chosen'"]),
        (["data.train=empty.jsonl"], ["empty.jsonl holds no rows"]),
        (["lengths.max_length=3"], ["pairs.jsonl row 1", "prompt has 3 tokens", "long_prompts: drop"]),
        (["data.train=chat.jsonl", "model.tokenizer=plain"], ["no chat template"]),
        (["model=./nowhere"], ["model.path './nowhere' does not exist"]),
        (["model.reference=./nowhere"], ["model.reference './nowhere' does not exist"]),
        (["model.tokenizer=./nowhere"], ["no tokenizer", "./nowhere"]),
        (["model.chat_template=missing.jinja"], ["'missing.jinja' does not exist"]),
        (["learning.learning_rate=1"], ["'learning' has another name now", "train.optimizer"]),
        (["train=pairs.jsonl"], ["'train' has another name now", "data.train"]),
        (["method=kto"], ["algorithm.name"]),
        (["resume=true"], ["--resume"]),
        (["train.ranks=2"], ["train.ranks=2", "rlhf offline dpo"]),
        (["train.optimizer.learning_rate=.nan"], ["learning_rate must be a finite number"]),
        (["train.optimizer.learning_rate=.inf"], ["learning_rate must be a finite number"]),
        (["output=pairs.jsonl"], ["pairs.jsonl' cannot be written"]),
        (["batch_size"], ["not of the form key=value"]),
    ],
)
@pytest.mark.usefixtures("forbid_model_loading")
def test_mistakes_are_one_message_and_exit_code_2(call, tmp_path, model, overrides, parts):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": \n')
    (tmp_path / "columns.jsonl").write_text('{"prompt": "a", "better": "b", "rejected": "c"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    turns = {name: [{"role": name, "content": name}] for name in ("user", "assistant")}
    chat = {"prompt": turns["user"], "chosen": turns["assistant"], "rejected": turns["user"]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat) + "\n")
    plain = byte_tokenizer()
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "plain")
    code, _, errors = call("dpo", write(tmp_path, model), *overrides)
    assert code == 2
    assert "Traceback" not in errors
    for part in parts:
        assert part in " ".join(errors.split()), errors


def test_a_method_of_ones_own(call, tmp_path, model):
    (tmp_path / "my_method.py").write_text(
        "from dataclasses import replace\nfrom rlhf_algos import METHODS\nHALF = replace(METHODS['sft'])\n"
    )
    data = '{"path": "pairs.jsonl", "columns": {"completion": "chosen"}}'
    code, out, _ = call(
        "train", write(tmp_path, model), "algorithm.name=my_method:HALF", f"data.train=[{data}]", "train.steps=1"
    )
    assert code == 0
    assert "sft_loss" in out
    code, _, errors = call("train", "run.yaml", "algorithm.name=my_method:METHODS")
    assert code == 2
    assert "write a rlhf_algos.Method" in " ".join(errors.split())


def test_a_diverging_run_is_exit_code_1(call, tmp_path, model, monkeypatch):
    import rlhf_algos.offline.loop
    from rlhf_core import TrainingDivergedError

    def diverge(*_, **__):
        raise TrainingDivergedError("6 training steps in a row")

    monkeypatch.setattr(rlhf_algos.offline.loop, "train", diverge)
    code, _, errors = call("dpo", write(tmp_path, model))
    assert code == 1
    assert "failed: 6 training steps" in errors


def test_a_missing_file(call):
    code, _, errors = call("dpo", "missing.yaml")
    assert code == 2
    assert "'missing.yaml' does not exist" in errors
