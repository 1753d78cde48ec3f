"""The environment seam: the other side of an episode of several turns.

An environment answers with messages, text or tokens. The policy's turns reach it as the tokens that were sampled,
with their text. The agent loop between the two never tokenises a turn again.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rlhf_core.data.generation import FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call that the policy wrote in its turn."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    """Why the call cannot be carried out as written (malformed JSON, ...); tell the policy. Empty if it can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One sampled turn, as an environment sees it."""

    token_ids: tuple[int, ...]
    """The sampled tokens, stop token included."""
    text: str
    """Decoded without special tokens."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls found in the turn, in order."""
    finish_reason: FinishReason = "stop"
    index: int = 0
    """Number of turns before this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What an environment answers: `messages`, `text` or `token_ids`, or nothing.

    >>> Observation(text="higher", reward=-0.1).done
    False
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    """Chat messages ({"role", "content", ...}), rendered by the tokenizer's chat template. Content may be a list of
    parts in the style of Transformers ({"type": "image"}, {"type": "text", "text": ...})."""
    text: str = ""
    """Plain text, tokenised without special tokens."""
    token_ids: tuple[int, ...] = ()
    """Tokens, appended as they are."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools that the chat template shows with the first `messages`; read after `reset`."""
    images: tuple[Any, ...] = ()
    """Images that the messages or tokens have placeholders for, in order."""
    reward: float = 0.0
    """For the turn that this answers; a final reward is that of the last turn. Ignored after `reset`."""
    done: bool = False
    """True ends the episode; the policy does not see the messages, text or tokens of this observation."""
    info: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log; the last value of each name counts."""

    def __post_init__(self) -> None:
        given = [name for name in ("messages", "text", "token_ids") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"an observation has {' and '.join(given)}; give one of them")
        if not math.isfinite(self.reward):
            raise ValueError(f"an observation's reward must be finite, got {self.reward}")


@runtime_checkable
class Closable(Protocol):
    """An environment or a reward that holds something which must be released: processes, connections, files."""

    def close(self) -> Any:
        """Release it. The `close` of an environment may be a coroutine."""
        ...


@runtime_checkable
class Environment(Protocol):
    """One episode's world; a new one is made for every episode. One that is `Closable` is closed at its end.

    The methods may be plain or `async`. Plain ones run in a thread of their own and may block; coroutines run on
    the event loop of all episodes and must not.
    """

    def reset(self, metadata: Mapping[str, Any]) -> Observation | Awaitable[Observation]:
        """Start the episode. `metadata` are the columns of the prompt's row of data.

        Messages of this observation take the place of the row's prompt; text and tokens follow the prompt.
        """
        ...

    def step(self, turn: Turn) -> Observation | Awaitable[Observation]:
        """Answer the policy's turn."""
        ...
