"""What a run is made of, as short digests: a resumed run must have the same data, tokenizer and models."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf_algos.data.sources import DataSource

_SAMPLED_BYTES = 1 << 20


def model_fingerprint(model: str, *, moved: bool = False) -> str:
    """Hash that changes with the model's weights or configuration.

    Of a large weight file it takes the size, the time of its last change and a sample of its content.

    Args:
        model: a directory or a hub name.
        moved: leave the time out, so that a copy has the same hash.
    """
    directory = Path(model)
    if not directory.is_dir():
        from transformers import AutoConfig

        return f"{model}@{getattr(AutoConfig.from_pretrained(model), '_commit_hash', None)}"
    digest = hashlib.sha256()
    for file in sorted(directory.iterdir()):
        if file.suffix not in (".safetensors", ".bin", ".json") or not file.is_file():
            continue
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} ".encode())
        with file.open("rb") as content:
            digest.update(content.read(_SAMPLED_BYTES))
            if stat.st_size > 2 * _SAMPLED_BYTES:
                if not moved:
                    digest.update(f"{stat.st_mtime_ns} ".encode())
                content.seek(-_SAMPLED_BYTES, os.SEEK_END)
                digest.update(content.read())
    return digest.hexdigest()


def data_fingerprint(source: DataSource) -> Mapping[str, Any]:
    """Bytes and SHA-256 of a dataset's files; of a hub dataset its name, whose content is not looked at."""
    path = Path(source.path)
    if not path.exists():
        return {"hub": source.path, "name": source.name, "split": source.split}
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    hashed, size = hashlib.sha256(), 0
    for file in files:
        if path.is_dir():
            hashed.update(file.relative_to(path).as_posix().encode() + b"\0")
        with file.open("rb") as content:
            hashed.update(hashlib.file_digest(content, "sha256").digest())
        size += file.stat().st_size
    return {"bytes": size, "sha256": hashed.hexdigest()}


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Hash of a tokenizer's vocabulary, rules, special tokens and chat template."""
    if (fast := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        # How rows were last padded and cut is remembered in there; it is no part of the tokenizer.
        rules = {k: v for k, v in json.loads(fast.to_str()).items() if k not in ("padding", "truncation")}
    else:
        rules = sorted(tokenizer.get_vocab().items())
    special = {name: str(token) for name, token in sorted(tokenizer.special_tokens_map.items())}
    text = json.dumps([rules, special, tokenizer.chat_template], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def run_fingerprint(
    *, data: Sequence[DataSource], tokenizer: Any, models: Mapping[str, str | None], seed: int
) -> dict[str, Any]:
    """The fingerprint of a run.

    Args:
        data: what is trained on.
        tokenizer: the policy's.
        models: path or hub name of each model, by the key that names it; None for one that is not there.
        seed: of everything.
    """
    return {
        **{f"data.train[{place}]": data_fingerprint(source) for place, source in enumerate(data)},
        "tokenizer": tokenizer_fingerprint(tokenizer),
        **{key: model_fingerprint(model, moved=True) for key, model in models.items() if model is not None},
        "seed": seed,
    }
