"""A number-guessing game, learned from nothing: a random model finds something close to binary search.

    python examples/agents/guessing_game.py

The environment keeps a secret number of 1 to 15. Each turn is one guess, a token of its own; the answer is `higher`
or `lower`, again one token, and a right guess ends the episode. There are 4 guesses, just enough for binary search.
Turns are rewarded as they are played: 1 for the right number, a small loss for a wrong one, a larger one for what
is no number or contradicts an earlier answer.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agent_training import AgentTraining, StepResult, train
from rlhf_algos import GRPO
from rlhf_core import Observation, OptimizerConfig, SamplingConfig, Turn
from rlhf_rollout import AgentConfig, AgentTask

NUMBERS = 15
GUESSES = 4
UPDATES = 4
WORDS = ["<pad>", "<eos>", "guess", "higher", "lower", "again", *map(str, range(1, NUMBERS + 1))]


class GuessingGame:
    """Environment of one secret, in the column `secret`."""

    def __init__(self) -> None:
        self._secret = 0
        self._low, self._high = 1, NUMBERS

    async def reset(self, metadata: Mapping[str, Any]) -> Observation:
        """Think of the number; the prompt says the rest."""
        self._secret = metadata["secret"]
        return Observation()

    async def step(self, turn: Turn) -> Observation:
        """Compare a guess."""
        text = turn.text.strip()
        if not text.isdigit():
            return Observation(text="again", reward=-0.3, info={"solved": 0})
        guess = int(text)
        if guess == self._secret:
            return Observation(reward=1.0, done=True, info={"solved": 1})
        possible = self._low <= guess <= self._high
        if guess < self._secret:
            self._low, said = max(self._low, guess + 1), "higher"
        else:
            self._high, said = min(self._high, guess - 1), "lower"
        return Observation(text=said, reward=-0.05 if possible else -0.2, info={"solved": 0})


def tokenizer() -> Any:
    """One token per word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def make_model(path: Path, *, seed: int) -> None:
    """A random Qwen2 of two layers."""
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
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer().save_pretrained(path)


def training(model: Path, *, steps: int, seed: int = 0) -> AgentTraining:
    """The settings of the run."""
    return AgentTraining(
        model=str(model),
        tokenizer=tokenizer(),
        agent=AgentConfig(environment=GuessingGame, max_turns=GUESSES),
        # A turn is one token, whichever it is.
        sampling=SamplingConfig(max_tokens=1, stop_token_ids=tuple(range(len(WORDS)))),
        max_tokens=16,
        # Without the entropy bonus it settles on a first guess too soon and never finds the middle.
        recipe=GRPO(advantage="agent_training:turn_advantages", loss_options={"entropy_coef": 0.02}),
        optimizer=OptimizerConfig(
            learning_rate=2e-3,
            warmup_steps=5,
            schedule="linear",
            total_steps=steps * UPDATES,
            min_learning_rate_ratio=0.1,
        ),
        steps=steps,
        minibatches=UPDATES,
        seed=seed,
    )


def tasks_of(step: int, *, seed: int = 0, episodes: int = 16) -> list[AgentTask]:
    """Every secret once, with a group of episodes each."""
    return [
        AgentTask(
            group_id=f"{step}/{secret}",
            prompt_token_ids=(WORDS.index("guess"),),
            metadata={"secret": secret},
            episodes=episodes,
            seed=random.Random(f"{seed}/{step}/{secret}").getrandbits(31),
        )
        for secret in range(1, NUMBERS + 1)
    ]


def main() -> None:
    """Train and print the reward on the way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begin = time.perf_counter()

    def report(result: StepResult) -> None:
        if result.step % 25 == 0 or result.step == arguments.steps - 1:
            print(
                f"step {result.step:>4}  reward {result.reward:6.3f}  solved {result.components['solved']:.3f}  "
                f"guesses {result.components['turns']:.2f}  log-prob gap {result.log_prob_gap:.1e}  "
                f"{time.perf_counter() - begin:.0f} s",
                flush=True,
            )

    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), seed=arguments.seed)
        settings = training(Path(folder), steps=arguments.steps, seed=arguments.seed)
        asyncio.run(train(settings, lambda step: tasks_of(step, seed=arguments.seed), report))


if __name__ == "__main__":
    main()
