"""`rlhf chat` through a pipe, with tiny models; replies compared with the model's own forward pass."""

import io
import json

import pytest
import torch
from rlhf_algos import TorchEngine
from rlhf_core import EngineConfig, LoraConfig, Loss, OptimizerConfig, SamplingConfig
from rlhf_core.testing.engine_ground import rows, supervised_loss
from rlhf_core.testing.tiny import byte_tokenizer, save_tiny_model
from rlhf_launch.chat.speaker import Speaker, SpeakerConfig
from rlhf_launch.chat.terminal import Chat, lines_of
from rlhf_launch.cli.main import app
from typer.testing import CliRunner

GREEDY = ["--temperature", "0", "--max-tokens", "12", "--device", "cpu"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A chat model, one without a chat template, a run of the former, adapters, a reward model."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "chat", tied=False)
    save_tiny_model(folder / "base", tokenizer=False, seed=2)
    plain = byte_tokenizer()
    plain.chat_template = None
    plain.save_pretrained(folder / "base")
    save_tiny_model(folder / "run" / "model", seed=4)
    (folder / "run" / "run.json").write_text("{}")
    save_tiny_model(folder / "rm", head="scalar")
    engine = TorchEngine(
        EngineConfig(
            model=str(folder / "chat"), optimizer=OptimizerConfig(learning_rate=0.05), lora=LoraConfig(rank=4)
        )
    )
    engine.step(rows(0), Loss(function=supervised_loss))
    (folder / "adapted").mkdir()
    engine.export(folder / "adapted")
    return folder


def talk(model, *lines, options=()):
    done = CliRunner().invoke(app, ["chat", str(model), *GREEDY, *options], input="".join(f"{x}\n" for x in lines))
    assert done.exit_code == 0, done.output
    return done


def greedy(folder, text, most=12):
    """What the model says next, token by token, without a cache."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    begin = len(ids)
    with torch.no_grad():
        while len(ids) < begin + most and (len(ids) == begin or ids[-1] != tokenizer.eos_token_id):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return tokenizer.decode(ids[begin:], skip_special_tokens=True)


def rendered(*messages):
    return byte_tokenizer().apply_chat_template(
        [{"role": role, "content": text} for role, text in messages], tokenize=False, add_generation_prompt=True
    )


def saved(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def contents(row):
    return [(message["role"], message["content"]) for message in row["messages"]]


def test_turns_build_on_each_other_and_commands_change_them(models, tmp_path):
    chat, file = models / "chat", tmp_path / "kept.jsonl"
    first = greedy(chat, rendered(("system", "Be brief."), ("user", "hi")))
    turn = [("system", "Be brief."), ("user", "hi"), ("assistant", first)]
    second = greedy(chat, rendered(*turn, ("user", "and?")))
    fresh = greedy(chat, rendered(("user", "/and?\nmore")))
    assert len({first, second, fresh}) == 3
    done = talk(
        chat,
        *("hi", "lost", "/undo", "and?", f"/save {file}"),
        *("/reset", "/system", "//and?\\", "more", f"/save {file}", "/exit", "never said"),
        options=["--system", "Be brief."],
    )
    rows_saved = saved(file)
    assert contents(rows_saved[0]) == [*turn, ("user", "and?"), ("assistant", second)]
    assert contents(rows_saved[1]) == [("user", "/and?\nmore"), ("assistant", fresh)]
    assert "took the last turn back; 1 left" in done.stderr
    assert "cut off" in done.stderr
    assert done.stdout.count("\n") >= 4
    assert "never said" not in file.read_text()


def test_what_was_kept_is_data_to_train_on(models, tmp_path):
    from rlhf_algos import OfflineConfig, from_mapping, train

    talk(models / "chat", "hi", f"/save {tmp_path / 'kept.jsonl'}")
    given = {
        "model": str(models / "chat"),
        "algorithm": "sft",
        "data": {"train": str(tmp_path / "kept.jsonl")},
        "train": {"batch_size": 1},
        "output": str(tmp_path / "run"),
        "tensorboard": False,
    }
    assert train(from_mapping(OfflineConfig, given, source="test")).steps == 1


def test_a_model_without_a_template_goes_on_with_the_text(models, tmp_path):
    base, file = models / "base", tmp_path / "kept.jsonl"
    first = greedy(base, "Once")
    second = greedy(base, f"Once{first} and")
    done = talk(base, "Once", " and", f"/save {file}", "/system Be brief.")
    assert saved(file) == [{"text": f"Once{first} and{second}"}]
    assert "no chat template: it goes on with the text" in done.stderr
    assert "no place for a system prompt" in done.stderr


def test_runs_and_adapters_are_found(models, tmp_path):
    file = tmp_path / "kept.jsonl"
    talk(models / "run", "hi", f"/save {file}")
    talk(models / "adapted" / "adapter", "hi", f"/save {file}")
    expected = [greedy(models / folder, rendered(("user", "hi"))) for folder in ("run/model", "adapted", "chat")]
    said = [contents(row)[-1][1] for row in saved(file)]
    assert said == expected[:2]
    assert len(set(expected)) == 3


def test_the_same_seed_samples_the_same_reply(models, tmp_path):
    replies = []
    for seed in (1, 1, 2):
        file = tmp_path / f"{len(replies)}.jsonl"
        talk(models / "chat", "hi", f"/save {file}", options=["--temperature", "1", "--seed", str(seed)])
        replies.append(contents(saved(file)[0])[-1][1])
    assert replies[0] == replies[1] != replies[2]


def test_mistakes_end_in_a_sentence_and_the_talk_goes_on(models, tmp_path):
    done = talk(
        models / "chat",
        *("/undo", "/save x", "/save", "/nothing", "/help", "", "hi", f"/save {tmp_path}", "x" * 4096, "ho"),
    )
    for said in ("no turn to take back", "nothing was said yet", "write /save FILE", "no command /nothing"):
        assert said in done.stderr
    for said in ("/system TEXT", "cannot be written", "the model takes 4096; /undo or /reset"):
        assert said in done.stderr
    assert done.stderr.count("cut off") == 2


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("rm", [], "serve-rm"),
        ("base", ["--system", "x"], "no chat template"),
        ("nothing/at/all", [], "does not exist"),
        ("chat", ["--temperature", "-1"], "temperature"),
        ("chat", ["--dtype", "int8"], "--dtype"),
        ("chat", ["--device", "tpu"], "--device"),
    ],
)
def test_bad_input_is_refused(models, model, options, message):
    done = CliRunner().invoke(app, ["chat", str(models / model), *GREEDY, *options], input="hi\n")
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert not done.stdout


class Interrupting(io.StringIO):
    """A terminal whose user presses Ctrl-C when the first piece of a reply appears."""

    def write(self, text):
        if text.strip() and "pressed" not in vars(self):
            self.pressed = True
            raise KeyboardInterrupt
        return super().write(text)


def test_an_interrupted_reply_ends_and_what_was_said_stays(models, tmp_path):
    speaker, notes = Speaker(SpeakerConfig(model=str(models / "base"), device="cpu")), io.StringIO()
    sampling = SamplingConfig(max_tokens=4000, temperature=0.0)
    chat = Chat(speaker, sampling, system=None, out=Interrupting(), notes=notes)
    chat.run(iter(["Once", f"/save {tmp_path / 'kept.jsonl'}"]))
    assert "(stopped)" in notes.getvalue()
    (row,) = saved(tmp_path / "kept.jsonl")
    assert row["text"].startswith("Once")
    assert len(row["text"]) < 4000


def test_what_a_model_writes_cannot_steer_the_terminal():
    class Said:
        cut, text = False, "a\x1b[2Jb"

        def __iter__(self):
            yield self.text

    class Fixed:
        tokenizer = byte_tokenizer()

        def reply(self, token_ids, sampling):
            return Said()

    out = io.StringIO()
    Chat(Fixed(), SamplingConfig(max_tokens=1), system=None, out=out, notes=io.StringIO()).run(iter(["x"]))
    assert out.getvalue() == "a\N{REPLACEMENT CHARACTER}[2Jb\n"


def test_lines_that_end_with_a_backslash_go_on():
    assert list(lines_of(io.StringIO("a\\\nb\r\n\nc\\"))) == ["a\nb", "", "c"]
