"""The tiny models and their tokenizer."""

import pytest
import torch
from rlhf_core.testing.tiny import byte_tokenizer, save_tiny_model


def test_the_tokenizer_loses_nothing():
    tokenizer = byte_tokenizer()
    text = "Zwei plus zwei: 4 €?\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) == 261


def test_the_chat_template_marks_what_the_assistant_said():
    tokenizer = byte_tokenizer()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    encoded = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True, tokenize=True
    )
    said = [t for t, own in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if own]
    assert tokenizer.decode(said) == "Yo<|im_end|>"


@pytest.mark.parametrize("tied", [True, False])
def test_models_are_the_same_for_the_same_seed(tmp_path, tied):
    from transformers import AutoModelForCausalLM

    states = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        path = save_tiny_model(tmp_path / name, tied=tied, seed=seed)
        states.append(AutoModelForCausalLM.from_pretrained(path).model.embed_tokens.weight)
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
