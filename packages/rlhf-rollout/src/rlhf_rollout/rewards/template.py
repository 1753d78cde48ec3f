"""What a judge is asked: text with the fields of a sample in braces."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlhf_core import DataError

_FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")


def template_columns(template: str, responses: frozenset[str] = frozenset({"completion"})) -> frozenset[str]:
    """Columns of the data that a template names, all but those of the responses.

    >>> sorted(template_columns("{prompt} {completion} {rubric}, not {} or {0}"))
    ['prompt', 'rubric']
    """
    return frozenset(_FIELD.findall(template)) - responses


def fill(template: str, values: Mapping[str, Any], sample: str) -> str:
    """The template with its fields filled in; braces in the values mean nothing.

    Raises:
        DataError: the template names a column that the sample does not have.
    """

    def field_of(match: re.Match[str]) -> str:
        if match.group(1) not in values:
            raise DataError(
                f"judge: the template names {{{match.group(1)}}}, which sample {sample!r} does not have (columns: "
                f"{', '.join(sorted(values))}); add the column or change the template"
            )
        return str(values[match.group(1)])

    return _FIELD.sub(field_of, template)
