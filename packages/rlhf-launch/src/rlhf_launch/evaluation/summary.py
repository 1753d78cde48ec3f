"""The numbers of a data set, from rows that `rlhf generate` wrote."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rlhf_core import ConfigError, DataError

from rlhf_launch.online.evaluation import pass_at_k
from rlhf_launch.tables import aligned


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What a model did on a data set. Rewards are None where no sample has one."""

    model: str
    data: str
    prompts: int
    samples: int
    dropped: int
    """Samples without a score, by the reward's failure handling; they count in no reward and no pass@k."""
    reward: float | None
    """Mean over the prompts of the mean over a prompt's samples."""
    standard_error: float | None
    """Of `reward`, with prompts as the units: samples of one prompt are not independent. None for one prompt."""
    passed: Mapping[int, float | None]
    """pass@k by k; None where no prompt has k scores."""
    truncated: float
    """Share of samples that `max_tokens` cut off."""
    response_length: float
    """Mean tokens of a response."""


def summarise_rows(
    rows: Sequence[Mapping[str, Any]], ks: Sequence[int], *, model: str, data: str, pass_score: float = 0.5
) -> Summary:
    """The summary of the rows of one model and one data set.

    pass@k is the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, eq. 1), a mean over the prompts that
    have k scores. The standard error is that of a mean over clusters (Miller 2024, arXiv:2411.00640).

    Args:
        rows: a prompt each, as `rlhf generate` writes them; at least one.
        ks: the k of pass@k.
        model: its label.
        data: the set's label.
        pass_score: a sample passes with a score above this.
    """
    samples = [sample for row in rows for sample in row["samples"]]
    if not samples:
        raise DataError(f"no samples of {model!r} on {data!r}; the set is empty, or all its prompts were too long")
    scores = [[s["score"] for s in row["samples"] if s.get("score") is not None] for row in rows]
    means = [fmean(values) for values in scores if values]
    counts = [(len(values), sum(value > pass_score for value in values)) for values in scores]
    passed: dict[int, float | None] = {}
    for k in ks:
        chances = [pass_at_k(n, right, k) for n, right in counts if n >= k]
        passed[k] = fmean(chances) if chances else None
    return Summary(
        model=model,
        data=data,
        prompts=len(rows),
        samples=len(samples),
        dropped=sum("score_error" in sample for sample in samples),
        reward=fmean(means) if means else None,
        standard_error=stdev(means) / math.sqrt(len(means)) if len(means) > 1 else None,
        passed=passed,
        truncated=fmean(sample["finish_reason"] == "length" for sample in samples),
        response_length=fmean(len(sample["token_ids"]) for sample in samples),
    )


def as_table(summaries: Sequence[Summary], ks: Sequence[int]) -> str:
    """A line for each model and data set."""
    titles = ("model", "data", "prompts", "samples", "dropped", "reward", "+-", *(f"pass@{k}" for k in ks))
    lines: list[Sequence[str]] = [(*titles, "truncated", "length")]
    for found in summaries:
        lines.append(
            (
                found.model,
                found.data,
                *(str(number) for number in (found.prompts, found.samples, found.dropped)),
                _shown(found.reward),
                _shown(found.standard_error),
                *(_shown(found.passed[k]) for k in ks),
                f"{found.truncated:.1%}",
                f"{found.response_length:.1f}",
            )
        )
    return aligned(lines, right=range(2, len(lines[0])))


def as_plain(summary: Summary) -> dict[str, Any]:
    """As JSON has it, pass@k under `pass@<k>`."""
    plain = asdict(summary)
    return plain | {f"pass@{k}": value for k, value in plain.pop("passed").items()}


def check_ks(ks: Sequence[int], samples: int) -> None:
    """Refuse a k that the samples of a prompt cannot give.

    Raises:
        ConfigError: a k below 1 or above `samples`, or one that is there twice.
    """
    for k in ks:
        if not 1 <= k <= samples:
            raise ConfigError(
                f"pass@{k} needs k from 1 to the samples of a prompt, which are {samples}; give --samples {k}"
                if k > samples
                else f"pass@{k}: k must be at least 1"
            )
    if len(set(ks)) < len(ks):
        raise ConfigError(f"--k has a number twice: {', '.join(map(str, ks))}")


def read_samples(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file of samples, each checked.

    Raises:
        DataError: no such file, or a row that is not one of `rlhf generate`; names the row.
    """
    if not path.is_file():
        raise DataError(
            f"there is no samples file {str(path)!r}; give one that `rlhf generate` or `rlhf eval` wrote"
        )
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                _check_row(row)
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path} row {number} is not one of `rlhf generate` ({type(error).__name__}: {error}); "
                    "run the command that wrote it again to complete the file, or give another"
                ) from None
            yield row


def check_counts(path: Path, rows: Sequence[Mapping[str, Any]], ks: Collection[int]) -> None:
    """Refuse a file of samples that cannot give what is asked for.

    Raises:
        DataError: no row, a sample that was never scored, or a row with fewer samples than a k.
    """
    if not rows:
        raise DataError(f"{path} has no rows; give a file of samples")
    for number, row in enumerate(rows, 1):
        if any("score" not in sample for sample in row["samples"]):
            raise DataError(
                f"{path} row {number} has a sample without a score; generate it with a reward "
                "(rlhf generate --reward module:function)"
            )
        if len(row["samples"]) < max(ks):
            raise DataError(
                f"{path} row {number} has {len(row['samples'])} samples, too few for pass@{max(ks)}; "
                f"give --k {len(row['samples'])} or less, or generate more"
            )


def _check_row(row: Mapping[str, Any]) -> None:
    for sample in row["samples"]:
        len(sample["token_ids"])
        if sample["finish_reason"] is None:
            raise ValueError("a sample without a finish_reason")
        score = sample.get("score")
        if score is not None and not math.isfinite(score):
            raise ValueError(f"the score {score}")
    if not isinstance(row["prompt_id"], str):
        raise TypeError(f"prompt_id is {row['prompt_id']!r}, not a text")


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
