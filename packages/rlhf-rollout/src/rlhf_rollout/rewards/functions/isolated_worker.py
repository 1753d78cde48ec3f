"""The program of a reward's worker process, which `isolated` starts.

Messages are pickles with their length in front, on the pipes that were standard input and output; what the
function prints goes to standard error. Both ends are the same user's processes on one machine.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import struct
import sys
from typing import Any, BinaryIO

from rlhf_core import RewardError, load_object

from rlhf_rollout.rewards.functions.python import PythonReward

_LENGTH = struct.Struct(">Q")


def write_message(pipe: BinaryIO, message: object) -> None:
    """Send an object."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def read_message(pipe: BinaryIO) -> Any:
    """The next object.

    Raises:
        EOFError: the other end is gone.
    """
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (size,) = _LENGTH.unpack(head)
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return pickle.loads(data)


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
    source, target = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    # A function that prints or reads must not touch the messages.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.path.insert(0, os.getcwd())
    serve(source, target)
