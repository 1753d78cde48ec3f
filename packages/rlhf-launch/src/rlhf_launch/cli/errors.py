"""How a command ends: errors become one message and an exit code, and libraries keep quiet."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import typer
from rlhf_core import RLHFError, RunStopped, UserError

_Arguments = ParamSpec("_Arguments")


def run_command(work: Callable[[], None]) -> None:
    """Run a command's work; errors that a person can correct end in one message and exit code 2.

    A run that a signal stopped ends with 128 and the signal's number. What an error notes (where the newest
    checkpoint is, above all) is printed below it.
    """
    quiet_libraries()
    try:
        work()
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        _print_notes(error)
        raise SystemExit(2) from None
    except RunStopped as stopped:
        typer.echo(f"stopped: {stopped}", err=True)
        _print_notes(stopped)
        raise SystemExit(stopped.exit_code) from None
    except RLHFError as error:
        if os.environ.get("RLHF_TRACEBACK"):
            raise
        typer.echo(f"error: {type(error).__name__}: {error}", err=True)
        _print_notes(error)
        typer.echo("(RLHF_TRACEBACK=1 shows the traceback)", err=True)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise SystemExit(130) from None


def ending_well(command: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    """A command of another folder, run as `run_command` runs those of this one."""

    @wraps(command)
    def run(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> None:
        run_command(lambda: command(*arguments, **options))

    return run


def _print_notes(error: BaseException) -> None:
    notes = getattr(error, "__notes__", [])
    for note in notes:
        typer.echo(note, err=True)
    if any("--resume" in note for note in notes):
        again = [argument for argument in sys.argv[1:] if argument not in ("--resume", "--overwrite")]
        typer.echo(f"continue with: {shlex.join(['rlhf', *again, '--resume'])}", err=True)


def quiet_libraries() -> None:
    """Show warnings of libraries only, unless RLHF_LOG asks for more."""
    level = os.environ.get("RLHF_LOG", "WARNING").upper()
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    # DeepSpeed says so whenever it is imported on a machine without GPU; the run's own lines say it already.
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
