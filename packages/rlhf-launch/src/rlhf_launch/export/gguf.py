"""GGUF files for llama.cpp, written by its own converter."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rlhf_core import CheckpointError, ConfigError

from rlhf_launch.export.check import LogitGap, compare, logits_of

if TYPE_CHECKING:
    from rlhf_launch.export.weights import WrittenModel

CONVERTER = "convert_hf_to_gguf.py"
VARIABLE = "RLHF_GGUF_CONVERTER"
_LAST_LINES = 6
_TOLERANCES = {"f32": 1e-4, "f16": 2e-2, "bf16": 1e-1, "q8_0": 1e-1}
_QUANTIZED = 0.5
"""Of types of fewer bits, and of the converter's default: far from another model, and no closer than they are."""


def find_converter(given: Path | None) -> Path:
    """llama.cpp's converter: as given, by the environment variable, or on PATH.

    Raises:
        ConfigError: it is not there; says how to get it.
    """
    named = given or (Path(value) if (value := os.environ.get(VARIABLE)) else None)
    if named is not None:
        named = named.expanduser()
        script = named / CONVERTER if named.is_dir() else named
        if script.is_file():
            return script
        where = "--gguf-converter" if given else VARIABLE
        raise ConfigError(f"{where}: there is no {str(script)!r}; give the path of llama.cpp's {CONVERTER}")
    if found := shutil.which(CONVERTER):
        return Path(found)
    raise ConfigError(
        f"GGUF files are written by llama.cpp's {CONVERTER}, which was not found; clone llama.cpp, install the "
        f"package gguf, and give the script's path by --gguf-converter, in {VARIABLE} or on PATH"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class GGUFHeader:
    """The beginning of a GGUF file."""

    version: int
    tensors: int


def convert(converter: Path, model: Path, output: Path, outtype: str | None) -> GGUFHeader:
    """Write a Transformers directory as a GGUF file.

    Args:
        converter: see `find_converter`.
        model: the directory.
        output: the file to write.
        outtype: the converter's own `--outtype` (f32, f16, bf16, q8_0, auto, ...); None for its default.

    Raises:
        ConfigError: the converter refused the model or the type, with its last lines, or wrote no GGUF file.
    """
    command = [sys.executable, str(converter), str(model), "--outfile", str(output)]
    done = subprocess.run(
        [*command, *(["--outtype", outtype] if outtype else [])],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-_LAST_LINES:])
        raise ConfigError(f"{converter.name} ended with {done.returncode}; it said:\n{said}")
    if (header := read_header(output)) is None or not header.tensors:
        raise ConfigError(f"{converter.name} ended well and wrote no GGUF file with tensors; is it llama.cpp's?")
    return header


def read_header(file: Path) -> GGUFHeader | None:
    """The header of a GGUF file; None if it is none."""
    try:
        with file.open("rb") as content:
            magic, version, tensors = struct.unpack("<4sIQ", content.read(16))
    except (OSError, struct.error):
        return None
    return GGUFHeader(version=version, tensors=tensors) if magic == b"GGUF" else None


def write_gguf(
    converter: Path, model: Path, output: Path, outtype: str | None, written: WrittenModel
) -> LogitGap | None:
    """Convert a model that was written, and compare the file with it where Transformers can load it.

    Returns None where that needs the package gguf, which is not installed.

    Raises:
        ConfigError: see `convert`.
        CheckpointError: the file does not say what the model says.
    """
    _name_rope_theta(model / "config.json")
    convert(converter, model, output, outtype)
    if importlib.util.find_spec("gguf") is None:
        return None
    from transformers import AutoModelForCausalLM

    try:
        found: Any = AutoModelForCausalLM.from_pretrained(output.parent, gguf_file=output.name, dtype=torch.float32)
    except (ValueError, OSError, NotImplementedError):
        return None  # a type of model that Transformers does not read from such files
    tolerance = max(_TOLERANCES.get(outtype or "", _QUANTIZED), written.gap.tolerance)
    try:
        return compare(written.logits, logits_of(found, written.token_ids), tolerance)
    except CheckpointError as error:
        error.add_note(
            "a converter that is older than the model's config.json misses settings in it: take a newer one"
        )
        raise


def _name_rope_theta(file: Path) -> None:
    """Put the base of the rotary embedding where converters from before Transformers 5 look for it.

    They would write the default one without a word.
    """
    config = json.loads(file.read_text())
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    if theta is not None:
        file.write_text(json.dumps({"rope_theta": theta, **config}, indent=2))
