"""OpenRLHF's command lines: which table belongs to which entry point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlhf_core import ConfigError

from rlhf_launch.importing.engine import Draft, Import, Rule, apply_table, finish, reading
from rlhf_launch.importing.openrlhf.generate import GENERATE, GENERATE_DEFAULTS, generation_run
from rlhf_launch.importing.openrlhf.names import read_flags
from rlhf_launch.importing.openrlhf.offline import OFFLINE, offline_run
from rlhf_launch.importing.openrlhf.online import ONLINE, ONLINE_DEFAULTS, online_run
from rlhf_launch.importing.shell import command_lines

MARKER = "openrlhf.cli."
_Table = tuple[Mapping[str, Rule], Mapping[str, Any], Callable[[Draft], str]]
_NO_RUN = {
    "serve_rm": "write `rlhf serve-rm MODEL`, or reward.model in the training run, which places the model itself",
    "lora_combiner": "write `rlhf merge-lora`",
    "interactive_chat": "write `rlhf chat MODEL`",
}


def find_commands(text: str, variables: Mapping[str, str] | None = None) -> list[list[str]]:
    """The OpenRLHF commands in a script or a command line, each with its entry point first.

    Raises:
        ConfigError: there is none, or a quote is not closed.
    """
    commands = command_lines(text, MARKER, variables)
    if not commands:
        raise ConfigError(
            f"no OpenRLHF command found: no word begins with {MARKER!r} (for instance {MARKER}train_dpo)"
        )
    return commands


def import_openrlhf(command: list[str]) -> Import:
    """Our configuration for an OpenRLHF command.

    Args:
        command: the entry point and its arguments: `["openrlhf.cli.train_dpo", "--beta", "0.1", ...]`.

    Raises:
        ConfigError: an entry point without counterpart, a value that cannot be read, or settings that our own
            reader refuses.
    """
    entry = command[0].removeprefix(MARKER)
    table, defaults, combine = _table(entry)
    values, written = read_flags(command[1:])
    draft = Draft(given=values, written=written, defaults=defaults)
    for name in [name for name, value in values.items() if isinstance(value, str) and "$" in value]:
        draft.remarks.append(
            f"{written[name]} has a shell variable without a value: {values[name]}. Replace it in the file."
        )
    apply_table(draft, table)
    with reading(f"{MARKER}{entry}"):
        runs = combine(draft)
    return finish(draft, command=runs, source=f"{MARKER}{entry}")


def _table(entry: str) -> _Table:
    if entry == "train_ppo_ray":
        return ONLINE, ONLINE_DEFAULTS, online_run
    if entry == "batch_inference":
        return GENERATE, GENERATE_DEFAULTS, generation_run
    if entry in OFFLINE:
        table, defaults = OFFLINE[entry]
        return table, defaults, lambda draft: offline_run(draft, entry)
    instead = _NO_RUN.get(entry, f"known are train_ppo_ray, batch_inference, {', '.join(OFFLINE)}")
    raise ConfigError(f"{MARKER}{entry} is nothing that a configuration of ours runs; {instead}")
