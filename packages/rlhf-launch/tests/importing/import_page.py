"""The example commands of the other frameworks, and the table of docs/importing.md that is made of them.

Run this file to write the table anew.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path

import yaml
from rlhf_core import ConfigError
from rlhf_launch.importing.engine import Import
from rlhf_launch.importing.openrlhf.command import import_openrlhf
from rlhf_launch.importing.trl.command import import_trl
from rlhf_launch.importing.verl.command import import_verl

EXAMPLES = Path(__file__).parent / "examples"
PAGE = Path(__file__).parents[4] / "docs" / "importing.md"
START, END = "<!-- made by packages/rlhf-launch/tests/importing/import_page.py -->", "<!-- end -->"
GROUPS = {
    "OpenRLHF, classic names": ("openrlhf-classic.txt", import_openrlhf),
    "OpenRLHF, names with dots": ("openrlhf-dotted.txt", import_openrlhf),
    "verl": ("verl.txt", import_verl),
}


def commands(file: str) -> dict[str, list[str]]:
    """Name of a script -> the words of its command."""
    found: dict[str, list[str]] = {}
    for part in (EXAMPLES / file).read_text(encoding="utf-8").split("\n== ")[1:]:
        name, _, text = part.partition("\n")
        found[name.strip()] = shlex.split(text)
    return found


def imports() -> Iterator[tuple[str, str, Import | ConfigError]]:
    """Group, name and import of every example; the error of those that have no counterpart."""
    for group, (file, convert) in GROUPS.items():
        for name, command in commands(file).items():
            try:
                yield group, name, convert(command)
            except ConfigError as error:
                yield group, name, error
    for name, example in yaml.safe_load((EXAMPLES / "trl.yaml").read_text(encoding="utf-8")).items():
        yield "TRL", name, import_trl(example["method"], example["settings"], source=name)


def table() -> str:
    """The tables of the page."""
    lines: list[str] = []
    rows: dict[str, list[str]] = {}
    counts: dict[str, list[int]] = {}
    for group, name, made in imports():
        count = counts.setdefault(group, [0, 0, 0])
        if isinstance(made, ConfigError):
            count[2] += 1
            row = f"| {name} | not | no counterpart |"
        else:
            count[0 if made.complete else 1] += 1
            parts = [f"`{finding.setting}`" for finding in made.left_out]
            parts += ["the reward"] if made.unwritten else []
            row = f"| {name} | {'fully' if made.complete else 'partly'} | {', '.join(parts)} |"
        rows.setdefault(group, []).append(row)
    lines += ["| | fully | partly | not |", "|---|---|---|---|"]
    lines += [f"| {group} | {' | '.join(map(str, count))} |" for group, count in counts.items()]
    for group, found in rows.items():
        lines += ["", f"## {group}", "", "| example | mapped | left out |", "|---|---|---|", *found]
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with the tables of now."""
    head, _, rest = text.partition(START)
    return f"{head}{START}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
