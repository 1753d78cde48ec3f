"""What is evaluated: a model's directory or hub name, a run, or adapters over their base."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_core import ADAPTER_CONFIG, ConfigError, check_model_path

_EXPORT = "model"
_CHECKPOINTS = "checkpoints"
_DIGEST = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundModel:
    """A model as it was named, and where it is."""

    name: str
    """As given."""
    path: str
    """Directory or hub name."""
    is_adapter: bool = False
    """The directory holds adapters alone, to be merged into their base first."""


def find_model(name: str, *, step: int | None = None) -> FoundModel:
    """Find the model that a directory or a hub name stands for.

    Args:
        name: a model, a run's directory, or adapters.
        step: of a run, the checkpoint of this step.

    Raises:
        ConfigError: there is none, or a checkpoint was asked for, which only its trainer can read.
    """
    path = Path(name).expanduser()
    if step is not None or _is_checkpoint(path):
        raise _only_its_trainer(path if step is None else path / _CHECKPOINTS / f"step-{step:06}")
    if not path.is_dir() or (path / "config.json").exists():
        check_model_path(str(path), what="model")
        return FoundModel(name=name, path=str(path))
    if (path / ADAPTER_CONFIG).exists():
        return FoundModel(name=name, path=str(path), is_adapter=True)
    if (path / _EXPORT / "config.json").exists():
        return FoundModel(name=name, path=str(path / _EXPORT))
    if (path / "run.json").exists() or (path / _CHECKPOINTS).is_dir():
        raise ConfigError(
            f"the run in {name!r} has no {_EXPORT}/ yet; `rlhf train {path / 'config.yaml'} --resume` goes on from "
            f"its newest checkpoint and writes {_EXPORT}/ at its end"
        )
    raise ConfigError(
        f"{name!r} is neither a model (no config.json), nor adapters (no {ADAPTER_CONFIG}), nor a run "
        f"(no {_EXPORT}/)"
    )


def merged_into(model: FoundModel, folder: Path, *, trust_remote_code: bool = False) -> str:
    """The path of the model; adapters are merged into their base below `folder` first, once for the same content.

    Raises:
        ConfigError: the base is not there, or the adapters do not fit it.
    """
    if not model.is_adapter:
        return model.path
    from rlhf_train import MergeConfig, merge_adapter

    output = folder / f"{Path(model.path).resolve().name}-{_digest(Path(model.path))}"
    if not (output / "config.json").exists():
        merge_adapter(MergeConfig(adapter=Path(model.path), output=output, trust_remote_code=trust_remote_code))
    return str(output)


def labels(names: Sequence[str]) -> list[str]:
    """A short label for each path or hub name, good as a file's name; the whole path where the last part is not
    enough.

    >>> labels(["runs/a", "runs/b/"]), labels(["a/model", "b/model"]), labels(["org/name", "data/test.jsonl"])
    (['a', 'b'], ['a-model', 'b-model'], ['name', 'test'])

    Raises:
        ConfigError: one is given twice.
    """
    parts = [[part for part in Path(name).parts if part not in ("/", ".", "..")] for name in names]
    ends = [Path(each[-1]) if each else Path("model") for each in parts]
    short = [end.stem if end.suffix in (".jsonl", ".json", ".parquet") else end.name for end in ends]
    found = [name if short.count(name) == 1 else "-".join(each) for name, each in zip(short, parts, strict=True)]
    for place, label in enumerate(found):
        if label in found[:place]:
            raise ConfigError(f"{names[place]!r} is given twice, or has the same name as another ({label!r})")
    return found


def _is_checkpoint(path: Path) -> bool:
    return path.parent.name == _CHECKPOINTS and path.name.startswith("step-")


def _only_its_trainer(path: Path) -> ConfigError:
    if not path.is_dir():
        there = sorted(each.name for each in path.parent.glob("step-*"))
        return ConfigError(f"there is no checkpoint {str(path)!r}; found {', '.join(there) or 'none'}")
    run = path.parent.parent
    return ConfigError(
        f"the checkpoint {str(path)!r} holds the shards of a trainer, which only that trainer can read; "
        f"`rlhf train {run / 'config.yaml'} --resume` goes on from the run's newest checkpoint and writes "
        f"{run / _EXPORT} at its end, which can be evaluated; `evaluation` in the run's "
        "configuration measures its steps"
    )


def _digest(folder: Path) -> str:
    """Of the adapters' content: another training of them is another model."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("adapter_*")):
        digest.update(file.name.encode())
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:_DIGEST]
