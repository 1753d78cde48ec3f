"""The file that batch generation writes: a JSON line per prompt, so that an interrupted run can be continued."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from rlhf_algos import DirectoryLock
from rlhf_core import ConfigError, DataError, DroppedSample, GenerationResult, Score

from rlhf_launch.samples.prompts import Prompt


def make_row(
    prompt: Prompt, result: GenerationResult, texts: Sequence[str], scores: Sequence[Score | DroppedSample] | None
) -> dict[str, Any]:
    """One prompt with its samples, as plain data."""
    samples = [
        {
            "text": text,
            "token_ids": sample.token_ids.tolist(),
            "log_probs": sample.log_probs.tolist(),
            "weight_versions": sample.weight_versions.tolist(),
            "finish_reason": sample.finish_reason,
        }
        for sample, text in zip(result.samples, texts, strict=True)
    ]
    return row_of(prompt, samples, scores, meaning=asdict(result.meaning))


def row_of(
    prompt: Prompt,
    samples: Sequence[Mapping[str, Any]],
    scores: Sequence[Score | DroppedSample] | None,
    *,
    meaning: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """One prompt with samples that are plain data already; `meaning` is that of their log-probs, None without."""
    return {
        "prompt_id": prompt.prompt_id,
        "prompt": prompt.text,
        "prompt_token_ids": prompt.token_ids.tolist(),
        **({} if prompt.source is None else {"prompt_source": prompt.source}),
        "columns": dict(prompt.metadata),
        "log_prob_meaning": meaning,
        "samples": samples if scores is None else [_scored(*pair) for pair in zip(samples, scores, strict=True)],
    }


def _scored(sample: Mapping[str, Any], score: Score | DroppedSample) -> dict[str, Any]:
    if isinstance(score, DroppedSample):
        return {**sample, "score": None, "score_error": score.reason}
    return {**sample, "score": score.value, "score_components": dict(score.components)}


_log = logging.getLogger(__name__)


class GeneratedRows:
    """An output file that is open for appending. Rows come in the order in which they were finished.

    The settings stand beside it in `<name>.settings.json`: rows of different settings do not share a file.

    Raises:
        ConfigError: the file was written with other settings, or another process writes it.
        DataError: a row in it that is not one of this command, other than a torn last one.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._lock = DirectoryLock(path.with_name(f".{path.name}.lock"), what=path, say=_log.warning)
        self._lock.acquire()
        try:
            self._open(path, settings)
        except BaseException:
            self._lock.release()
            raise

    def _open(self, path: Path, settings: Mapping[str, Any]) -> None:
        beside = path.with_name(path.name + ".settings.json")
        text = json.dumps(settings, indent=1, sort_keys=True, default=str) + "\n"
        if path.exists() and path.stat().st_size:
            _check_settings(path, beside, json.loads(text))
        else:
            _write_whole(beside, text)
        self.done = _keep_complete_rows(path)
        """Prompt ids and prompt tokens of the rows that are there."""
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> GeneratedRows:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                os.fsync(self._file.fileno())
        finally:
            with contextlib.suppress(OSError) if error is not None else contextlib.nullcontext():
                self._file.close()  # the first error is the one to be told
            self._lock.release()

    def pending(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts without a row.

        Raises:
            DataError: a row is there for another prompt of the same id: the data has changed.
        """
        for prompt in prompts:
            before = self.done.get(prompt.prompt_id)
            if before is not None and before != prompt.token_ids:
                raise DataError(
                    f"{self.path}: its row {prompt.prompt_id} belongs to another prompt than that row "
                    "of the data now; the data or the tokenizer has changed, so give another output file"
                )
        return [prompt for prompt in prompts if prompt.prompt_id not in self.done]

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row, which from then on survives the end of this process, however it ends."""
        self._file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
        self._file.flush()


def _check_settings(path: Path, beside: Path, settings: Mapping[str, Any]) -> None:
    if not beside.exists():
        raise ConfigError(f"{path} exists and was not written by this command; give another output file")
    before = json.loads(beside.read_text(encoding="utf-8"))
    for name in sorted({*before, *settings}):
        if before.get(name) != settings.get(name):
            raise ConfigError(
                f"{path} was begun with {name}={before.get(name)!r}, now it is {settings.get(name)!r}; go on with "
                "the same settings, or give another output file"
            )


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _keep_complete_rows(path: Path) -> dict[str, tuple[int, ...]]:
    """Cut off a torn last line; returns prompt ids and prompt tokens of the other lines."""
    if not path.exists():
        return {}
    with path.open("rb+") as file:
        done: dict[str, tuple[int, ...]] = {}
        end = 0
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line) if line.endswith(b"\n") else None
                if row is None:
                    break
                done[row["prompt_id"]] = tuple(row["prompt_token_ids"])
            except (ValueError, KeyError, TypeError):
                if file.read(1):
                    raise DataError(
                        f"{path} row {number} was not written by this command; give another output file, or mend it"
                    ) from None
                break
            end += len(line)
        file.truncate(end)
    return done
