"""An online loop of your own: GRPO in a page, from the pieces that `rlhf train` is made of.

    rlhf tiny-model /tmp/tiny && python examples/own_loop.py /tmp/tiny

Everything runs in this process: the torch engine trains, the Transformers backend generates. Other plans place the
same pieces elsewhere: `rank_plans("policy", "deepspeed", ..., ranks=8)`, `engine_plans("vllm", ...)` and
`open_executor("ray")` make a cluster of them, and the loop stays as it is.
"""

from __future__ import annotations

import sys

from rlhf_algos import GRPO
from rlhf_core import EngineConfig, OptimizerConfig, RolloutConfig, SamplingConfig
from rlhf_launch import (
    GroupMaker,
    LocalExecutor,
    Prompt,
    PromptStream,
    Rewarder,
    WeightSync,
    collate_groups,
    engine_plans,
    rank_plans,
    response_sampler,
    start_workers,
)
from rlhf_rollout import PythonReward
from transformers import AutoTokenizer


def share_of_letters(completion: str) -> float:
    """The reward: how much of a response is letters."""
    return sum(character.isalpha() for character in completion) / max(1, len(completion))


def train(model: str, *, steps: int = 20) -> list[float]:
    """Train a model on the reward above; returns the mean reward of each step."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [f"Write a word about {number}:" for number in range(16)]
    prompts = [Prompt(prompt_id=text, text=text, token_ids=tuple(tokenizer(text)["input_ids"])) for text in texts]
    stream = PromptStream(prompts, seed=0)
    recipe, reward = GRPO(), Rewarder(PythonReward(share_of_letters), tokenizer)
    policy = EngineConfig(model=model, optimizer=OptimizerConfig(learning_rate=3e-3))
    training = {"policy": rank_plans("policy", "torch", policy)}
    rollout = engine_plans("transformers", RolloutConfig(model=model, max_model_len=64))
    rewards = []
    with start_workers(LocalExecutor(), training, rollout) as workers:
        engine = workers.training["policy"]
        sync = WeightSync(engine, workers.pool, transports=workers.executor.transports)
        make = GroupMaker(response_sampler(workers.pool, SamplingConfig(max_tokens=8), seed=0), reward)
        for step in range(steps):
            groups = make.groups(stream.take(8), label=f"step {step}", samples=8)
            batch = collate_groups(groups)
            batch = batch.with_columns(old_log_probs=engine.score(batch).log_probs)
            batch, _ = recipe.prepare(batch, batch["scores"], batch["group_ids"], kl_coef=0.0)
            engine.step(batch, recipe.policy_loss())
            sync(step + 1)
            rewards.append(float(batch["scores"].mean()))
            print(f"step {step + 1:>3}  reward {rewards[-1]:.3f}", flush=True)
    return rewards


if __name__ == "__main__":
    train(sys.argv[1])
