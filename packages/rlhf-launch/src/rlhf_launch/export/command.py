"""`rlhf export`: a trained model as others load it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rlhf_core import ConfigError


def export(
    model: Annotated[
        str, typer.Argument(help="Directory of a run, its model/ or best/, any model directory, or adapters.")
    ],
    output: Annotated[Path, typer.Argument(help="Directory to write.")],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The adapters alone, in peft's format, instead of the merged model.")
    ] = False,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="One GGUF file, by llama.cpp's own converter, instead of safetensors.")
    ] = False,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; without it the source's.")
    ] = None,
    outtype: Annotated[
        str | None, typer.Option(help="With --gguf: the converter's --outtype (f16, bf16, q8_0, auto, ...).")
    ] = None,
    gguf_converter: Annotated[
        Path | None,
        typer.Option(
            help="convert_hf_to_gguf.py, or the directory that has it; without it RLHF_GGUF_CONVERTER, then PATH."
        ),
    ] = None,
    base: Annotated[str | None, typer.Option(help="Model below adapters; without it the one they name.")] = None,
    base_name: Annotated[
        str | None, typer.Option(help="Hub name of the base model, where it was trained from a directory.")
    ] = None,
    license_name: Annotated[
        str | None, typer.Option("--license", help="For the card; without it the base model's.")
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(help="Upload to this repository (owner/name); needs a token (HF_TOKEN).")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push-to-hub: a new one is private.")] = False,
    revision: Annotated[str | None, typer.Option(help="With --push-to-hub: the branch.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is in OUTPUT, once the new export is complete.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model's own code.")
    ] = False,
) -> None:
    """Write MODEL as others load it, with a model card; its logits are compared with the source's."""
    from rlhf_launch.export.hub import HubTarget
    from rlhf_launch.export.run import ExportConfig
    from rlhf_launch.export.run import export as run_export

    if adapter and gguf:
        raise ConfigError("--adapter and --gguf are two exports; give one, and the other in a second call")
    if push_to_hub is None and (private or revision is not None):
        raise ConfigError("--private and --revision are of --push-to-hub; give the repository, or leave them out")
    config = ExportConfig(
        source=model,
        output=output,
        form="adapter" if adapter else "gguf" if gguf else "model",
        dtype=dtype,  # type: ignore[arg-type]
        base=base,
        base_name=base_name,
        license=license_name,
        converter=gguf_converter,
        outtype=outtype,
        overwrite=overwrite,
        push=None if push_to_hub is None else HubTarget(repo=push_to_hub, private=private, revision=revision),
        trust_remote_code=trust_remote_code,
    )
    run_export(config, say=typer.echo)
