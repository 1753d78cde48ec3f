"""A preference task with a known true reward, which no model is shown: names that can be spoken.

    python examples/chain/task.py runs/chain-data

writes a small random model and the data of `chain.yaml`. A prompt is the beginning of a name (`bak>`), an answer
six more letters. An annotator likes names in which consonants and vowels take turns, and is wrong now and then: the
reward model sees the choices between two answers, the policy sees the reward model.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from rlhf_core.testing.tiny import save_tiny_model

VOWELS, CONSONANTS = "aeiou", "bdkmt"
LETTERS = VOWELS + CONSONANTS
ANSWER = 6
HABIT = 0.6
"""Share of the letters of the data's answers that stand where they should."""
SHARPNESS = 10.0
"""Of the annotator: the better of two answers is chosen with probability sigmoid(SHARPNESS * their difference)."""


def true_reward(completions: Sequence[str], **columns: object) -> list[float]:
    """Share of the letters of each answer that stand where they should, consonants at the odd places, vowels at the
    even ones; of six letters, or of more in a longer answer."""
    return [spoken(answer) for answer in completions]


def spoken(answer: str) -> float:
    """See `true_reward`.

    >>> spoken("kabodi"), spoken("akobid"), spoken("kab"), spoken("kabodike")
    (1.0, 0.0, 0.5, 1.0)
    """
    right = sum(letter in (CONSONANTS, VOWELS)[place % 2] for place, letter in enumerate(answer))
    return right / max(ANSWER, len(answer))


def write_task(
    folder: Path, *, pairs: int = 3000, supervised: int = 1500, prompts: int = 400, seed: int = 0
) -> None:
    """Write model and data below `folder`.

    Args:
        folder: is made.
        pairs: of answers that the annotator compares.
        supervised: names to learn the form from: any letters.
        prompts: to learn from by reinforcement, as many again to measure on are 64; no prompt is in both.
        seed: of everything.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    save_tiny_model(folder / "base", hidden_size=64, seed=seed)
    starts = [first + second + third for first in LETTERS for second in LETTERS for third in LETTERS]
    draw.shuffle(starts)
    held_out, rest = starts[:64], starts[64:]

    def prompt() -> str:
        return f"{draw.choice(rest)}>"

    def answer() -> str:
        return "".join(draw.choice(letters(place)) for place in range(ANSWER))

    def letters(place: int) -> str:
        return (CONSONANTS, VOWELS)[(place + (draw.random() > HABIT)) % 2]

    _write(folder / "sft.jsonl", [{"prompt": prompt(), "completion": answer()} for _ in range(supervised)])
    _write(folder / "pairs.jsonl", [compared(prompt(), answer(), answer(), draw) for _ in range(pairs)])
    _write(folder / "prompts.jsonl", [{"prompt": f"{start}>"} for start in rest[:prompts]])
    _write(folder / "held-out.jsonl", [{"prompt": f"{start}>"} for start in held_out])


def compared(prompt: str, one: str, other: str, draw: random.Random) -> dict[str, str]:
    """What the annotator says of two answers."""
    first, second = true_reward([one, other])
    right = draw.random() < 1 / (1 + math.exp(-SHARPNESS * (first - second)))
    return {"prompt": prompt, "chosen": one if right else other, "rejected": other if right else one}


def _write(file: Path, rows: Sequence[dict[str, str]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write_task(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/chain-data"))
