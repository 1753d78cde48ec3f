"""How tokens are drawn, and what the log-prob of a drawn token means."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rlhf_core.checks import check_number, check_whole
from rlhf_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingConfig:
    """How the tokens of a generation request are drawn.

    >>> SamplingConfig(max_tokens=16, temperature=0.7).meaning == LogProbMeaning(temperature=0.7)
    True

    Raises:
        ConfigError: a value is not finite, or out of its range.
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
    repetition_penalty: float = 1.0
    """Logits of tokens that the prompt or the sample already has are divided by it where positive, multiplied where
    negative (Keskar et al. 2019); 1 switches it off. Penalties need a backend with the `penalties` capability."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that the sample already has; 0 switches it off. The prompt does not count."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token for each time that the sample already has it; 0 switches it off."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a sample; the stop token stays in the sample with its log-prob."""
    json_schema: str = ""
    """A JSON Schema, as text: a sample is JSON that fits it, as far as it comes, and tokens that would break it are
    out. Needs a backend with the `json_schema` capability; which keywords it knows is its own affair."""
    stop: tuple[str, ...] = ()
    """Strings that end a sample, with the token that completes one; needs a backend with the `stop_strings`
    capability. They are looked for in the text of the sampled tokens, behind the first `min_tokens`."""

    def __post_init__(self) -> None:
        check_whole("sampling: max_tokens", self.max_tokens, at_least=1)
        check_whole("sampling: min_tokens", self.min_tokens, at_least=0)
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"sampling: min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}"
            )
        check_number("sampling: temperature", self.temperature, at_least=0)
        check_number("sampling: top_p", self.top_p, above=0, at_most=1)
        check_whole("sampling: top_k", self.top_k, at_least=0)
        check_number("sampling: min_p", self.min_p, at_least=0, below=1)
        check_number("sampling: repetition_penalty", self.repetition_penalty, above=0)
        check_number("sampling: presence_penalty", self.presence_penalty, at_least=-2, at_most=2)
        check_number("sampling: frequency_penalty", self.frequency_penalty, at_least=-2, at_most=2)
        if self.json_schema:
            _check_schema(self.json_schema)
        if "" in self.stop:
            raise ConfigError("sampling: stop has an empty string, which every text contains; leave it out")

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
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            constrained=bool(self.json_schema),
        )

    @property
    def counts_sampled(self) -> bool:
        """True if penalties or a schema tell sampled tokens from the prompt's: no further request can continue a
        sample."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or bool(self.json_schema)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogProbMeaning:
    """The distribution a log-prob belongs to: softmax(logits / temperature), then truncated and renormalised.

    Penalties change the logits first, in the order repetition, frequency, presence. The cuts come in the order
    min_p, top_k, top_p, each of what the one before has left. `min_tokens` cuts too: stop tokens are out for the
    first tokens of a sample, whose log-probs are larger by -log(1 - p(stop)) for it.

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
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """The penalties count each sampled turn anew; see SamplingConfig."""
    constrained: bool = False
    """Tokens that break a JSON Schema had probability zero; before the other cuts."""

    def __post_init__(self) -> None:
        check_number("log-probs: temperature", self.temperature, above=0)
        check_number("log-probs: top_p", self.top_p, above=0, at_most=1)
        check_whole("log-probs: top_k", self.top_k, at_least=0)
        check_number("log-probs: min_p", self.min_p, at_least=0, below=1)
        check_whole("log-probs: min_tokens", self.min_tokens, at_least=0)
        check_number("log-probs: repetition_penalty", self.repetition_penalty, above=0)
        check_number("log-probs: presence_penalty", self.presence_penalty)
        check_number("log-probs: frequency_penalty", self.frequency_penalty)

    @property
    def truncated(self) -> bool:
        """True if tokens outside a candidate set (top_p, top_k, min_p) had probability zero."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def penalised(self) -> bool:
        """True if the logits of tokens that were there before were changed."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def plain(self) -> bool:
        """True if it is softmax(logits / temperature), the distribution that trainers compute and train."""
        return not (self.truncated or self.penalised or self.min_tokens or self.constrained)


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"sampling: json_schema is no JSON: {error}; write the schema itself, as text") from None
    if not isinstance(schema, dict):
        raise ConfigError(f"sampling: json_schema must be a JSON object, got {text[:80]!r}")
