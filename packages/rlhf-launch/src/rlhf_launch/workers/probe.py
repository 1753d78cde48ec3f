"""The check of freshly loaded weights that a rollout engine's worker carries out, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_core import Precision, ProbeGap, ProbeLimit, TokenRows

Scores = tuple[tuple[float, ...], ...]
"""Log-probs of the tokens of each row, from the second on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeReport:
    """What an engine made of the probe."""

    gap: ProbeGap
    seconds: float
    fault: str | None = None
    """Why the engine's weights are wrong; None if they are right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeCheck:
    """The probe with the policy's answer, computed with the weights that are sent."""

    version: int
    rows: TokenRows
    expected: Scores
    limit: ProbeLimit
    since: int
    """A version that was probed before."""
    moved: float = 0.0
    """By how many nats the policy's log-probs have changed on average since that version, if an engine that took
    the change must show it in some bit; else 0."""

    def judge(self, found: Scores, last: tuple[int, Scores] | None, seconds: float) -> ProbeReport:
        """Compare an engine's log-probs with the policy's, and with its `last` ones, of the version they say."""
        gap = ProbeGap.between(self.expected, found)
        fault = None
        if not self.limit.allows(gap):
            fault = f"its log-probs differ from the policy's by {gap}; rounding explains {self.limit}"
        elif self.moved and last == (self.since, found):
            fault = (
                f"it gives the same log-probs as before, bit for bit, although the policy's have changed by "
                f"{self.moved:.2g} nats on average: it has kept its old weights"
            )
        return ProbeReport(gap=gap, seconds=seconds, fault=fault)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """What one engine made of a sync."""

    seconds: float
    probe: ProbeReport | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbedModel:
    """What must be known of a policy to choose a probe for it."""

    precision: Precision
    adapters: bool
    """Whether it trains adapters; merged and rounded, a small change of them may leave every weight as it was."""
    vocab_size: int
    reserved: frozenset[int]
    """Ids that stand for something else than text, such as images."""
    experts: int = 0
    """Experts of a layer; 0 for a dense model."""
    experts_per_token: int = 0


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


def describe_model(path: str, *, precision: Precision, adapters: bool, trust_remote_code: bool) -> ProbedModel:
    """Read what a probe must know of a model in its configuration."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    ids = {
        value
        for part in (config, text)
        for name, value in part.to_dict().items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }

    def number(names: tuple[str, ...]) -> int:
        return next((value for name in names if isinstance(value := getattr(text, name, None), int)), 0)

    return ProbedModel(
        precision=precision,
        adapters=adapters,
        vocab_size=text.vocab_size,
        reserved=frozenset(ids),
        experts=number(_EXPERTS),
        experts_per_token=number(_PER_TOKEN),
    )
