"""A calculator as a tool: a model that seldom asks for it learns to ask always.

    python examples/agents/calculator.py

Products of two numbers of two digits, far beyond what so small a model can do in its head. A short supervised
warm-up shows it both ways to answer: one demonstration in eight calls the tool, in the chat template's own format
(`<tool_call>` with JSON), and answers with the result; the others answer at once, with a wrong number. Then the
reward alone, 1 for the right answer, teaches it to call the tool.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from agent_training import AgentTraining, StepResult, train
from rlhf_algos import GRPO, SFTConfig, TorchEngine, sft
from rlhf_core import Batch, EngineConfig, Loss, Observation, OptimizerConfig, SamplingConfig, pad_rows
from rlhf_rollout import AgentConfig, AgentTask, ToolEnvironment, TurnTokens

CALL_BEGIN, CALL_END = '{"name": "multiply", "arguments": {"left": ', "}}"
SPECIAL = ["<pad>", "<eos>", "<|user|>", "<|assistant|>", "<|tool|>", "<tool_call>", "</tool_call>"]
WORDS = [*SPECIAL, CALL_BEGIN, ', "right": ', CALL_END, *"0123456789*= "]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<eos>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    "{# calls: <tool_call>JSON</tool_call> #}"
)


def multiply(left: int, right: int) -> int:
    """Multiply two numbers.

    Args:
        left: one number.
        right: the other one.
    """
    return int(left) * int(right)


def right_product(answer: str, metadata: Mapping[str, Any]) -> float:
    """1 for the right answer."""
    return float(answer.strip() == metadata["answer"])


def tokenizer() -> Any:
    """One token per character, and one for each fixed part of a call."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    parts = "|".join(
        part.replace("{", r"\{").replace("}", r"\}") for part in WORDS[len(SPECIAL) : -len("0123456789*= ")]
    )
    made.pre_tokenizer = pre_tokenizers.Split(Regex(f"{parts}|."), "isolated")
    made.decoder = decoders.Fuse()
    # The marks of a call are not special: they are text that the model writes, and decoding must show them.
    made.add_special_tokens(SPECIAL[:5])
    made.add_tokens(SPECIAL[5:])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(path: Path, *, seed: int) -> None:
    """A random Qwen2 of two layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=128,
        intermediate_size=256,
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


def problem(draw: random.Random) -> dict[str, str]:
    """A row of data."""
    left, right = draw.randint(10, 99), draw.randint(10, 99)
    return {"prompt": f"{left}*{right}=", "answer": str(left * right), "left": str(left), "right": str(right)}


def demonstrations(draw: random.Random, count: int, fast: Any, *, calling: float) -> Batch:
    """Whole episodes as rows, the assistant's turns counted; a share of `calling` uses the tool."""
    turns = TurnTokens(fast)
    eos = fast.eos_token_id
    rows, masks = [], []
    for _ in range(count):
        row = problem(draw)
        ids = turns.opening((), Observation(messages=({"role": "user", "content": row["prompt"]},))).token_ids
        mask = [False] * len(ids)
        said = [str(draw.randint(100, 9801))]
        if draw.random() < calling:
            call = f'<tool_call>{CALL_BEGIN}{row["left"]}, "right": {row["right"]}{CALL_END}</tool_call>'
            said = [call, row["answer"]]
        for index, text in enumerate(said):
            if index:
                answer = turns.reply(Observation(messages=({"role": "tool", "content": row["answer"]},)), eos)
                ids, mask = ids + answer.token_ids, mask + [False] * len(answer.token_ids)
            tokens = [*fast(text, add_special_tokens=False)["input_ids"], eos]
            ids, mask = ids + tokens, mask + [True] * len(tokens)
        rows.append(ids)
        masks.append(mask)
    return Batch(
        token_ids=pad_rows(rows, value=fast.pad_token_id, dtype=torch.long),
        attention_mask=pad_rows([[True] * len(row) for row in rows], value=False, dtype=torch.bool),
        response_mask=pad_rows(masks, value=False, dtype=torch.bool),
    )


