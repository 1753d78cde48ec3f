"""An agent that knows nothing of training: it asks a model by OpenAI's protocol, checks, and asks once more.

`rlhf train second_chance.yaml` trains the model that it talks to. The first answer to a task opens a conversation;
a wrong one is pointed out, once. The program tells what each answer earned: a right first answer is worth more than
a right second one.

It needs no framework, to show all there is; a client of `openai` with `task.base_url` and `task.api_key` does, too.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from rlhf_rollout import ProgramTask

FIRST, SECOND = 1.0, 0.5


def ask(task: ProgramTask, messages: list[dict[str, Any]]) -> str:
    """The model's answer to a conversation."""
    request = urllib.request.Request(
        f"{task.base_url}/chat/completions",
        data=json.dumps({"model": task.model, "messages": messages}).encode(),
        headers={"Authorization": f"Bearer {task.api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)["choices"][0]["message"]["content"] or ""


def number_in(text: str) -> str:
    """The digits of the last number in a text; empty if there is none."""
    words = "".join(sign if sign.isdigit() else " " for sign in text).split()
    return words[-1] if words else ""


def solve(task: ProgramTask) -> dict[str, list[float]]:
    """Answer a question whose right number is the last in the column `answer`; returns what each answer earned."""
    messages = [dict(message) for message in task.messages]
    right = number_in(str(task.metadata["answer"]).replace(",", ""))
    earned: list[float] = []
    for worth in (FIRST, SECOND):
        answer = ask(task, messages)
        solved = number_in(answer.replace(",", "")) == right
        earned.append(worth if solved else 0.0)
        if solved:
            break
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": "That is wrong. Try again, and end with the number."},
        ]
    return {"answers": earned}
