"""Offline distillation: the teacher's most likely tokens, found once and kept on disk, as the student's target."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rlhf_core import (
    Batch,
    ConfigError,
    LossTerms,
    ModelOutputs,
    Ranks,
    cut_batch,
    deal,
    top_k_log_probs,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_algos.data.encoding import TokenRow
from rlhf_algos.data.examples import Example
from rlhf_algos.data.vocabulary import check_same_vocabulary
from rlhf_algos.losses.offline.distillation import DivergenceConfig, distillation_terms, divergence_of_known
from rlhf_algos.offline.reference import cache_key, rows_batch
from rlhf_algos.torch_engine.engine import TorchEngine
from rlhf_algos.torch_engine.ranks import rank_of


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig(DivergenceConfig):
    """Configuration of `distill`."""

    teacher: str = ""
    """Path of a Transformers directory or hub name; with the student's vocabulary."""
    top_k: int = 64
    """How many of the teacher's most likely tokens are kept per position."""
    kd_coef: float = 1.0
    """The loss is kd_coef * divergence + (1 - kd_coef) * negative log-likelihood of the data."""

    def __post_init__(self) -> None:
        DivergenceConfig.__post_init__(self)
        if not self.teacher:
            raise ConfigError("distill needs a teacher; write algorithm.teacher: path/of/the/teacher")
        if self.top_k < 1 or not 0 <= self.kd_coef <= 1:
            raise ConfigError(
                f"distill: top_k must be at least 1 and kd_coef in [0, 1], got {self.top_k} and {self.kd_coef}"
            )

    @property
    def outputs(self) -> tuple[str, ...]:
        """The fields of ModelOutputs that the loss needs."""
        return ("candidate_log_probs", "log_probs") if self.kd_coef < 1 else ("candidate_log_probs",)


def distill(outputs: ModelOutputs, batch: Batch, config: DistillConfig) -> LossTerms:
    """Divergence from the teacher's distribution over its top-k tokens, a mean over counted tokens.

    Columns: `candidate_ids` and `teacher_log_probs`, both [rows, length, k]. Distributions and likelihood are
    those at the temperature of the batch, which is `config.temperature`.
    """
    if outputs.candidate_log_probs is None:
        raise ConfigError("distill needs candidate_log_probs among the engine's outputs")
    mask = batch.response_mask
    student = outputs.candidate_log_probs[mask]
    divergence = divergence_of_known(student, batch["teacher_log_probs"][mask].to(student.dtype), config)
    placed = student.new_zeros(mask.shape).masked_scatter(mask, divergence)
    return distillation_terms(placed, mask, kd_coef=config.kd_coef, log_probs=outputs.log_probs)


def check_teacher(
    config: DistillConfig, student: str, *, tokenizer: str | None = None, trust_remote_code: bool = False
) -> None:
    """Refuse a teacher with another vocabulary, before any weights are loaded.

    Args:
        config: names the teacher.
        student: path or hub name of the student.
        tokenizer: of the student, if it is not in its directory.
        trust_remote_code: whether a directory may bring code for its tokenizer.

    Raises:
        ConfigError: it cannot be found, or its vocabulary has another size or other tokens.
    """
    size = check_same_vocabulary(
        config.teacher,
        student,
        key="algorithm.teacher",
        tokenizer=tokenizer,
        trust_remote_code=trust_remote_code,
    )
    if config.top_k > size:
        raise ConfigError(f"distill: top_k {config.top_k} is more than the vocabulary's {size} tokens")


def with_teacher(
    examples: Sequence[Example],
    config: DistillConfig,
    *,
    directory: Path,
    dtype: str,
    open_engine: Callable[[], TorchEngine],
    ranks: Ranks,
) -> list[Example]:
    """Examples with `candidate_ids` and `teacher_log_probs` for each counted token, from the cache or found now."""
    settings = f"{cache_key(config.teacher, dtype, examples)} {config.top_k} {config.temperature}"
    file = directory / f"teacher-{hashlib.sha256(settings.encode()).hexdigest()[:32]}.safetensors"
    rows = [row for example in examples for row in example.rows]
    if ranks.max(int(not file.exists())) == 0:
        stored = load_file(file)
        ids, log_probs = stored["ids"], stored["log_probs"]
    else:
        engine = open_engine()
        found = _score(engine, rows, config, ranks)
        engine.close()
        ids, log_probs = (torch.cat(part) for part in zip(*found, strict=True))
        if rank_of(ranks) == 0:
            _write(file, {"ids": ids, "log_probs": log_probs})
    counts = [sum(row.response_mask) for row in rows]
    split = zip(ids.split(counts), log_probs.split(counts), strict=True)
    result = []
    for example in examples:
        own = [next(split) for _ in example.rows]
        tensors = {"candidate_ids": tuple(i.long() for i, _ in own), "teacher_log_probs": tuple(p for _, p in own)}
        result.append(replace(example, counted_tensors=tensors))
    return result


def _score(
    engine: TorchEngine, rows: Sequence[TokenRow], config: DistillConfig, ranks: Ranks
) -> list[tuple[Tensor, Tensor]]:
    """(ids, log-probs) of each row, [counted, k]."""
    dealt = deal([len(row.token_ids) for row in rows], ranks.size)
    mine = dealt[rank_of(ranks)]
    own: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * len(mine)
    everything = rows_batch([rows[index] for index in mine or [0]])
    budget = engine.scoring_budget(everything)  # ranks without rows take part in finding it
    cut = cut_batch(everything, budget) if mine else []
    for places in cut:
        batch = replace(rows_batch([rows[mine[p]] for p in places]), temperature=config.temperature)
        log_probs, ids = top_k_log_probs(engine.model, batch.to(engine.device), config.top_k)
        counts = batch.response_mask.sum(dim=1).tolist()
        parts = zip(ids.int().cpu().split(counts), log_probs.cpu().split(counts), strict=True)
        for place, part in zip(places, parts, strict=True):
            own[place] = part
    result: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * len(rows)
    for indices, values in zip(dealt, ranks.gather(own), strict=True):
        for index, value in zip(indices, values, strict=True):  # type: ignore[call-overload]
            result[index] = value
    return result


def _write(file: Path, tensors: dict[str, Tensor]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as beside:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, Path(beside) / file.name)
        os.replace(Path(beside) / file.name, file)
