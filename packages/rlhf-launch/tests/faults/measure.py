"""`nox -s faults`: break real runs, one fault after the other, and print what each of them cost.

    python packages/rlhf-launch/tests/faults/measure.py [--only WORD] [--slow] [--list]

Every row is a run of the `rlhf` command of its own: Ray, two ZeRO-3 ranks, two rollout engines, tiny models. A run
that ended is resumed, and its weights are compared with those of a run that nothing has disturbed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from rlhf_core.testing.tiny import save_tiny_model
from safetensors.torch import load_file

HERE = Path(__file__).parent
MODULES = [str(HERE), str(HERE.parent / "reward_modules")]
ROOT_SHELL = """
mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs /tmp; "$@"; code=$?
ls -A /dev/shm | sed 's,^,/dev/shm/,' > "$LEFT"; ls -A /tmp | sed 's,^,/tmp/,' >> "$LEFT"; exit $code
"""
"""Gives a run shared memory and a temporary folder of its own, so that what it leaves there is seen."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault, and what the run is to make of it."""

    fault: str
    """In words."""
    named: str
    """A pattern of what is to be said, first of all."""
    plan: dict[str, Any] | None = None
    """See faulty_plugins.Fault; without one, `strike` does it."""
    strike: Callable[[Run], None] | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    goes_on: bool = False
    """Whether the run reaches its end all the same."""
    slow: bool = False


@dataclass
class Run:
    """A run of the command, under way or over."""

    folder: Path
    process: subprocess.Popen[str]
    lines: list[tuple[float, str]] = field(default_factory=list)

    def read(self) -> None:
        """Note each line with the time at which it came."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line.rstrip()))

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def rows(self) -> int:
        """Completed steps, by the metrics."""
        path = self.folder / "metrics.jsonl"
        return path.read_text().count('"weight_version"') if path.exists() else 0

    def ray_process(self, name: str) -> int:
        """The id of one of Ray's processes under this run."""
        return next(pid for pid in descendants(self.process.pid) if command_of(pid) == name)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def descendants(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True)
    children: dict[int, list[int]] = {}
    for line in listed.stdout.splitlines():
        child, parent, state = line.split()
        if not state.startswith("Z"):
            children.setdefault(int(parent), []).append(int(child))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


class Bench:
    """Where the runs happen: their inputs, and the undisturbed run that the others are compared with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        save_tiny_model(folder / "policy")
        save_tiny_model(folder / "reward", head="scalar", seed=1)
        rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(24)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self._whole: dict[str, Path] = {}
        self._number = 0

    def settings(self, changes: dict[str, Any]) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "model": {"path": str(self.folder / "policy")},
            "data": {"train": str(self.folder / "prompts.jsonl")},
            "lengths": {"max_prompt_tokens": 16, "max_length": 48},
            "reward": {"function": "launch_rewards:share_of_alphanumerics"},
            "rollout": {
                "backend": "faulty_plugins:Transformers",
                "engines": 2,
                "samples_per_prompt": 2,
                "sampling": {"max_tokens": 12},
            },
            "train": {
                "engine": "faulty_plugins:DeepSpeed",
                "ranks": 2,
                "prompts_per_step": 4,
                "steps": 4,
                "optimizer": {"learning_rate": 1e-3},
            },
            "weight_sync": {"bucket_bytes": 65536},
            "placement": {"executor": "ray", "device": "cpu"},
            "checkpoint": {"every": 1},
            "tensorboard": False,
        }
        for key, value in changes.items():
            inner = settings
            *path, last = key.split(".")
            for part in path:
                inner = inner.setdefault(part, {})
            inner[last] = value
        return settings

    def whole(self, changes: dict[str, Any]) -> Path:
        """The folder of an undisturbed run with these settings, made when it is first asked for."""
        kept = {key: value for key, value in changes.items() if not key.startswith("placement")}
        name = json.dumps(kept, sort_keys=True)
        if name not in self._whole:
            with self.start(kept) as run:
                run.process.wait(600)
            if run.process.returncode:
                raise RuntimeError(f"the undisturbed run failed:\n{run.text}")
            self._whole[name] = run.folder
        return self._whole[name]

    @contextmanager
    def start(
        self, changes: dict[str, Any], *arguments: str, folder: Path | None = None, fault: str | None = None
    ) -> Iterator[Run]:
        """The command on these settings; whatever of it is left is ended when the block ends."""
        self._number += 1
        folder = folder or self.folder / f"run-{self._number}"
        file = self.folder / f"{folder.name}.yaml"
        file.write_text(yaml.safe_dump(self.settings(changes) | {"output": str(folder)}))
        env = os.environ | {"PYTHONPATH": os.pathsep.join(MODULES), "LEFT": str(self.left), "COLUMNS": "400"}
        env |= {"RLHF_LOG": "WARNING"} | ({"FAULT": fault} if fault else {})
        self.left.unlink(missing_ok=True)
        command = [sys.executable, "-c", "from rlhf_launch.cli.main import main; main()", "train", str(file)]
        if os.geteuid() == 0:
            command = ["unshare", "--mount", "sh", "-c", ROOT_SHELL, "sh", *command]
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=self.folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        run = Run(folder, process)
        reader = threading.Thread(target=run.read, daemon=True)
        reader.start()
        try:
            yield run
        finally:
            for pid in [*descendants(process.pid), process.pid]:
                signal_quietly(pid, signal.SIGKILL)
            process.wait()
            reader.join(5)

    @property
    def left(self) -> Path:
        """Where a run's shell writes what it has left in shared memory and the temporary folder."""
        return self.folder / "left.txt"


