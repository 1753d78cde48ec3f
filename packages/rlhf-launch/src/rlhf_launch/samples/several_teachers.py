"""Several teachers: which of them judges a row, and what they say put together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rlhf_core import DataError, RaggedColumn
from rlhf_rollout import ScoredGroup

from rlhf_launch.samples.prompts import Prompt
from rlhf_launch.workers.prepare import columns_of_rows

NAMED_BY = "teacher"
"""The column of the data that names the teacher of a prompt."""


def check_teachers_named(prompts: Sequence[Prompt], teachers: Collection[str], where: str) -> None:
    """Refuse prompts that name no teacher, or one that there is not.

    Raises:
        DataError: the first such prompt.
    """
    for prompt in prompts:
        if (named := prompt.metadata.get(NAMED_BY)) not in teachers:
            raise DataError(
                f"{where}: prompt {prompt.prompt_id} has {str(named)[:60]!r} as {NAMED_BY!r}, and model.teachers "
                f"has {', '.join(sorted(teachers))}; name one of them, or write columns: {{{NAMED_BY}: its_column}}"
            )


def rows_of_teachers(groups: Sequence[ScoredGroup]) -> dict[str, list[int]]:
    """The rows of a step that each teacher judges, in their order, by the teacher's name."""
    rows: dict[str, list[int]] = {}
    trajectories = (trajectory for group in groups for trajectory in group.trajectories)
    for row, trajectory in enumerate(trajectories):
        rows.setdefault(str(trajectory.metadata.get(NAMED_BY)), []).append(row)
    return rows


def joined_judgements(
    said: Mapping[str, RaggedColumn], judged: Mapping[str, Sequence[int]], rows: int
) -> dict[str, RaggedColumn]:
    """`teacher_log_probs` of all rows, of those that each teacher gave for its own.

    Args:
        said: log-probs of each teacher's rows, token by token.
        judged: which rows of the step these are.
        rows: of the step.
    """
    parts = [{"teacher_log_probs": said[name]} for name in said]
    return columns_of_rows(parts, [judged[name] for name in said], rows)  # type: ignore[return-value]
