"""A reward function for worker processes that has every fault, chosen by the text."""

import os
import random
import signal
import subprocess
import time


def faulty(completions: list[str], *, pid_file: str = "", scale: float = 1.0) -> list[float]:
    """The length of each text, unless one of them is the name of a fault."""
    print("what a function prints must not reach the messages")
    if "hang" in completions:
        # Not by its number, which is another one outside a process namespace.
        word = f"600.{random.randrange(10**9):09d}"
        subprocess.Popen(["sleep", word])
        with open(pid_file, "w") as file:
            file.write(word)
        while True:
            time.sleep(0.01)
    if "die" in completions:
        os.kill(os.getpid(), signal.SIGKILL)
    if "raise" in completions:
        raise ValueError("cannot judge this")
    if "too few" in completions:
        return [1.0] * (len(completions) - 1)
    return [float("nan") if text == "nan" else scale * len(text) for text in completions]


LOADED = []


def prepare() -> None:
    """Takes longer than the deadline of a batch."""
    time.sleep(2.5)
    LOADED.append(7.0)


def prepared(completions: list[str]) -> list[float]:
    """What was loaded."""
    return LOADED * len(completions)
