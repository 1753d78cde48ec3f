"""How tokens are drawn, and what the log-prob of a drawn token means."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """Settings of one generation request.

    >>> SamplingConfig(max_tokens=16, temperature=0.7).meaning
    LogProbMeaning(temperature=0.7, top_p=1.0, top_k=0, min_p=0.0)
    """

    max_tokens: int
    """Upper bound on sampled tokens per sample, the end-of-text token included."""
    min_tokens: int = 0
    """No end-of-text or stop token is sampled before this many tokens."""
    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy decoding."""
    top_p: float = 1.0
    """Nucleus mass; 1 switches it off."""
    top_k: int = 0
    """Number of candidates kept; 0 switches it off."""
    min_p: float = 0.0
    """Candidates below this share of the most likely token's probability are dropped; 0 switches it off."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a sample; the stop token stays in the sample with its log-prob."""
    stop: tuple[str, ...] = ()
    """Strings that end a sample; needs a backend with the `stop_strings` capability."""

    def __post_init__(self) -> None:
        checks = [
            (self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}"),
            (
                0 <= self.min_tokens <= self.max_tokens,
                f"min_tokens must lie in [0, max_tokens={self.max_tokens}], got {self.min_tokens}",
            ),
            (self.temperature >= 0, f"temperature must be 0 (greedy) or positive, got {self.temperature}"),
            (0 < self.top_p <= 1, f"top_p must lie in (0, 1], got {self.top_p}"),
            (self.top_k >= 0, f"top_k must be 0 (off) or positive, got {self.top_k}"),
            (0 <= self.min_p < 1, f"min_p must lie in [0, 1), got {self.min_p}"),
        ]
        for ok, message in checks:
            if not ok:
                raise ConfigError(f"sampling: {message}")

    @property
    def meaning(self) -> LogProbMeaning:
        """What the log-probs of samples drawn with these settings are conditioned on."""
        temperature = self.temperature if self.temperature > 0 else 1.0
        return LogProbMeaning(temperature=temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogProbMeaning:
    """The distribution a log-prob belongs to: softmax(logits / temperature), then truncated and renormalised.

    Two log-probs of one token may be compared or subtracted only if their meanings are equal: a ratio between
    a truncated sampler and an untruncated trainer is biased even when the weights are the same.
    Greedy samples carry log-probs at temperature 1.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def truncated(self) -> bool:
        """True if tokens outside a candidate set had probability zero."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0
