"""An import as a file of ours and as an account for the person who asked for it."""

from __future__ import annotations

import textwrap
from typing import Any

import yaml

from rlhf_launch.importing.engine import Finding, Import, Outcome

_WIDTH = 110


class _Dumper(yaml.SafeDumper):
    """No anchors: a value that stands at two keys is written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def as_yaml(made: Import) -> str:
    """The file: what was left out or differs as comments, then the settings."""
    lines = [f"# {made.command} FILE", f"# From {made.source}."]
    notable = [f for f in made.findings if f.outcome in (Outcome.NOTED, Outcome.UNAVAILABLE, Outcome.UNKNOWN)]
    if notable or made.remarks or made.unwritten:
        lines.append("#")
    for finding in sorted(notable, key=lambda finding: finding.outcome is Outcome.NOTED):
        lines += _wrapped(_line(finding), "# ")
    for remark in (*made.unwritten, *made.remarks):
        lines += _wrapped(remark, "# ")
    text = yaml.dump(
        made.settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=_WIDTH
    )
    return "\n".join(lines) + "\n\n" + text


def account(made: Import) -> str:
    """Every setting with what became of it, those to look at first."""
    lines: list[str] = []
    for outcome in (*reversed(Outcome),):
        found = [finding for finding in made.findings if finding.outcome is outcome]
        if not found:
            continue
        lines.append(f"{outcome} ({len(found)}):")
        if outcome is Outcome.EXACT:
            lines += _wrapped(", ".join(finding.setting for finding in found), "  ")
            continue
        for finding in found:
            note = f": {finding.note}" if finding.note else ""
            lines += _wrapped(f"{_setting(finding)}{note}", "  ")
    for part in made.unwritten:
        lines += _wrapped(f"to be written: {part}", "")
    for remark in made.remarks:
        lines += _wrapped(f"note: {remark}", "")
    word = "fully" if made.complete else f"partly: {len(made.left_out) + len(made.unwritten)} left out"
    lines.append(f"{len(made.findings)} settings, mapped {word}; run it with `{made.command} FILE`")
    return "\n".join(lines)


def _line(finding: Finding) -> str:
    return f"{_setting(finding)} ({finding.outcome}): {finding.note}"


def _setting(finding: Finding) -> str:
    if finding.value is True or "wandb" in finding.setting:  # a key of an account is not printed
        return finding.setting
    value = " ".join(map(str, finding.value)) if isinstance(finding.value, list | tuple) else str(finding.value)
    joint = "=" if not finding.setting.startswith("--") else " "
    return f"{finding.setting}{joint}{value.encode('unicode_escape').decode() if value.isascii() else value}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
        break_long_words=False,
    )
