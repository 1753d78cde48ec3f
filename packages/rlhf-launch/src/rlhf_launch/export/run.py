"""An export: find the model, write it beside its place, compare it with its source, then put it in place."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from rlhf_algos import naming_full_disk
from rlhf_core import ConfigError, DType, check_choice

from rlhf_launch.export import gguf, hub
from rlhf_launch.export.card import PLOT, CardFacts, Form, base_license, write_card
from rlhf_launch.export.check import LogitGap
from rlhf_launch.export.place import check_output, written_beside
from rlhf_launch.export.record import TrainedRun, read_trained_run
from rlhf_launch.export.shareable import hub_name
from rlhf_launch.export.weights import write_adapter_alone, write_model
from rlhf_launch.named_models import FoundModel, find_model

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig:
    """What `rlhf export` writes, and where."""

    source: str
    """A run, a model of one, or any directory of Transformers or peft."""
    output: Path
    form: Form = "model"
    """`model`: safetensors, adapters merged. `adapter`: adapters alone. `gguf`: one file for llama.cpp."""
    dtype: DType | None = None
    """None for the source's."""
    base: str | None = None
    """Base model of adapters, to load; None for the one that they name."""
    base_name: str | None = None
    """Hub name of the base model, for the card and for adapters; None: as found, if that is one."""
    license: str | None = None
    """For the card; None: the base model's, if its card has one."""
    converter: Path | None = None
    """llama.cpp's converter; see `gguf.find_converter`."""
    outtype: str | None = None
    """The converter's `--outtype`."""
    overwrite: bool = False
    push: hub.HubTarget | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        check_choice("export: form", self.form, get_args(Form))
        if self.dtype is not None:
            check_choice("--dtype", self.dtype, get_args(DType))
        if self.form != "gguf" and (self.outtype or self.converter):
            raise ConfigError("--outtype and --gguf-converter are for --gguf; write that, or leave them out")
        if self.base_name is not None and hub_name(self.base_name) is None:
            raise ConfigError(f"--base-name {self.base_name!r} is no hub name; write owner/name")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportResult:
    """What an export has written."""

    output: Path
    files: tuple[str, ...]
    gap: LogitGap | None
    """None for a GGUF file that cannot be loaded here."""
    commit: str | None = None
    """Address of the commit on the hub."""


def export(config: ExportConfig, *, say: Say) -> ExportResult:
    """Write a trained model as others load it, with its card; compared with its source before it is in place.

    Raises:
        ConfigError: no such model, a checkpoint of a trainer, an output that holds something, no converter, or the
            hub refuses it.
        CheckpointError: a file is damaged, or what was written does not say what its source says.
        ResourceError: the disk is full, or the hub cannot be reached.
    """
    found = find_model(config.source)
    given = [Path(place) for place in (found.path, found.run, config.base) if place is not None]
    check_output(config.output, overwrite=config.overwrite, sources=given)
    converter = gguf.find_converter(config.converter) if config.form == "gguf" else None
    if config.form == "adapter" and found.adapter is None:
        raise ConfigError(
            f"{config.source!r} has no adapters: it was trained as a whole; leave out --adapter to export all of it"
        )
    run = None if found.run is None else read_trained_run(found.run)
    if config.push is not None:
        hub.check_hub(config.push)
    with (
        naming_full_disk(config.output),
        written_beside(config.output) as folder,
    ):
        gap = _write(config, found, run, folder, converter)
    say(f"wrote {config.output}")
    say(
        "the file was not loaded again: Transformers reads some types of models from GGUF, with the package gguf"
        if gap is None
        else str(gap)
    )
    files = tuple(
        sorted(str(file.relative_to(config.output)) for file in config.output.rglob("*") if file.is_file())
    )
    commit = None
    if config.push is not None:
        try:
            commit = hub.push(config.output, config.push)
        except Exception as error:
            error.add_note(
                f"the export is in {config.output}; `hf upload {config.push.repo} {config.output}` repeats "
                "the upload alone"
            )
            raise
        say(f"uploaded to {commit}")
    return ExportResult(output=config.output, files=files, gap=gap, commit=commit)


def _write(
    config: ExportConfig, found: FoundModel, run: TrainedRun | None, folder: Path, converter: Path | None
) -> LogitGap | None:
    """Write everything into `folder`, compared with the source."""
    given: dict[str, Any] = {
        "base": config.base,
        "dtype": config.dtype,
        "trust_remote_code": config.trust_remote_code,
    }
    title = _title(config, found)
    if config.form == "adapter" and found.adapter is not None:
        written = write_adapter_alone(found.adapter, folder, base_name=config.base_name, **given)
        gap: LogitGap | None = written.gap
    elif converter is None:
        written = write_model(found, folder, **given)
        gap = written.gap
    else:
        whole = folder / ".model"
        whole.mkdir()
        written = write_model(found, whole, **given)
        gap = gguf.write_gguf(converter, whole, folder / f"{title}.gguf", config.outtype, written)
        shutil.rmtree(whole)
    # What was trained from: of a run, what its settings say.
    base = written.base or (run.settings["model"]["path"] if run else None)
    facts = CardFacts(
        title=title,
        form=config.form,
        dtype=(config.outtype or "the converter's default type")
        if converter
        else str(written.dtype)[len("torch.") :],
        scalar=written.scalar,
        base=config.base_name or base,
        license=config.license or base_license(config.base_name) or base_license(base),
        repo=None if config.push is None else config.push.repo,
        run=run,
        best=run is not None and "best" in Path(found.path).parts[-2:],
    )
    write_card(facts, folder)
    if run is not None and run.plot is not None:
        shutil.copyfile(run.plot, folder / PLOT)
    return gap


def _title(config: ExportConfig, found: FoundModel) -> str:
    """The repository's name, or the run's, or the directory's."""
    if config.push is not None:
        return config.push.repo.rpartition("/")[2]
    named = found.run or (Path(found.path).parent if Path(found.path).name == "adapter" else Path(found.path))
    return named.resolve().name or "model"