def signal_quietly(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A row of the table."""

    fault: str
    seconds: float | None
    """From the fault to the line that names it."""
    said: str
    ended: float
    """Seconds from the fault to the end of the command."""
    lost: str
    left: str
    good: bool


def examine(bench: Bench, case: Case) -> Finding:
    """Break a run as the case says, and see what becomes of it."""
    whole = bench.whole(case.changes)
    flag = bench.folder / "flag"
    flag.unlink(missing_ok=True)
    plan = None if case.plan is None else json.dumps({"flag": str(flag), **case.plan})
    with bench.start(case.changes, fault=plan) as run:
        if case.strike is not None:
            wait_for(lambda: run.rows() >= 1 or run.process.poll() is not None, 300)
            flag.write_text(json.dumps({"time": time.time()}))
            case.strike(run)
        run.process.wait(600)
        ended = time.time()
        left = describe_left(bench, run)
    if not flag.exists():
        return Finding(
            fault=case.fault,
            seconds=None,
            said="never happened",
            ended=0,
            lost=run.text[-300:],
            left="",
            good=False,
        )
    struck = json.loads(flag.read_text())["time"]
    said = next(((at, line) for at, line in run.lines if at >= struck - 0.05 and re.search(case.named, line)), None)
    lost, good = what_is_lost(bench, case, run, whole)
    if said is None or not good or os.environ.get("FAULTS_VERBOSE"):
        print(f"--- {case.fault}\n{run.text[-6000:]}\n---", file=sys.stderr, flush=True)
    return Finding(
        fault=case.fault,
        seconds=None if said is None else said[0] - struck,
        said="" if said is None else said[1],
        ended=ended - struck,
        lost=lost,
        left=left,
        good=good and said is not None and left == "nothing",
    )


def what_is_lost(bench: Bench, case: Case, run: Run, whole: Path) -> tuple[str, bool]:
    """What the run has to do again, and whether it then ends with the bits of the undisturbed one."""
    if case.goes_on:
        if run.process.returncode:
            return f"the run ended with {run.process.returncode}", False
        same = same_weights(run.folder, whole)
        return ("nothing" if same else "nothing; other last bits"), True
    if run.process.returncode != 1 or "continue with: rlhf train" not in run.text:
        return f"ended with {run.process.returncode}, no way to go on was said", False
    if any(not (path / "manifest.json").exists() for path in (run.folder / "checkpoints").glob("step-*")):
        return "a checkpoint that is not whole was published", False
    begun = max((int(path.name[-6:]) for path in (run.folder / "checkpoints").glob("step-*")), default=0)
    with bench.start(case.changes, "--resume", folder=run.folder) as resumed:
        resumed.process.wait(600)
    if resumed.process.returncode:
        return f"--resume failed: {resumed.text[-400:]}", False
    same = same_weights(run.folder, whole)
    return f"work since step {begun}; " + ("same bits after --resume" if same else "OTHER BITS"), same


def same_weights(folder: Path, other: Path) -> bool:
    mine, theirs = (load_file(path / "model" / "model.safetensors") for path in (folder, other))
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def describe_left(bench: Bench, run: Run) -> str:
    """What of the run is still there two seconds after its end."""
    time.sleep(2)
    orphans = [pid for pid in descendants(os.getpid()) if command_of(pid) not in ("ps", "resource_tracker")]
    names = sorted(command_of(pid) for pid in orphans)
    for pid in orphans:
        signal_quietly(pid, signal.SIGKILL)
    files = bench.left.read_text().split() if bench.left.exists() else []
    found = [*names, *(re.sub(r"[-_][^/]*$", "-*", name) for name in files)]
    return ", ".join(found) or "nothing"


def wait_for(ready: Callable[[], bool], seconds: float) -> None:
    give_up_at = time.monotonic() + seconds
    while not ready() and time.monotonic() < give_up_at:
        time.sleep(0.05)


def kill_of_ray(name: str) -> Callable[[Run], None]:
    return lambda run: os.kill(run.ray_process(name), signal.SIGKILL)


def killed(worker: str, point: str, call: int = 2, **details: Any) -> dict[str, Any]:
    return {"worker": worker, "point": point, "call": call, **details}


RANK = r"error: \w+: policy-1 \(process \d+ on [\d.]+\) died during "
CASES = [
    Case(
        fault="rollout engine, SIGKILL in generation",
        plan=killed("rollout", "generate", 6),
        named=r"rollout engine \d is lost \(rollout-\d \(process \d+ on [\d.]+\) died during generate",
        goes_on=True,
    ),
    Case(
        fault="rollout engine, SIGKILL in a weight sync",
        plan=killed("rollout", "sync"),
        named=r"rollout engine \d is lost \(rollout-\d \(process \d+ on [\d.]+\) died during receive_weights",
        goes_on=True,
    ),
    Case(
        fault="reward model's worker, SIGKILL in scoring",
        plan=killed("reward-0", "score"),
        named=r"error: .*reward-model-0 \(process \d+ on [\d.]+\) died during score",
        changes={"reward": {"model": "REWARD"}},
    ),
    *(
        Case(fault=f"training rank, SIGKILL in {word}", plan=killed("policy-1", point), named=RANK + method)
        for word, point, method in (
            ("scoring", "score", "score"),
            ("stepping", "step", "step"),
            ("a weight sync", "sync", "send"),
            ("saving, before its part is written", "save", "save"),
            ("saving, after its part is written", "saved", "save"),
        )
    ),
    Case(
        fault="training rank, SIGKILL in stepping, `restarts: 1`",
        plan=killed("policy-1", "step", 3),
        named=r"policy-1 \(process \d+ on [\d.]+\) died during step",
        changes={"placement.restarts": 1},
        goes_on=True,
    ),
    Case(
        fault="training rank, SIGSTOP in stepping, `timeout_s: 20`",
        plan=killed("policy-1", "step", act="SIGSTOP"),
        named=r"error: DeadlineExceeded: .*policy-1",
        changes={"placement.timeout_s": 20},
    ),
    Case(
        fault="Ray's head (gcs_server), SIGKILL",
        strike=kill_of_ray("gcs_server"),
        named=r"Ray's head at [\d.]+ is gone",
    ),
    Case(
        fault="Ray's raylet, SIGKILL",
        strike=kill_of_ray("raylet"),
        named=r"Ray's raylet on this host \([\d.]+\) is gone",
    ),
    Case(
        fault="Ray's head (gcs_server), SIGKILL, `restarts: 1`",
        strike=kill_of_ray("gcs_server"),
        named=r"Ray's head at [\d.]+ is gone",
        changes={"placement.restarts": 1},
        goes_on=True,
    ),
]


def table(findings: list[Finding]) -> str:
    rows = [
        "| fault | seconds until named | ended after | named rightly | lost | left behind |",
        "|---|---|---|---|---|---|",
    ]
    for found in findings:
        named = "no" if found.seconds is None else "yes"
        seconds = "" if found.seconds is None else f"{found.seconds:.1f}"
        rows.append(f"| {found.fault} | {seconds} | {found.ended:.0f} s | {named} | {found.lost} | {found.left} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="the faults with this word in them")
    parser.add_argument("--slow", action="store_true", help="those with vLLM, too")
    parser.add_argument("--list", action="store_true")
    asked = parser.parse_args()
    cases = [case for case in CASES if asked.only in case.fault and (asked.slow or not case.slow)]
    if asked.list:
        print("\n".join(case.fault for case in cases))
        return 0
    # Whatever a run leaves behind becomes a child of this process, and is seen.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    folder = Path(tempfile.mkdtemp(prefix="rlhf-faults-", dir="/var/tmp"))
    findings = []
    try:
        bench = Bench(folder)
        for case in cases:
            changes = json.loads(json.dumps(case.changes).replace("REWARD", str(folder / "reward")))
            found = examine(bench, Case(**{**vars(case), "changes": changes}))
            findings.append(found)
            print(table([found]).splitlines()[-1], "|", found.said[:300], flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n" + table(findings))
    return 0 if all(found.good for found in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
