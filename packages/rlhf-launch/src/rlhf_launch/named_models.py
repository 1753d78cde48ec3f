"""What a user calls a model: its directory or hub name, a run, or adapters over their base."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core import ADAPTER_CONFIG, ADAPTER_FOLDER, ConfigError, check_model_path, naming_damage

_EXPORT = "model"
_MODELS = (_EXPORT, "best", "model-average")
_CHECKPOINTS = "checkpoints"
_RECORD = "run.json"
_DIGEST = 12
_NO_LIMIT = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundModel:
    """A model as it was named, and where it is."""

    name: str
    """As given."""
    path: str
    """Directory or hub name."""
    is_adapter: bool = False
    """The directory holds adapters alone, to be merged into their base first."""
    run: Path | None = None
    """Directory of the run that wrote it, where there is one."""

    @property
    def adapter(self) -> Path | None:
        """Directory of the adapters, alone or beside the model that they were merged into."""
        folders = (Path(self.path), Path(self.path) / ADAPTER_FOLDER)
        return next((folder for folder in folders if (folder / ADAPTER_CONFIG).exists()), None)


def find_model(name: str, *, step: int | None = None) -> FoundModel:
    """Find the model that a directory or a hub name stands for.

    Args:
        name: a model, a run's directory, or adapters.
        step: of a run, the checkpoint of this step.

    Raises:
        ConfigError: there is none, or a checkpoint was asked for, which only its trainer can read.
    """
    path = Path(name).expanduser()
    checkpoint = _checkpoint_of(path) if step is None else path / _CHECKPOINTS / f"step-{step:06}"
    if checkpoint is not None:
        raise _only_its_trainer(checkpoint)
    run = _run_of(path)
    if not path.is_dir() or (path / "config.json").exists():
        check_model_path(str(path), what="model")
        return FoundModel(name=name, path=str(path), run=run)
    if (path / ADAPTER_CONFIG).exists():
        return FoundModel(name=name, path=str(path), is_adapter=True, run=run)
    if (path / _EXPORT / "config.json").exists():
        return FoundModel(name=name, path=str(path / _EXPORT), run=run)
    if (path / _RECORD).exists() or (path / _CHECKPOINTS).is_dir():
        raise ConfigError(
            f"the run in {name!r} has no {_EXPORT}/ yet; `rlhf train {path / 'config.yaml'} --resume` goes on from "
            f"its newest checkpoint and writes {_EXPORT}/ at its end"
        )
    raise ConfigError(
        f"{name!r} is neither a model (no config.json), nor adapters (no {ADAPTER_CONFIG}), nor a run "
        f"(no {_EXPORT}/)"
    )


def is_reward_model(path: str, *, trust_remote_code: bool = False) -> bool:
    """Whether a model is a sequence classifier with one label; else it is taken for a language model.

    Raises:
        ConfigError: its configuration cannot be read, or it has several labels.
        CheckpointError: a file of it is damaged.
    """
    from transformers import AutoConfig

    try:
        with naming_damage(f"model {path!r}", path):
            config: Any = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {path!r} cannot be loaded: {error}") from error
    kinds = [str(name) for name in getattr(config, "architectures", None) or ()]
    if not any(name.endswith("ForSequenceClassification") for name in kinds):
        return False
    if config.num_labels != 1:
        raise ConfigError(f"model {path!r} is a classifier of {config.num_labels} labels; a reward model has one")
    return True


def find_tokenizer(places: Sequence[str], *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of the first directory or hub name that has one; None if there is none."""
    from transformers import AutoTokenizer

    for place in places:
        if Path(place).is_dir() and not (Path(place) / "tokenizer_config.json").exists():
            continue
        try:
            return AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
        except (OSError, ValueError):
            continue
    return None


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


def _run_of(path: Path) -> Path | None:
    """The run's directory that the path is, or is a model or the adapters of."""
    folder = path.absolute()
    if folder.name == ADAPTER_FOLDER:
        folder = folder.parent
    if folder.name in _MODELS:
        folder = folder.parent
    return folder if (folder / _RECORD).exists() else None


def _checkpoint_of(path: Path) -> Path | None:
    """The checkpoint that the path is, or is a part of."""
    for folder in (path, *path.parents):
        if folder.parent.name == _CHECKPOINTS and folder.name.startswith("step-"):
            return folder
    return None


def _only_its_trainer(path: Path) -> ConfigError:
    if not path.is_dir():
        there = sorted(each.name for each in path.parent.glob("step-*"))
        return ConfigError(f"there is no checkpoint {str(path)!r}; found {', '.join(there) or 'none'}")
    run = path.parent.parent
    return ConfigError(
        f"the checkpoint {str(path)!r} holds the shards of a trainer, which only that trainer can read; "
        f"`rlhf train {run / 'config.yaml'} --resume` goes on from the run's newest checkpoint and writes "
        f"{run / _EXPORT} at its end, which can be given here; `evaluation` in the run's configuration measures "
        "its steps"
    )


def _digest(folder: Path) -> str:
    """Of the adapters' content: another training of them is another model."""
    digest = hashlib.sha256()
    for file in sorted(folder.glob("adapter_*")):
        digest.update(file.name.encode())
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:_DIGEST]


def longest_row(config: Any) -> int:
    """Tokens of the longest row that a model with this Transformers configuration takes."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return int(getattr(text, "max_position_embeddings", None) or _NO_LIMIT)
