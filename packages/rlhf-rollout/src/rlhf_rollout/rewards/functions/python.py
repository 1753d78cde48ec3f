"""A user's Python function as a reward: checked before the run, kept off the event loop, held to a deadline."""

from __future__ import annotations

import asyncio
import inspect
import os
import sysconfig
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from rlhf_core import PluginError, RewardError, Score, Trajectory, check_scores, load_object

from rlhf_rollout.rewards.functions.signature import HOW_TO, check_renamed, read_signature, with_options


class RewardTooSlow(RewardError):
    """A reward missed its deadline."""


class PythonReward:
    """RewardFunction from a function, sync or async, or its `module:function` path.

    The function takes either one sample (`completion`, `prompt`) or a batch (`completions`, `prompts`, the
    convention of TRL), and by name any column of the data; batched functions get columns as lists. It may also
    ask for `completion_ids`, the response's token ids. It returns a number per sample, or a dict whose `score` is
    the number and whose other entries are logged under their names. `options` are further keyword arguments, the
    same in every call; `columns` says which column of the data a parameter takes where their names differ.

    Raises:
        PluginError: the path cannot be imported, the signature is neither of the two, or has not the options.
    """

    def __init__(
        self,
        function: str | Callable[..., Any],
        *,
        timeout_s: float = 60.0,
        name: str | None = None,
        options: Mapping[str, Any] | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(function, str):
            name = name or function
            function = load_object(function, what="reward function")
        if not callable(function):
            raise PluginError(f"reward function {name!r} is a {type(function).__name__}, not a function; {HOW_TO}")
        self.name: str = name or getattr(function, "__qualname__", type(function).__name__)
        function, options = with_options(function, options or {}, name=self.name)
        self.signature = read_signature(function, name=self.name, bound=frozenset(options))
        self._function = function
        self._bound = frozenset(options)
        self._renamed = check_renamed(columns or {}, self.signature, name=self.name)
        self._timeout_s = timeout_s

    @property
    def columns(self) -> frozenset[str]:
        """Columns that the data must have."""
        required = self.signature.required - {"completion_ids"}
        return frozenset(self._renamed.get(parameter, parameter) for parameter in required)

    async def score(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Score]:
        """See RewardFunction.

        Raises:
            RewardError: the function raised, missed its deadline, or returned the wrong number or kind of
                scores. The message names the function and the samples.
        """
        if not trajectories:
            return []
        self._check_columns(trajectories)
        # Not the event loop's own pool: its threads are joined at exit, so one hanging reward would hang the run.
        future: Future[list[Any]] = Future()
        thread = threading.Thread(
            target=self._run, args=(trajectories, texts, future), name=f"reward {self.name}", daemon=True
        )
        thread.start()
        try:
            values = await asyncio.wait_for(asyncio.wrap_future(future), self._timeout_s)
        except TimeoutError:
            raise RewardTooSlow(
                f"reward {self.name} did not return within {self._timeout_s:g} s for {_names(trajectories)}; "
                "make it faster, give it its own time limit, or raise timeout_s"
            ) from None
        if len(values) != len(trajectories):
            raise RewardError(
                f"reward {self.name} returned {len(values)} scores for {len(trajectories)} samples "
                f"({_names(trajectories)}); return exactly one per sample, in order"
            )
        scores = [_score(value, self.name, t.sample_id) for value, t in zip(values, trajectories, strict=True)]
        check_scores(scores, trajectories, source=self.name)
        return scores

    def _check_columns(self, trajectories: Sequence[Trajectory]) -> None:
        for trajectory in trajectories:
            if missing := self.columns - set(trajectory.metadata):
                raise RewardError(
                    f"reward {self.name} needs the column {min(missing)!r}, which sample "
                    f"{trajectory.sample_id!r} does not have (columns: {', '.join(sorted(trajectory.metadata))}); "
                    "add it to the data, rename it by columns, or give the parameter a default",
                    sample_ids=(trajectory.sample_id,),
                )

    def _run(self, trajectories: Sequence[Trajectory], texts: Sequence[str], future: Future[list[Any]]) -> None:
        """The thread's work; an async function gets an event loop of its own."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            if self.signature.batched:
                result = _finish(self._function(**self._batch_arguments(trajectories, texts)))
                outcome = result.tolist() if hasattr(result, "tolist") else list(result)
            else:
                outcome = self._run_one_by_one(trajectories, texts)
        except RewardError as error:
            future.set_exception(error)
        except BaseException as error:
            future.set_exception(self._failure(error, _names(trajectories)))
        else:
            future.set_result(outcome)

    def _run_one_by_one(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> list[Any]:
        """Sync functions one after another, async ones all at once."""
        calls = []
        for trajectory, text in zip(trajectories, texts, strict=True):
            try:
                calls.append(self._function(**self._sample_arguments(trajectory, text)))
            except Exception as error:
                raise self._failure(error, f"sample {trajectory.sample_id!r}", trajectory) from error
        if not any(map(inspect.isawaitable, calls)):
            return calls

        async def all_at_once() -> list[Any]:
            return await asyncio.gather(*calls, return_exceptions=True)

        outcomes = asyncio.run(all_at_once())
        for trajectory, outcome in zip(trajectories, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                raise self._failure(outcome, f"sample {trajectory.sample_id!r}", trajectory) from outcome
        return outcomes

    def _failure(self, error: BaseException, samples: str, trajectory: Trajectory | None = None) -> RewardError:
        failure = RewardError(
            f"reward {self.name} raised {type(error).__name__} for {samples}: {error}{_line_of(error)}",
            sample_ids=(trajectory.sample_id,) if trajectory is not None else (),
        )
        failure.__cause__ = error
        return failure

    def _batch_arguments(self, trajectories: Sequence[Trajectory], texts: Sequence[str]) -> dict[str, Any]:
        rows = [self._row(trajectory) for trajectory in trajectories]
        names = set().union(*rows) - self._bound if self.signature.any_columns else self.signature.columns
        columns = {name: [row.get(name) for row in rows] for name in names if any(name in row for row in rows)}
        columns.pop("prompts", None)
        if self.signature.any_columns or "prompts" in self.signature.columns:
            columns["prompts"] = [row.get("prompt") for row in rows]
        return {**columns, "completions": list(texts)}

    def _sample_arguments(self, trajectory: Trajectory, text: str) -> dict[str, Any]:
        row = self._row(trajectory)
        names = set(row) - self._bound if self.signature.any_columns else self.signature.columns & set(row)
        wanted = {name: row[name] for name in names}
        return {**wanted, "completion": text}

    def _row(self, trajectory: Trajectory) -> dict[str, Any]:
        """The columns of one sample, under the names of the function's parameters."""
        data = trajectory.metadata
        renamed = {parameter: data[column] for parameter, column in self._renamed.items() if column in data}
        return {**data, **renamed, "completion_ids": list(trajectory.response_token_ids)}


def _finish(result: Any) -> Any:
    """The value of a call, awaited if it is a coroutine."""
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    return asyncio.run(wait())


def _score(value: Any, name: str, sample_id: str) -> Score:
    """A returned number or dict as a Score."""
    parts: Mapping[str, Any] = value if isinstance(value, Mapping) else {"score": value}
    try:
        numbers = {key: float(part) for key, part in parts.items()}
        return Score(value=numbers.pop("score"), components=numbers)
    except (TypeError, ValueError, KeyError):
        raise RewardError(
            f"reward {name} returned {value!r} for sample {sample_id!r}; "
            "return a number, or a dict of numbers with the key 'score'",
            sample_ids=(sample_id,),
        ) from None


def _line_of(error: BaseException) -> str:
    """Where a function of the user's raised: the innermost line that is neither ours nor an installed library's."""
    frames = traceback.extract_tb(error.__traceback__)
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    theirs = [frame for frame in frames if frame.filename != __file__]
    own = [f for f in theirs if not any(f.filename.startswith(f"{root}{os.sep}") for root in installed)]
    frame = next(iter((own or theirs)[-1:]), None)
    return f" ({frame.filename}:{frame.lineno} in {frame.name}: {frame.line})" if frame is not None else ""


def _names(trajectories: Sequence[Trajectory], *, most: int = 5) -> str:
    names = ", ".join(repr(trajectory.sample_id) for trajectory in trajectories[:most])
    return f"samples {names}" + (f" and {len(trajectories) - most} more" if len(trajectories) > most else "")
