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
    settings = {"model": model, "train": [{"path": "pairs.jsonl"}], "output": "out", "reference_cache": "refs"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings | changes))
    return "run.yaml"


def test_every_method_is_a_command():
    assert set(command._SUMMARIES) == {*METHODS, "train"}


def test_training_from_a_file_with_overrides(call, tmp_path, model):
    code, out, _ = call("dpo", write(tmp_path, model), "batch_size=4", "learning.learning_rate=1e-4")
    assert code == 0
    assert "2 steps" in out
    assert (tmp_path / "out" / "model" / "config.json").exists()
    assert list((tmp_path / "out").glob("events.*"))


def test_training_from_overrides_alone(call, tmp_path, model):
    write(tmp_path, model)
    code, _, _ = call(
        "kto", f"model={model}", "train=[{path: pairs.jsonl}]", "output=out", "reference_cache=r", "max_steps=1"
    )
    assert code == 0


def test_print_config_shows_every_default_and_can_be_read_again(call, tmp_path, model):
    code, out, _ = call("dpo", write(tmp_path, model), "loss.beta=0.3", "--print-config")
    assert code == 0
    printed = yaml.safe_load(out)
    assert printed["loss"]["beta"] == 0.3
    assert printed["learning"]["warmup_ratio"] == 0.03
    assert not (tmp_path / "out").exists()
    (tmp_path / "again.yaml").write_text(out)
    assert yaml.safe_load(call("dpo", "again.yaml", "--print-config")[1]) == printed


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["learning.lerning_rate=1"], ["run.yaml", "'learning.lerning_rate'", "'learning.learning_rate'"]),
        (["loss.betta=1"], ["'loss.betta'", "'loss.beta'"]),
        (["batch_size=many"], ["batch_size must be a whole number", "'many'"]),
        (["train=[{path: nowhere.jsonl}]"], ["'nowhere.jsonl' does not exist"]),
        (["train=[{path: bad.jsonl}]"], ["bad.jsonl row 2", "not valid JSON"]),
        (["train=[{path: columns.jsonl}]"], ["columns.jsonl row 1", "no column 'chosen'"]),
        (["train=[{path: empty.jsonl}]"], ["empty.jsonl holds no rows"]),
        (["limit.max_length=3"], ["pairs.jsonl row 1", "prompt has 3 tokens", "long_prompts: drop"]),
        (["train=[{path: chat.jsonl}]", "tokenizer=plain"], ["no chat template"]),
        (["model=./nowhere"], ["model './nowhere' does not exist"]),
        (["reference=./nowhere"], ["reference './nowhere' does not exist"]),
        (["tokenizer=./nowhere"], ["no tokenizer", "./nowhere"]),
        (["chat_template=missing.jinja"], ["'missing.jinja' does not exist"]),
        (["batch_size"], ["not of the form key=value"]),
    ],
)
@pytest.mark.usefixtures("forbid_model_loading")
def test_mistakes_are_one_message_and_exit_code_2(call, tmp_path, model, overrides, parts):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n{"prompt": \n')
    (tmp_path / "columns.jsonl").write_text('{"prompt": "a", "better": "b", "rejected": "c"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    turns = {name: [{"role": name, "content": name}] for name in ("user", "assistant")}
    chat = {"prompt": turns["user"], "chosen": turns["assistant"], "rejected": turns["assistant"]}
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
    code, out, _ = call("train", write(tmp_path, model), "method=my_method:HALF", f"train=[{data}]", "max_steps=1")
    assert code == 0
    assert "sft_loss" in out
    code, _, errors = call("train", "run.yaml", "method=my_method:METHODS")
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
