import os
import shutil

import pytest
from rlhf_algos import DataSource
from rlhf_algos.run_directory.fingerprint import (
    data_fingerprint,
    model_fingerprint,
    run_fingerprint,
    tokenizer_fingerprint,
)
from rlhf_core.testing.tiny import byte_tokenizer, save_tiny_model


def test_data_is_known_by_its_content_wherever_it_lies(tmp_path):
    (tmp_path / "a.jsonl").write_text("123")
    shutil.copy(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    first, copy = (data_fingerprint(DataSource(path=str(tmp_path / name))) for name in ("a.jsonl", "b.jsonl"))
    assert first == copy
    assert first["bytes"] == 3
    (tmp_path / "b.jsonl").write_text("124")
    assert data_fingerprint(DataSource(path=str(tmp_path / "b.jsonl"))) != first


def test_a_directory_is_known_by_all_its_files_and_their_names(tmp_path):
    source = DataSource(path=str(tmp_path))
    (tmp_path / "a.jsonl").write_text("1")
    (tmp_path / "b.jsonl").write_text("2")
    before = data_fingerprint(source)
    os.rename(tmp_path / "a.jsonl", tmp_path / "c.jsonl")
    assert data_fingerprint(source) != before


def test_a_tokenizer_is_not_changed_by_being_used():
    tokenizer = byte_tokenizer()
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(tokenizer) == before
    tokenizer.chat_template += " "
    assert tokenizer_fingerprint(tokenizer) != before


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden_size=32)


def test_a_model_that_was_copied_is_the_same_and_another_is_not(model, tmp_path):
    shutil.copytree(model, tmp_path / "copy")
    assert model_fingerprint(str(tmp_path / "copy"), moved=True) == model_fingerprint(model, moved=True)
    other = save_tiny_model(tmp_path / "other", hidden_size=32, seed=1)
    assert model_fingerprint(other, moved=True) != model_fingerprint(model, moved=True)


def test_a_run_names_each_part(model, tmp_path):
    (tmp_path / "a.jsonl").write_text("1")
    made = run_fingerprint(
        data=[DataSource(path=str(tmp_path / "a.jsonl"))],
        tokenizer=byte_tokenizer(),
        models={"model.path": model, "model.reference": None},
        seed=3,
    )
    assert set(made) == {"data.train[0]", "tokenizer", "model.path", "seed"}
    assert made["seed"] == 3
