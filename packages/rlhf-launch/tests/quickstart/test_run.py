"""The quickstart's parts; the whole of it is what the README's first command runs."""

import importlib.util

import pytest
import torch
from rlhf_core import ConfigError
from rlhf_launch.quickstart import run as quickstart
from rlhf_launch.quickstart.arithmetic import (
    character_tokenizer,
    exact_sum,
    make_model,
    make_problems,
    supervised_batch,
)


def test_problems_are_split_without_overlap():
    training, held_out = make_problems(digits=1, held_out=20, seed=0)
    assert len(training) == 80
    assert len(set(training) | set(held_out)) == 100
    assert make_problems(digits=1, held_out=20, seed=0) == (training, held_out)


def test_the_reward_wants_the_sum_and_nothing_else():
    assert exact_sum(["46", "46 ", "146", ""], answer=["46"] * 4) == [1.0, 1.0, 0.0, 0.0]


def test_rows_hold_prompt_answer_and_end():
    tokenizer = character_tokenizer()
    (problem, *_), _ = make_problems(digits=1, held_out=0, seed=3)
    batch = supervised_batch([problem], tokenizer)
    text = tokenizer.decode(batch.token_ids[0][batch.response_mask[0]].tolist())
    assert text == problem.answer + "<eos>"
    assert tokenizer.decode(batch.token_ids[0][~batch.response_mask[0]].tolist()) == problem.prompt


def test_the_chance_of_a_right_answer_is_that_of_sampling_it(tmp_path):
    from rlhf_algos import TorchEngine
    from rlhf_core import EngineConfig

    make_model(tmp_path, seed=0)
    engine = TorchEngine(EngineConfig(model=str(tmp_path)))
    batch = supervised_batch(make_problems(digits=1, held_out=0, seed=0)[0][:5], character_tokenizer())
    expected = engine.score(batch).log_probs.sum(dim=1).exp().mean()
    assert quickstart.chance_of_right_answer(engine, batch) == pytest.approx(float(expected))
    assert 0 < float(expected) < 1e-2
    assert torch.isfinite(expected)


@pytest.mark.parametrize(("missing", "ranks"), [(None, 2), ("ray", 1), ("deepspeed", 1)])
def test_it_asks_for_what_is_there(missing, ranks, tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(quickstart, "find_spec", lambda name: None if name == missing else real(name))
    training, held_out = make_problems(digits=1, held_out=5, seed=0)
    config = quickstart.write_config(tmp_path, training, held_out, seed=4, overrides=["train.steps=7"])
    assert (config.train.ranks, config.seed, config.train.steps) == (ranks, 4, 7)


def test_a_tokenizer_of_digits_is_loaded_like_any_other(tmp_path):
    from rlhf_algos import load_tokenizer

    make_model(tmp_path, seed=0)
    character_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path))("12")["input_ids"] == character_tokenizer()("12")["input_ids"]


def test_a_directory_of_others_is_not_emptied(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="no quickstart wrote"):
        quickstart.run_quickstart(tmp_path)
    assert (tmp_path / "thesis.tex").exists()
