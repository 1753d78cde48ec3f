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
from rlhf_algos.run_directory.fingerprint import model_fingerprint
from rlhf_algos.torch_engine.ranks import rank_of

PARTNER = "partner_"
"""Prefix of the columns that belong to an example's partner."""

_ROWS_AT_ONCE = 512
_ROWS_WITH_IMAGES = 32
"""At once: what is made of their images is held in memory."""


def default_cache() -> Path:
    """Where reference log-probs are kept unless the configuration says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlhf-algos" / "references"


def cache_key(model: str, dtype: str, examples: Sequence[Example]) -> str:
    """Hash of the reference model, the dtype and every token, mask and image; the tokenizer shows in the tokens."""
    digest = hashlib.sha256(f"2 {model_fingerprint(model)} {dtype} ".encode())
    for example in examples:
        for row in (*example.rows, *((example.partner,) if example.partner else ())):
            digest.update(torch.tensor(row.token_ids, dtype=torch.int32).numpy().tobytes())
            digest.update(bytes(row.response_mask) + b"|")
            if row.images is not None:
                digest.update(row.images.digest.encode())
    return digest.hexdigest()[:32]


def with_reference(
    examples: Sequence[Example],
    *,
    directory: Path,
    key: str,
    open_engine: Callable[[], TrainEngine],
    ranks: Ranks,
) -> list[Example]:
    """Examples with the reference's log-probs (and those of their partners), from the cache or scored now.

    Columns: `ref_log_probs_sum`, and for examples of several rows `ref_log_probs_shared`, summed over as many
    tokens as the shortest of the responses has.

    `open_engine` is called only if the cache does not have them; its engine is closed afterwards.
    """
    file = directory / f"{key}.safetensors"
    # All ranks must agree, or some would score and others not.
    known = ranks.max(int(not file.exists())) == 0
    if known:
        sums = load_file(file)["log_probs"]
    else:
        engine = open_engine()
        rows = [row for example in examples for row in _all_rows(example)]
        sums = score_first_tokens(engine, rows, [n for example in examples for n in _shared_tokens(example)], ranks)
        engine.close()
        if rank_of(ranks) == 0:
            _write(file, sums)
    return _attach(examples, sums.tolist())


def score_rows(engine: TrainEngine, rows: Sequence[TokenRow], ranks: Ranks) -> Tensor:
    """Summed log-probs of the counted tokens of each row, [rows] float32, the same on all ranks."""
    return score_first_tokens(engine, rows, [sum(row.response_mask) for row in rows], ranks)[:, 0]


def score_first_tokens(engine: TrainEngine, rows: Sequence[TokenRow], first: Sequence[int], ranks: Ranks) -> Tensor:
    """Log-probs of each row, [rows, 2] float32: summed over all counted tokens, and over the first so many of them.

    The same on all ranks.
    """
    sums = torch.zeros(len(rows), 2)
    at_once = (_ROWS_WITH_IMAGES if any(row.images for row in rows) else _ROWS_AT_ONCE) * ranks.size
    for start in range(0, len(rows), at_once):
        part = rows[start : start + at_once]
        dealt = deal([len(row.token_ids) for row in part], ranks.size)
        mine = dealt[rank_of(ranks)]
        # A rank without rows scores one all the same: the others wait for it in every collective.
        batch = rows_batch([part[i] for i in mine or [0]])
        outputs = engine.score(batch)
        early = torch.tensor([first[start + i] for i in mine or [0]]).unsqueeze(1)
        within = batch.response_mask & (batch.response_mask.long().cumsum(dim=1) <= early)
        log_probs: Tensor = outputs.log_probs  # type: ignore[assignment]
        both = torch.stack([log_probs.sum(dim=1), log_probs.masked_fill(~within, 0).sum(dim=1)], dim=1)
        scored = both.tolist()[: len(mine)]
        for indices, values in zip(dealt, ranks.gather(scored), strict=True):
            if indices:
                places = [start + i for i in indices]
                sums[places] = torch.tensor(values, dtype=torch.float32)  # type: ignore[arg-type]
    return sums


def rows_batch(rows: Sequence[TokenRow]) -> Batch:
    """Rows as a batch of single-row units."""
    return collate_examples([Example(name="", rows=(row,)) for row in rows], pad_token_id=0)


def _all_rows(example: Example) -> tuple[TokenRow, ...]:
    return example.rows if example.partner is None else (*example.rows, example.partner)


def _shared_tokens(example: Example) -> list[int]:
    """For each of `_all_rows`: counted tokens of the shortest response of the example, of a partner its own."""
    shortest = min(sum(row.response_mask) for row in example.rows)
    partner = [] if example.partner is None else [sum(example.partner.response_mask)]
    return [*[shortest] * len(example.rows), *partner]


def _attach(examples: Sequence[Example], sums: list[list[float]]) -> list[Example]:
    result, values = [], iter(sums)
    for example in examples:
        found = [next(values) for _ in example.rows]
        columns = {**example.columns, "ref_log_probs_sum": tuple(whole for whole, _ in found)}
        if len(found) > 1:
            columns["ref_log_probs_shared"] = tuple(shared for _, shared in found)
        if example.partner is not None:
            columns[PARTNER + "ref_log_probs_sum"] = (next(values)[0],)
        result.append(replace(example, columns=columns))
    return result


def _write(file: Path, sums: Tensor) -> None:
    """Beside, then renamed: another run never reads half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as beside:
        save_file({"log_probs": sums.contiguous()}, Path(beside) / file.name)
        os.replace(Path(beside) / file.name, file)