def warm_up(start: Path, target: Path, *, steps: int, seed: int, calling: float = 0.125) -> float:
    """Supervised steps on demonstrations; returns the last loss."""
    optimizer = OptimizerConfig(learning_rate=2e-3, warmup_steps=20)
    engine = TorchEngine(EngineConfig(model=str(start), optimizer=optimizer, seed=seed))
    fast, draw, loss = tokenizer(), random.Random(seed), Loss(function=sft, config=SFTConfig())
    last = float("nan")
    for step in range(steps):
        # Copying digits is learned from calls, so they are frequent at first and rare in the end.
        share = 0.75 if step < 0.75 * steps else calling
        last = engine.step(demonstrations(draw, 64, fast, calling=share), loss).loss
    target.mkdir(parents=True, exist_ok=True)
    engine.export(target)
    fast.save_pretrained(target)
    engine.close()
    return last


def training(model: Path, *, steps: int, seed: int = 0) -> AgentTraining:
    """The settings of the run."""
    return AgentTraining(
        model=str(model),
        tokenizer=tokenizer(),
        agent=AgentConfig(
            environment=ToolEnvironment,
            environment_options={"tools": [multiply], "grade": right_product},
            max_turns=3,
        ),
        sampling=SamplingConfig(max_tokens=16),
        max_tokens=60,
        recipe=GRPO(report_entropy=False, advantage_options={"scale": "none"}),
        optimizer=OptimizerConfig(learning_rate=3e-4),
        steps=steps,
        seed=seed,
    )


def tasks_of(step: int, *, seed: int = 0, prompts: int = 16, episodes: int = 8) -> list[AgentTask]:
    """Fresh problems."""
    draw = random.Random(f"{seed}/{step}")
    return [
        AgentTask(group_id=f"{step}/{index}", metadata=problem(draw), episodes=episodes, seed=draw.getrandbits(31))
        for index in range(prompts)
    ]


def write(folder: Path, *, seed: int, warm_up_steps: int, rows: int = 640) -> None:
    """A model that was warmed up, and problems as rows: what `langgraph_agent.yaml` begins with."""
    make_model(folder / "random", seed=seed)
    warm_up(folder / "random", folder / "model", steps=warm_up_steps, seed=seed)
    draw = random.Random(seed)
    (folder / "rows.jsonl").write_text("".join(json.dumps(problem(draw)) + "\n" for _ in range(rows)))


def main() -> None:
    """Warm up, train, and print the reward on the way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm-up-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--write", type=Path, metavar="FOLDER", help="write `model`, warmed up, and `rows.jsonl`, and stop"
    )
    arguments = parser.parse_args()
    if arguments.write is not None:
        write(arguments.write, seed=arguments.seed, warm_up_steps=arguments.warm_up_steps)
        return
    begin = time.perf_counter()

    def report(result: StepResult) -> None:
        if result.step % 5 == 0 or result.step == arguments.steps - 1:
            print(
                f"step {result.step:>4}  reward {result.reward:.3f}  calls {result.components['tool_calls']:.2f}  "
                f"errors {result.components['tool_errors']:.2f}  turns {result.components['turns']:.2f}  "
                f"log-prob gap {result.log_prob_gap:.1e}  {time.perf_counter() - begin:.0f} s",
                flush=True,
            )

    with tempfile.TemporaryDirectory() as folder:
        start, warmed_up = Path(folder) / "random", Path(folder) / "warmed-up"
        make_model(start, seed=arguments.seed)
        loss = warm_up(start, warmed_up, steps=arguments.warm_up_steps, seed=arguments.seed)
        print(f"warm-up: loss {loss:.3f}, {time.perf_counter() - begin:.0f} s", flush=True)
        settings = training(warmed_up, steps=arguments.steps, seed=arguments.seed)
        asyncio.run(train(settings, lambda step: tasks_of(step, seed=arguments.seed), report))


if __name__ == "__main__":
    main()
