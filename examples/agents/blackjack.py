"""A random model and the rows for `blackjack.yaml`: Gymnasium's Blackjack, learned from nothing.

    python blackjack.py runs/blackjack
    rlhf train blackjack.yaml

A turn is one token: 0 sticks, 1 hits. The environment answers with the player's sum, the dealer's card, and whether
an ace counts 11. A win is worth 1, a draw 0, a loss -1. Two of a random model's 50 tokens are actions. Over
10,000 episodes, sticking or hitting at random was worth -0.39, sticking always -0.18, basic strategy -0.04.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

MARKS = ["<pad>", "<eos>", "<|user|>", "<|assistant|>"]
REFUSAL = ["Answer", "with", "a", "whole", "number", "from", "to", "."]
"""Words of what `GymnasiumEnvironment` says to a turn without an action."""
WORDS = [*MARKS, *map(str, range(32)), *REFUSAL, *"(),", "True", "False", "?"]
ROWS = 640
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'user' %}{{ '<eos>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tokenizer() -> Any:
    """A token for each number and each word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()])
    made.decoder = decoders.Fuse()
    made.add_special_tokens(MARKS)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(path: Path, *, seed: int) -> None:
    """A random Qwen2 of two layers, 0.1 M parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer().save_pretrained(path)


def make(folder: Path, *, seed: int = 0) -> None:
    """Write `model` and `rows.jsonl` into a folder. A row's seed draws the cards, the same for all of its group."""
    make_model(folder / "model", seed=seed)
    rows = "".join(
        json.dumps({"prompt": "", "seed": index}) + "\n" for index in range(seed * ROWS, (seed + 1) * ROWS)
    )
    (folder / "rows.jsonl").write_text(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make(arguments.folder, seed=arguments.seed)
