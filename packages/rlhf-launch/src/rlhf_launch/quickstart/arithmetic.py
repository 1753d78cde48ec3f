"""A synthetic task with a verifiable reward: the sum of two numbers, one token per character."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rlhf_core import Batch, pad_rows

PAD, EOS = "<pad>", "<eos>"
_CHARACTERS = "0123456789+="


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One addition."""

    left: int
    right: int

    @property
    def prompt(self) -> str:
        """The prompt as the model sees it: `12+34=`."""
        return f"{self.left}+{self.right}="

    @property
    def answer(self) -> str:
        """The response that is right: `46`."""
        return str(self.left + self.right)


def make_problems(*, digits: int, held_out: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """All sums of two numbers of up to `digits` digits, shuffled: the training ones and `held_out` others."""
    top = 10**digits
    problems = [Problem(left=left, right=right) for left in range(top) for right in range(top)]
    random.Random(seed).shuffle(problems)
    return problems[held_out:], problems[:held_out]


def write_problems(problems: Sequence[Problem], path: Path) -> Path:
    """Write JSONL with the columns `prompt` and `answer`; returns the path."""
    rows = [json.dumps({"prompt": problem.prompt, "answer": problem.answer}) for problem in problems]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def exact_sum(completions: list[str], *, answer: list[str], **columns: Any) -> list[float]:
    """Reward 1 for the right sum and nothing else, 0 otherwise."""
    return [float(completion.strip() == gold) for completion, gold in zip(completions, answer, strict=True)]


def character_tokenizer() -> Any:
    """A Transformers tokenizer with one token per character of the task."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *_CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS)


def make_model(path: Path, *, seed: int, hidden_size: int = 128, layers: int = 4) -> int:
    """Write a random character-level Qwen2 and its tokenizer; returns the number of parameters."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    tokenizer = character_tokenizer()
    config = Qwen2Config(
        vocab_size=32,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def supervised_batch(problems: Sequence[Problem], tokenizer: Any) -> Batch:
    """Prompt and answer in one row; the answer and the end-of-text token count for the loss."""
    prompts = [tokenizer(problem.prompt)["input_ids"] for problem in problems]
    answers = [[*tokenizer(problem.answer)["input_ids"], tokenizer.eos_token_id] for problem in problems]
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    masks = [[False] * len(prompt) + [True] * len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    return Batch(
        token_ids=pad_rows(rows, value=tokenizer.pad_token_id, dtype=torch.long),
        attention_mask=pad_rows([[True] * len(row) for row in rows], value=False, dtype=torch.bool),
        response_mask=pad_rows(masks, value=False, dtype=torch.bool),
    )
