"""Log-probs under a frozen reference: computed once, kept on disk under a key of model, tokens and dtype."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rlhf_core import Batch, Ranks, TrainEngine, deal
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_algos.data.encoding import TokenRow
from rlhf_algos.data.examples import Example, collate_examples
from rlhf_algos.torch_engine.ranks import rank_of

PARTNER = "partner_"
"""Prefix of the columns that belong to an example's partner."""

_ROWS_AT_ONCE = 512
_SAMPLED_BYTES = 1 << 20


def default_cache() -> Path:
    """Where reference log-probs are kept unless the configuration says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlhf-algos" / "references"


def model_fingerprint(model: str) -> str:
    """Hash that changes with the model's weights or configuration.

    Of a large weight file it takes the size, the time of its last change and a sample of its content.
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
                digest.update(f"{stat.st_mtime_ns} ".encode())
                content.seek(-_SAMPLED_BYTES, os.SEEK_END)
                digest.update(content.read())
    return digest.hexdigest()


def cache_key(model: str, dtype: str, examples: Sequence[Example]) -> str:
    """Hash of the reference model, the dtype and every token and mask; the tokenizer shows in the tokens."""
    digest = hashlib.sha256(f"1 {model_fingerprint(model)} {dtype} ".encode())
    for example in examples:
        for row in (*example.rows, *((example.partner,) if example.partner else ())):
            digest.update(torch.tensor(row.token_ids, dtype=torch.int32).numpy().tobytes())
            digest.update(bytes(row.response_mask) + b"|")
    return digest.hexdigest()[:32]


def with_reference(
    examples: Sequence[Example],
    *,
    directory: Path,
    key: str,
    open_engine: Callable[[], TrainEngine],
    ranks: Ranks,
) -> list[Example]:
    """Examples with the column `ref_log_probs_sum` (and the partner's), from the cache or scored now.

    `open_engine` is called only if the cache does not have them; its engine is closed afterwards.
    """
    file = directory / f"{key}.safetensors"
    # All ranks must agree, or some would score and others not.
    known = ranks.max(int(not file.exists())) == 0
    if known:
        sums = load_file(file)["log_probs_sum"]
    else:
        engine = open_engine()
        sums = score_rows(engine, [r for e in examples for r in _all_rows(e)], ranks)
        engine.close()
        if rank_of(ranks) == 0:
            _write(file, sums)
    return _attach(examples, sums.tolist())


def score_rows(engine: TrainEngine, rows: Sequence[TokenRow], ranks: Ranks) -> Tensor:
    """Summed log-probs of the counted tokens of each row, [rows] float32, the same on all ranks."""
    sums = torch.zeros(len(rows))
    for start in range(0, len(rows), _ROWS_AT_ONCE * ranks.size):
        part = rows[start : start + _ROWS_AT_ONCE * ranks.size]
        dealt = deal([len(row.token_ids) for row in part], ranks.size)
        mine = dealt[rank_of(ranks)]
        # A rank without rows scores one all the same: the others wait for it in every collective.
        batch = rows_batch([part[i] for i in mine or [0]])
        outputs = engine.score(batch)
        scored = outputs.log_probs.sum(dim=1).tolist()[: len(mine)]  # type: ignore[union-attr]
        for indices, values in zip(dealt, ranks.gather(scored), strict=True):
            sums[[start + i for i in indices]] = torch.tensor(values, dtype=torch.float32)  # type: ignore[arg-type]
    return sums


def rows_batch(rows: Sequence[TokenRow]) -> Batch:
    """Rows as a batch of single-row units."""
    return collate_examples([Example(name="", rows=(row,)) for row in rows], pad_token_id=0)


def _all_rows(example: Example) -> tuple[TokenRow, ...]:
    return example.rows if example.partner is None else (*example.rows, example.partner)


def _attach(examples: Sequence[Example], sums: list[float]) -> list[Example]:
    result, values = [], iter(sums)
    for example in examples:
        columns = {**example.columns, "ref_log_probs_sum": tuple(next(values) for _ in example.rows)}
        if example.partner is not None:
            columns[PARTNER + "ref_log_probs_sum"] = (next(values),)
        result.append(replace(example, columns=columns))
    return result


def _write(file: Path, sums: Tensor) -> None:
    """Beside, then renamed: another run never reads half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as beside:
        save_file({"log_probs_sum": sums.contiguous()}, Path(beside) / file.name)
        os.replace(Path(beside) / file.name, file)
