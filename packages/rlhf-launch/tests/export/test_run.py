"""`rlhf export` of runs, models and adapters, each loaded again."""

import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from rlhf_algos import OfflineConfig, from_mapping, load_config, train
from rlhf_core.testing.tiny import byte_tokenizer, save_tiny_model
from rlhf_launch.cli.main import app
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

TEXT = "two and two"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A base model with a licensed card, pairs, a DPO run with adapters and evaluations, a reward model's run."""
    folder = tmp_path_factory.mktemp("private place")
    save_tiny_model(folder / "base", tied=False)
    (folder / "base" / "README.md").write_text("---\nlicense: apache-2.0\n---\n\n# Base\n")
    rows = [{"prompt": f"{i}: say ", "chosen": "yes" * (1 + i % 3), "rejected": "no"} for i in range(8)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train(settings(folder, "dpo", model={"path": str(folder / "base"), "lora": {"rank": 4}}))
    (folder / "dpo" / "plot.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    train(settings(folder, "rm", algorithm="rm", model=str(folder / "base")))
    return folder


def settings(folder, name, **changes):
    given = {
        "data": {"train": str(folder / "pairs.jsonl")},
        "output": str(folder / name),
        "reference_cache": str(folder / f"{name}-references"),
        "train": {"batch_size": 4, "optimizer": {"learning_rate": 0.02}},
        "evaluation": {"data": str(folder / "pairs.jsonl"), "batch_size": 8, "every": 1},
        "checkpoint": {"every": 1},
        "tensorboard": False,
        "algorithm": "dpo",
        **changes,
    }
    return from_mapping(OfflineConfig, given, source="test")


def export(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def exported(*arguments):
    done = export(*arguments)
    assert done.exit_code == 0, done.output
    return done.output


def logits(path, text=TEXT, scalar=False):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    return said(kind.from_pretrained(path, dtype=torch.float32), text)


def said(model, text=TEXT):
    ids = torch.tensor([byte_tokenizer()(text)["input_ids"]])
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize(("source", "dtype"), [("", "float32"), ("model", "bfloat16"), ("best", "float16")])
def test_a_run_is_exported_in_each_dtype(inputs, tmp_path, source, dtype):
    output = exported(inputs / "dpo" / source, tmp_path / "out", "--dtype", dtype)
    assert "from the source's" in output
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in held.values()} == {getattr(torch, dtype)}
    given = logits(inputs / "dpo" / (source or "model"))
    gap = (logits(tmp_path / "out") - given).abs().max()
    assert gap < {"float32": 1e-5, "float16": 0.02, "bfloat16": 0.2}[dtype]
    assert (given - logits(inputs / "base")).abs().max() > 0.2
    assert (tmp_path / "out" / "tokenizer.json").exists()
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("the best model of the run's evaluations" in card) == (source == "best")
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_adapters_are_merged_or_exported_alone(inputs, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trained = logits(inputs / "dpo" / "model")
    adapters = inputs / "dpo" / "model" / "adapter"
    exported(adapters, tmp_path / "merged")
    assert (logits(tmp_path / "merged") - trained).abs().max() < 1e-4
    output = exported(inputs / "dpo", tmp_path / "alone", "--adapter", "--base-name", "org/base")
    assert "from the source's" in output
    assert not (tmp_path / "alone" / "model.safetensors").exists()
    described = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == "org/base"
    for file in (tmp_path / "alone").iterdir():
        assert str(inputs).encode() not in file.read_bytes(), file
    base = AutoModelForCausalLM.from_pretrained(inputs / "base", dtype=torch.float32)
    assert (said(PeftModel.from_pretrained(base, tmp_path / "alone")) - trained).abs().max() < 1e-4
    card = ModelCard.load(tmp_path / "alone" / "README.md").data
    assert (card.base_model, card.base_model_relation, card.library_name) == ("org/base", "adapter", "peft")
    # What was exported is exported again, with the base given, as its name is nowhere here.
    exported(tmp_path / "alone", tmp_path / "again", "--base", inputs / "base")
    assert (logits(tmp_path / "again") - trained).abs().max() < 1e-4


def test_a_reward_model_keeps_its_head(inputs, tmp_path):
    exported(inputs / "rm", tmp_path / "out")
    assert (logits(tmp_path / "out", scalar=True) - logits(inputs / "rm" / "model", scalar=True)).abs().max() < 1e-6
    card = ModelCard.load(tmp_path / "out" / "README.md").data
    assert card.pipeline_tag == "text-classification"
    assert "reward-model" in card.tags


def test_the_card_says_how_it_was_made_and_nothing_of_the_machine(inputs, tmp_path, monkeypatch):
    monkeypatch.setenv("SERVICE_TOKEN", "correct-horse-battery")
    exported(inputs / "dpo", tmp_path / "out", "--base-name", "org/base")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == "apache-2.0"
    assert {"rlhf", "dpo"} <= set(card.data.tags)
    text = card.content
    for part in inputs.parts[1:]:
        assert part not in text
    assert str(Path.home()) not in text
    for file in (tmp_path / "out").iterdir():
        assert str(inputs).encode() not in file.read_bytes(), file
    digest = hashlib.sha256((inputs / "pairs.jsonl").read_bytes()).hexdigest()
    assert f"| pairs.jsonl | 8 | {digest} |" in text
    assert "`train.optimizer.learning_rate` | 0.02" in text
    rows = [json.loads(line) for line in (inputs / "dpo" / "metrics.jsonl").read_text().splitlines()]
    first, last = rows[0]["eval/loss"], rows[-1]["eval/loss"]
    assert f"| eval/loss | {first:.4g} (step 1) | {last:.4g} (step {rows[-1]['step']}) |" in text
    assert re.search(r"rlhf-launch [\d.]+.*torch [\d.]+.*transformers [\d.]+", text)
    assert "![curves of the run](plot.png)" in text
    assert (tmp_path / "out" / "plot.png").read_bytes() == (inputs / "dpo" / "plot.png").read_bytes()
    assert "rlhf offline dpo config.yaml" in text
    block = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1]
    (tmp_path / "config.yaml").write_text(block)
    config = load_config(OfflineConfig, tmp_path / "config.yaml")
    assert config.train.optimizer.learning_rate == 0.02
    assert yaml.safe_load(block)["model"]["path"] == "base"


def test_a_directory_without_a_run_has_a_card_that_says_so(inputs, tmp_path):
    exported(inputs / "base", tmp_path / "out", "--license", "mit")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == "mit"
    assert "without the record of a run" in card.content


def test_an_output_is_overwritten_when_it_is_asked_for_and_whole(inputs, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "out.tmp").mkdir()
    (out / "notes.txt").write_text("mine")
    done = export(inputs / "base", out)
    assert (done.exit_code, (out / "notes.txt").read_text()) == (2, "mine")
    assert "--overwrite" in done.output
    broken = tmp_path / "broken"
    shutil.copytree(inputs / "base", broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = export(broken, out, "--overwrite")
    assert done.exit_code == 2
    assert "model.safetensors" in done.output
    assert [file.name for file in out.iterdir()] == ["notes.txt"]
    assert {each.name for each in tmp_path.iterdir()} == {"out", "broken", "out.tmp"}
    exported(inputs / "base", out, "--overwrite")
    assert not (out / "notes.txt").exists()
    assert (out / "config.json").exists()
    assert {each.name for each in tmp_path.iterdir()} == {"out", "broken", "out.tmp"}


def test_a_run_or_the_source_is_never_overwritten(inputs, tmp_path, monkeypatch):
    for output in (inputs / "dpo", inputs / "dpo" / "model", inputs):
        done = export(inputs / "dpo", output, "--overwrite")
        assert done.exit_code == 2, done.output
        assert "holds what is exported" in done.output
    monkeypatch.chdir(tmp_path)
    assert "this very directory" in export(inputs / "base", ".").output
    done = export(inputs / "base", inputs / "rm", "--overwrite")
    assert "never overwritten" in done.output


def test_what_was_written_must_say_what_its_source_says(inputs, tmp_path, monkeypatch):
    """The weights change between writing and loading, as by a faulty disk or another process."""
    from transformers import PreTrainedModel

    save = PreTrainedModel.save_pretrained

    def damaging(self, folder, **options):
        save(self, folder, **options)
        file = Path(folder) / "model.safetensors"
        tensors = load_file(file)
        name = "model.layers.0.self_attn.o_proj.weight"
        save_file({**tensors, name: tensors[name].T.contiguous()}, file, {"format": "pt"})

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", damaging)
    done = export(inputs / "base", tmp_path / "out", "--dtype", "bfloat16")
    assert done.exit_code == 2, done.output
    assert "does not say what its source says" in done.output
    assert not list(tmp_path.iterdir())


def test_too_large_numbers_for_float16_are_found(tmp_path):
    save_tiny_model(tmp_path / "base", tied=False)
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"] * 1e6}, file, {"format": "pt"})
    done = export(tmp_path / "base", tmp_path / "out", "--dtype", "float16")
    assert done.exit_code == 2
    assert "bfloat16" in done.output
    exported(tmp_path / "base", tmp_path / "out", "--dtype", "bfloat16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dpo/checkpoints"], "neither a model"),
        (["dpo/checkpoints/step-000002"], "--resume"),
        (["dpo/checkpoints/step-000002/anything"], "--resume"),
        (["nothing/at/all"], "does not exist"),
        (["base", "--adapter"], "leave out --adapter"),
        (["base", "--adapter", "--gguf"], "two exports"),
        (["base", "--dtype", "int8"], "--dtype"),
        (["base", "--outtype", "q8_0"], "for --gguf"),
        (["base", "--private"], "--push-to-hub"),
        (["base", "--base-name", "/home/me/x"], "no hub name"),
        (["base", "--push-to-hub", "a/b/c"], "no name of a repository"),
    ],
)
def test_bad_input_is_refused_and_writes_nothing(inputs, tmp_path, arguments, message):
    source, *options = arguments
    done = export(inputs / source, tmp_path / "out", *options)
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert not list(tmp_path.iterdir())


