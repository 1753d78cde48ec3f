"""`rlhf chat`: talk to a model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def chat(
    model: Annotated[
        str,
        typer.Argument(help="Directory of a run, its model/ or best/, any model directory, hub name, or adapters."),
    ],
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of a reply.")] = 1024,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; without it the model's own, else 1. So are the next four.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Nucleus mass.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Candidates kept; 0 keeps all.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Candidates below this share of the likeliest go.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="1 is none.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    base: Annotated[str | None, typer.Option(help="Model below adapters; without it the one they name.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model's own code.")
    ] = False,
) -> None:
    """Talk to MODEL, here or through a pipe: a line is a turn, /help lists the commands."""
    from typing import get_args

    import torch
    from rlhf_core import DType, SamplingConfig, check_choice

    from rlhf_launch.chat.speaker import Speaker, SpeakerConfig
    from rlhf_launch.chat.terminal import Chat, lines_of

    check_choice("--device", device, ("auto", "cpu", "cuda"))
    check_choice("--dtype", dtype, ("auto", *get_args(DType)))
    asked = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    SamplingConfig(max_tokens=max_tokens, **given)  # type: ignore[arg-type]  # refused before anything is loaded
    speaker = Speaker(
        SpeakerConfig(model=model, base=base, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    )
    sampling = speaker.sampling(max_tokens=max_tokens, **asked)
    talk = Chat(speaker, sampling, system=system, out=sys.stdout, notes=sys.stderr)
    if seed is not None:
        torch.manual_seed(seed)
    if sys.stdin.isatty():
        typer.echo(f"{model}; /help lists the commands, Ctrl-D ends", err=True)
    talk.run(lines_of(sys.stdin))
