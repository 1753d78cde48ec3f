"""The `rlhf-algos` command: one subcommand per offline method."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rlhf_core import RLHFError

app = typer.Typer(
    name="rlhf-algos",
    help="Offline training of language models: from a YAML file and key=value overrides.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_SUMMARIES = {
    "train": "The method that the configuration names (algorithm.name: ...), also your own at module:attribute.",
    "dpo": "Direct preference optimisation and its relatives, from pairs (prompt, chosen, rejected).",
    "kto": "KTO, from single answers marked good or bad (prompt, completion, label), or from pairs.",
    "simpo": "SimPO: preference pairs without a reference model.",
    "cpo": "CPO: preference pairs without a reference model, with behaviour cloning.",
    "tpo": "TPO: triples of a chosen, a rejected and a gold answer, without a reference model.",
    "orpo": "ORPO: preference pairs without a reference model, with an odds ratio.",
    "sft": "Supervised fine-tuning on conversations, prompt and completion, or text.",
    "rm": "A reward model from preference pairs.",
    "prm": "A process reward model from answers with labelled steps.",
    "distill": "Distillation from a teacher model (algorithm.teacher).",
}


def _command(method: str) -> Callable[..., None]:
    def run(
        config: Annotated[Path | None, typer.Argument(help="YAML file; leave out to use overrides alone.")] = None,
        overrides: Annotated[
            list[str] | None,
            typer.Argument(help="dotted.key=value, for instance train.optimizer.learning_rate=1e-6"),
        ] = None,
        resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
        overwrite: Annotated[
            bool, typer.Option("--overwrite", help="Move the run in the output directory aside, and begin anew.")
        ] = False,
        print_config: Annotated[
            bool, typer.Option("--print-config", help="Print the full configuration and stop.")
        ] = False,
    ) -> None:
        from rlhf_algos.config.describe import commented_yaml
        from rlhf_algos.config.loader import load_config
        from rlhf_algos.offline.config import OfflineConfig

        extra = list(overrides or ())
        if config is not None and "=" in str(config) and not config.exists():
            extra.insert(0, str(config))
            config = None
        chosen = [] if method == "train" else [f"algorithm.name={method}"]
        settings = load_config(OfflineConfig, config, [*extra, *chosen])
        if print_config:
            sys.stdout.write(commented_yaml(settings))
            return
        import transformers

        from rlhf_algos.offline.loop import train
        from rlhf_algos.offline.progress import ProgressBar

        transformers.utils.logging.disable_progress_bar()
        with ProgressBar(quiet=int(os.environ.get("RANK", "0")) != 0) as bar:
            result = train(settings, resume=resume, overwrite=overwrite, on_event=bar.on_event, say=bar.say)
        if not bar.quiet:
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
            typer.echo(f"{result.steps} steps; {numbers}")
            typer.echo(f"model: {result.model}" + (f"; best: {result.best}" if result.best else ""))

    run.__doc__ = _SUMMARIES[method]
    return run


def _register() -> None:
    for method in _SUMMARIES:
        app.command(method)(_command(method))


_register()


def main() -> None:
    """Entry point. A mistake of the user's is one message and exit code 2; a failed run is exit code 1."""
    from rlhf_core import RunStopped, UserError

    try:
        app()
    except UserError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from None
    except RunStopped as stopped:
        typer.echo("\n".join([f"stopped: {stopped}", *stopped.__notes__]), err=True)
        raise SystemExit(stopped.exit_code) from None
    except RLHFError as error:
        typer.echo(f"failed: {error}", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
