"""What `rlhf import-openrlhf`, `rlhf import-verl` and `rlhf import-trl` do."""

from __future__ import annotations

import os
from pathlib import Path

import typer
import yaml
from rlhf_core import ConfigError

from rlhf_launch.importing.engine import Import
from rlhf_launch.importing.openrlhf import command as openrlhf
from rlhf_launch.importing.report import account, as_yaml
from rlhf_launch.importing.trl import command as trl
from rlhf_launch.importing.verl import command as verl

_FRAMEWORKS = {
    "openrlhf": (openrlhf.find_commands, openrlhf.import_openrlhf),
    "verl": (verl.find_commands, verl.import_verl),
}


def write_import(
    framework: str, text: str | None, file: Path | None, output: Path | None, pick: int | None
) -> None:
    """Import a command line, or one of a script.

    Raises:
        ConfigError: neither or both of them are given, the script cannot be read or has several commands, or the
            command cannot be imported.
    """
    if (text is None) == (file is None):
        raise ConfigError("give a command line in quotes, or --file SCRIPT")
    find, convert = _FRAMEWORKS[framework]
    found = find(_read(file) if file is not None else text or "", os.environ)
    if pick is None and len(found) > 1:
        names = ", ".join(f"{place}: {' '.join(command[:3])} ..." for place, command in enumerate(found, 1))
        raise ConfigError(f"there are {len(found)} commands; add --pick with the number of one ({names})")
    if pick is not None and not 1 <= pick <= len(found):
        raise ConfigError(f"--pick {pick}: there are commands 1 to {len(found)}")
    _write(convert(found[(pick or 1) - 1]), output)


def write_trl_import(method: str, config: Path, output: Path | None) -> None:
    """Import a YAML file of TRL.

    Raises:
        ConfigError: the file cannot be read, or cannot be imported.
    """
    try:
        settings = yaml.safe_load(_read(config))
    except yaml.YAMLError as error:
        raise ConfigError(f"{config}: no YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{config}: must have settings as `key: value`, found {type(settings).__name__}")
    _write(trl.import_trl(method, settings, source=config.name), output)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error


def _write(made: Import, output: Path | None) -> None:
    """The file to `output` or to standard output, the account to standard error."""
    text = as_yaml(made)
    if output is not None and output.exists():
        raise ConfigError(f"{str(output)!r} exists; give another name, or remove it")
    typer.echo(account(made), err=True)
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{str(output)!r} cannot be written: {error}") from error
    typer.echo(f"wrote {output}", err=True)
