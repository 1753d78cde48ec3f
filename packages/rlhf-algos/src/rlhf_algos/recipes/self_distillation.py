"""Self-distillation: the teacher is the model itself, shown more than it was asked with."""

from __future__ import annotations

import math
import string
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rlhf_core import ConfigError

from rlhf_algos.recipes.distillation import OnPolicyDistillation

TEACHER_PROMPT = "teacher_prompt"
"""Column of the data with the prompt that the teacher is shown: text, or messages."""
SUCCESS = "success"
"""Place in a teacher's prompt for the answer of another sample of the same prompt."""


@runtime_checkable
class ShowsTeacherMore(Protocol):
    """A recipe whose teacher judges a sample after another prompt than the one that it was sampled from.

    A batch has the column `taught` [rows] then: False where there was nothing to show the teacher.
    """

    @property
    def teacher_template(self) -> str | None:
        """The teacher's prompt, made from the columns of a row; None if the data has it as `teacher_prompt`."""
        ...

    @property
    def success_score(self) -> float:
        """The score from which on a sample counts as a success, to be shown in the place `{success}`."""
        ...

    @property
    def shows_success(self) -> bool:
        """Whether the template has the place `{success}`."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfDistillation(OnPolicyDistillation):
    """On-policy distillation from the model itself with more in its prompt.

    The advantage of a token is that of `OnPolicyDistillation`: its log-prob after the teacher's prompt minus that
    after its own. What the teacher is shown is the method: a demonstration from the data (SDFT, Shenfeld et al.
    2026, 2601.19897: `"{prompt} An example of an answer: {answer}. Now answer yourself."`), or a
    right answer that another sample of the same prompt has found (SDPO, Huebotter et al. 2026, 2601.20802:
    `{success}`). Both papers take the divergence over all tokens of the vocabulary and a slowly moving average of
    the weights as the teacher; here it is the sampled token's part of the reverse KL, and the teacher is the model
    before the first step, or the one that a run names.
    """

    teacher_template: str | None = None
    """The teacher's prompt: text with `{prompt}`, names of the data's columns in braces, and `{success}` for the
    best other answer to the same prompt. Where prompts are messages it takes the place of the last one's text. None
    if the data has it, as the column `teacher_prompt`: text, or messages."""
    success_score: float = 1.0
    """The score from which on a sample counts as a success, for `{success}`."""

    def __post_init__(self) -> None:
        OnPolicyDistillation.__post_init__(self)
        if not math.isfinite(self.success_score):
            raise ConfigError(f"recipe: success_score must be a finite number, got {self.success_score}")
        if self.teacher_template is None:
            return
        try:
            found = {name for _, name, _, _ in string.Formatter().parse(self.teacher_template) if name is not None}
        except ValueError as error:
            raise ConfigError(
                f"recipe: teacher_template is no template ({error}); write {{{{ and }}}} for braces in the text"
            ) from None
        if odd := [name for name in sorted(found) if not name.isidentifier()]:
            raise ConfigError(
                f"recipe: teacher_template has the place {{{odd[0]}}}; write names of columns, {{prompt}} or "
                "{success}, and {{ and }} for braces in the text"
            )
        if not found - {"prompt"}:
            raise ConfigError(
                "recipe: teacher_template shows the teacher nothing that the prompt does not have; name a column "
                "of the data, as {answer}, or {success}"
            )

    @property
    def shows_success(self) -> bool:
        """Whether the template has the place `{success}`."""
        return self.teacher_template is not None and "{" + SUCCESS + "}" in self.teacher_template

    @property
    def min_samples_per_prompt(self) -> int:
        """Two where one may show the other how it is done."""
        # The class is named, as `slots` makes another one than the one that a bare super() would look for.
        least = super(SelfDistillation, self).min_samples_per_prompt
        return max(2, least) if self.shows_success else least
