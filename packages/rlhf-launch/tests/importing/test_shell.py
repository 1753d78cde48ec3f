"""Command lines out of scripts."""

import pytest
from rlhf_core import ConfigError
from rlhf_launch.importing.shell import command_lines


def read(text, **variables):
    return command_lines(text, "tool.", variables)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("python3 -m tool.run --a 1 \\\n   --b", ["tool.run", "--a", "1", "--b"]),
        ("tool.run --a 1\\\n  --b", ["tool.run", "--a", "1", "--b"]),
        ("read -r -d '' c <<EOF\ntool.run --a 1\n  --b\nEOF\nlaunch --module $c", ["tool.run", "--a", "1", "--b"]),
        ("A=(\n  --a 1\n  # --no\n  --b\n)\ntool.run ${A[@]} $@", ["tool.run", "--a", "1", "--b"]),
        ("N=${1:-8}\ntool.run --a $((N * 2)) --b ${N}", ["tool.run", "--a", "16", "--b", "8"]),
        ('P="x/y" # where\ntool.run --a "$P/z" # no --b', ["tool.run", "--a", "x/y/z"]),
        ('srun bash -c \\\n"ray start \\\n&& python -m tool.run --a 1" &>> log &', ["tool.run", "--a", "1"]),
        ("tool.run --a 1 > log 2>&1", ["tool.run", "--a", "1"]),
        ("P=first\nif [ $x ]; then\n  P=second\nfi\ntool.run --a $P", ["tool.run", "--a", "first"]),
        ("D=$(cd a; pwd)\ntool.run --a $D", ["tool.run", "--a", "$D"]),
        ("F=\"['a', 'b']\"\ntool.run d=\"$F\"", ["tool.run", "d=['a', 'b']"]),
        ("read -r -d '' c <<EOF\ntool.run --a\nEOF\n", ["tool.run", "--a"]),
        ("echo tool.run --no; \ntool.run --a", ["tool.run", "--a"]),
    ],
)
def test_one_command(script, words):
    assert read(script) == [words]


def test_variables_from_outside_and_several_commands():
    assert read("tool.a $HOME/x\ntool.b", HOME="/h") == [["tool.a", "/h/x"], ["tool.b"]]


def test_an_open_quote_is_an_error():
    with pytest.raises(ConfigError, match="taken apart"):
        read('tool.run --a "1')
