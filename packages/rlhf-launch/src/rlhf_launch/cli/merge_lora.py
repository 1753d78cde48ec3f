"""`rlhf merge-lora`: adapters and their model as one ordinary model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlhf_launch.cli.errors import run_command


def merge_lora(
    adapter: Annotated[Path, typer.Argument(help="Directory that peft wrote, or an export of a run with lora.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to write.")],
    base: Annotated[str | None, typer.Option(help="Model; without it the one that the adapter names.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; without it the base model's.")
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(help="nf4 or fp4: merge into what these make of the base, as an adapter of QLoRA needs it."),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model's own code.")
    ] = False,
) -> None:
    """Merge ADAPTER into its model and write a Transformers directory, tokenizer included."""

    def work() -> None:
        from rlhf_train import MergeConfig, merge_adapter

        config = MergeConfig(
            adapter=adapter,
            output=output,
            base=base,
            dtype=dtype,  # type: ignore[arg-type]
            quantize=quantize,  # type: ignore[arg-type]
            trust_remote_code=trust_remote_code,
        )
        layers = merge_adapter(config)
        typer.echo(f"wrote {output}: {layers} layers merged")

    run_command(work)
