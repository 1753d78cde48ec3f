"""How tokens are drawn, and what the log-prob of a drawn token means."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """Settings of one generation request.

    >>> SamplingConfig(max_tokens=16, temperature=0.7).meaning
    LogProbMeaning(temperature=0.7, top_p=1.0, top_k=0, min_p=0.0, min_tokens=0)
    """

    max_tokens: int
    """Upper bound on sampled tokens per sample, the end-of-text token included."""
    min_tokens: int = 0
    """The first `min_tokens` tokens of a sample are drawn with end-of-text and stop tokens forbidden."""
    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy decoding."""
    top_p: float = 1.0
    """Nucleus mass, as a share of what min_p and top_k have left; 1 switches it off."""
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
        return LogProbMeaning(
            temperature=temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            min_tokens=self.min_tokens,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LogProbMeaning:
    """The distribution a log-prob belongs to: softmax(logits / temperature), then truncated and renormalised.

    The cuts come in the order min_p, top_k, top_p, each of what the one before has left. `min_tokens` cuts too:
    stop tokens are out for the first tokens of a sample, whose log-probs are larger by -log(1 - p(stop)) for it.

    Two log-probs of one token may be compared or subtracted only if their meanings are equal: a ratio between
    a truncated sampler and an untruncated trainer is biased even when the weights are the same.
    Greedy samples carry log-probs at temperature 1.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    """Tokens at the start of each sampled turn that were drawn with end-of-text and stop tokens forbidden."""

    @property
    def truncated(self) -> bool:
        """True if tokens outside a candidate set (top_p, top_k, min_p) had probability zero."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def restricted(self) -> bool:
        """True if some tokens had probability zero, unknown to a trainer: truncated, or with min_tokens."""
        return self.truncated or self.min_tokens > 0
