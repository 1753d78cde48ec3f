"""The program of a reward's worker process, which `isolated` starts."""

from __future__ import annotations

import asyncio
from typing import BinaryIO

from rlhf_core import RewardError, load_object

from rlhf_rollout.rewards.functions.python import PythonReward
from rlhf_rollout.sandbox.worker_process import read_message, take_pipes, write_message


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Make the reward that the first message describes, then score batches until the pipe ends."""
    try:
        setup = read_message(source)
        prepare = setup.pop("prepare")
        reward = PythonReward(**setup)
        if prepare is not None:
            load_object(prepare, what="prepare")()
    except Exception as error:
        write_message(target, ("refused", f"{type(error).__name__}: {error}", ()))
        return
    write_message(target, ("ready", reward.name, tuple(reward.columns)))
    while True:
        try:
            trajectories, texts = read_message(source)
        except EOFError:
            return
        try:
            answer = ("scores", asyncio.run(reward.score(trajectories, texts)), ())
        except RewardError as error:
            answer = ("error", str(error), error.sample_ids)
        write_message(target, answer)


def main() -> None:
    """Take the pipes for messages alone, then serve."""
    serve(*take_pipes())