CONVERTER = """
import argparse, struct, sys
parser = argparse.ArgumentParser()
parser.add_argument("model"); parser.add_argument("--outfile"); parser.add_argument("--outtype", default="auto")
given = parser.parse_args()
if given.outtype == "f8":
    sys.exit("unknown type f8")
import json, pathlib
assert json.loads((pathlib.Path(given.model) / "config.json").read_text())["model_type"] == "qwen2"
assert (pathlib.Path(given.model) / "model.safetensors").exists()
pathlib.Path(given.outfile).write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, TENSORS, 0))
"""


def test_a_gguf_file_is_written_by_the_converter(inputs, tmp_path, monkeypatch):
    """The calls, on a script with llama.cpp's arguments; docs/using-a-model.md says what the real one gave."""
    script = tmp_path / "scripts" / "convert_hf_to_gguf.py"
    script.parent.mkdir()
    script.write_text(CONVERTER.replace("TENSORS", "25"))
    output = exported(inputs / "dpo", tmp_path / "out", "--gguf", "--outtype", "f16", "--gguf-converter", script)
    assert "package gguf" in output
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["README.md", "dpo.gguf", "plot.png"]
    assert ModelCard.load(tmp_path / "out" / "README.md").data.library_name == "gguf"
    monkeypatch.setenv("RLHF_GGUF_CONVERTER", str(script.parent))
    done = export(inputs / "dpo", tmp_path / "no", "--gguf", "--outtype", "f8")
    assert done.exit_code == 2
    assert "unknown type f8" in done.output
    script.write_text(CONVERTER.replace("TENSORS", "0"))
    done = export(inputs / "dpo", tmp_path / "no", "--gguf")
    assert "no GGUF file with tensors" in done.output
    monkeypatch.delenv("RLHF_GGUF_CONVERTER")
    done = export(inputs / "dpo", tmp_path / "no", "--gguf")
    assert done.exit_code == 2
    assert "clone llama.cpp" in done.output
    assert not (tmp_path / "no").exists()
