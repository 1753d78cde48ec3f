"""How long sequences may be, and what becomes of longer ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_core import ConfigError, DataError

DEFAULT_MAX_LENGTH = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthSection:
    """How long sequences may be, and what happens to longer ones."""

    max_length: int | None = None
    """Tokens of a whole sequence: prompt and answer, or an episode of several turns. Null for 1024 in offline
    training, and for max_prompt_tokens + rollout.sampling.max_tokens (episodes: 4096) in an online run."""
    max_prompt_tokens: int | None = None
    """Tokens of a prompt. Null for no limit of its own offline, and for 1024 in an online run."""
    long_prompts: Literal["error", "drop", "keep_end"] = "error"
    """A prompt that is too long, or leaves no room for an answer: stop, leave it out, or keep its end."""
    long_rows: Literal["truncate", "drop", "error"] = "truncate"
    """A sequence whose prompt fits but whose end does not (offline): cut the end, leave it out, or stop."""

    def __post_init__(self) -> None:
        for name, least in (("max_length", 2), ("max_prompt_tokens", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"lengths.{name} must be at least {least}, got {value}")

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of offline training."""
        return DEFAULT_MAX_LENGTH if self.max_length is None else self.max_length

    def fitted_prompt(self, token_ids: list[int], place: str, *, default: int | None = None) -> list[int] | None:
        """The tokens of a prompt within `max_prompt_tokens` (or `default`); None if it is to be left out.

        Raises:
            DataError: it is too long and `long_prompts` is error.
        """
        most = default if self.max_prompt_tokens is None else self.max_prompt_tokens
        if most is None or len(token_ids) <= most:
            return token_ids
        if self.long_prompts == "error":
            raise DataError(
                f"{place}: the prompt has {len(token_ids)} tokens, lengths.max_prompt_tokens is {most}; raise it, "
                "shorten the prompt, or write lengths.long_prompts: drop (or keep_end)"
            )
        return None if self.long_prompts == "drop" else token_ids[-most:]
