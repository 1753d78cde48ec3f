"""`nox -s faults`: break real runs, one fault after the other, and print what each of them cost.

    python packages/rlhf-launch/tests/faults/measure.py [--only WORD ...] [--slow] [--list]

Every row is a run of the `rlhf` command of its own: Ray, two ZeRO-3 ranks, two rollout engines, tiny models. A run
that ended is resumed, and its weights are compared with those of a run that nothing has disturbed.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import two_hosts
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
class Break:
    """One fault, and how the run is to name it."""

    fault: str
    """In words."""
    named: str
    """A pattern of what is said of it."""
    plan: dict[str, Any] | None = None
    """See faulty_plugins.Fault; without one, `strike` does it."""
    strike: Callable[[Run], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run in which things break, one after the other, and what is to become of it."""

    breaks: tuple[Break, ...]
    changes: dict[str, Any] = field(default_factory=dict)
    goes_on: bool = False
    """Whether the run reaches its end all the same; else it ends, and is resumed."""
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
        self,
        changes: dict[str, Any],
        *arguments: str,
        folder: Path | None = None,
        faults: str = "[]",
        host: two_hosts.Host | None = None,
    ) -> Iterator[Run]:
        """The command on these settings; whatever of it is left is ended when the block ends."""
        self._number += 1
        folder = folder or self.folder / f"run-{self._number}"
        file = self.folder / f"{folder.name}.yaml"
        file.write_text(yaml.safe_dump(self.settings(changes) | {"output": str(folder)}))
        env = os.environ | {"PYTHONPATH": os.pathsep.join(MODULES), "LEFT": str(self.left), "COLUMNS": "400"}
        env |= {"RLHF_LOG": "WARNING", "FAULTS": faults}
        self.left.unlink(missing_ok=True)
        command = [sys.executable, "-c", "from rlhf_launch.cli.main import main; main()", "train", str(file)]
        if host is not None:
            command, env = host.command(*command), env | host.env
        elif os.geteuid() == 0:
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
    ended: float | None
    """Seconds from the fault to the end of the command; None where the run goes on."""
    lost: str
    left: str
    good: bool


def examine(bench: Bench, case: Case) -> list[Finding]:
    """Break a run as the case says, and see what becomes of it."""
    whole = bench.whole(case.changes)
    flags = [bench.folder / f"flag-{number}" for number in range(len(case.breaks))]
    for flag in flags:
        flag.unlink(missing_ok=True)
    plans = [{"flag": str(flag), **(broken.plan or {})} for flag, broken in zip(flags, case.breaks, strict=True)]
    faults = json.dumps([plan for plan in plans if len(plan) > 1])
    with bench.start(case.changes, faults=faults) as run:
        for flag, broken in zip(flags, case.breaks, strict=True):
            if broken.strike is not None:
                wait_for(lambda: run.rows() >= 1 or run.process.poll() is not None, 300)
                flag.write_text(json.dumps({"time": time.time()}))
                broken.strike(run)
        run.process.wait(900)
        ended = time.time()
        left = describe_left(bench, run)
    lost, good = what_is_lost(bench, case, run, whole)
    findings = []
    for flag, broken in zip(flags, case.breaks, strict=True):
        struck = json.loads(flag.read_text())["time"] if flag.exists() else None
        said = None if struck is None else first_line(run, broken.named, struck)
        findings.append(
            Finding(
                fault=broken.fault if struck is not None else f"{broken.fault} (never happened)",
                seconds=None if said is None or struck is None else said[0] - struck,
                said="" if said is None else said[1],
                ended=None if case.goes_on or struck is None else ended - struck,
                lost=lost,
                left=left,
                good=good and said is not None and left == "nothing",
            )
        )
    if not all(found.good for found in findings) or os.environ.get("FAULTS_VERBOSE"):
        print(f"--- {[found.fault for found in findings]}\n{run.text[-9000:]}\n---", file=sys.stderr, flush=True)
    return findings


def first_line(run: Run, pattern: str, since: float) -> tuple[float, str] | None:
    return next(((at, line) for at, line in run.lines if at >= since - 0.05 and re.search(pattern, line)), None)


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
    orphans = [pid for pid in descendants(os.getpid()) if command_of(pid) not in ("", "ps", "resource_tracker")]
    names = sorted(command_of(pid) for pid in orphans)
    for pid in orphans:
        signal_quietly(pid, signal.SIGKILL)
    files = bench.left.read_text().split() if bench.left.exists() else []
    # torch's cache of compiled code is every process's of this user, and meant to stay.
    files = [name for name in files if "/torchinductor_" not in name]
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


def rank(*methods: str) -> str:
    return rf"policy-1 \(process \d+ on [\d.]+\) died during ({'|'.join((*methods, 'pulse'))})"


ENGINE = r"rollout engine \d is lost \(rollout-\d \(process \d+ on [\d.]+\) died during "
HEAD = r"Ray's head at [\d.]+ is gone"
CASES = [
    Case(
        breaks=(
            Break(
                fault="rollout engine, SIGKILL in generation",
                plan=killed("rollout", "generate", 2),
                named=ENGINE + "(generate|pulse)",
            ),
            Break(
                fault="training rank, SIGKILL in scoring", plan=killed("policy-1", "score", 2), named=rank("score")
            ),
            Break(
                fault="rollout engine, SIGKILL in a weight sync",
                plan=killed("rollout", "sync", 2),
                named=ENGINE + "(receive_weights|pulse)",
            ),
            Break(
                fault="training rank, SIGKILL in stepping", plan=killed("policy-1", "step", 2), named=rank("step")
            ),
            Break(
                fault="training rank, SIGKILL in a weight sync",
                plan=killed("policy-1", "sync", 2),
                named=rank("send"),
            ),
            Break(
                fault="training rank, SIGKILL in saving, when its part is written",
                plan=killed("policy-1", "saved", 1),
                named=rank("save"),
            ),
        ),
        changes={"placement.restarts": 4},
        goes_on=True,
    ),
    Case(
        breaks=(
            Break(
                fault="training rank, SIGKILL in saving, before its part is written",
                plan=killed("policy-1", "save", 2),
                named="error: .*" + rank("save"),
            ),
        ),
    ),
    Case(
        breaks=(
            Break(
                fault="training rank, SIGSTOP in stepping, `timeout_s: 60`",
                plan=killed("policy-1", "step", 2, act="SIGSTOP"),
                named=r"DeadlineExceeded|nothing has moved for .* policy",
            ),
        ),
        changes={"placement.timeout_s": 60, "placement.restarts": 1},
        goes_on=True,
    ),
    Case(
        breaks=(Break(fault="Ray's head (gcs_server), SIGKILL", strike=kill_of_ray("gcs_server"), named=HEAD),),
        changes={"placement.restarts": 1, "train.steps": 60},
        goes_on=True,
    ),
    Case(
        breaks=(
            Break(
                fault="Ray's raylet, SIGKILL",
                strike=kill_of_ray("raylet"),
                named=r"Ray's raylet on this host \([\d.]+\) is gone",
            ),
        ),
        changes={"train.steps": 60},
    ),
    Case(
        breaks=(
            Break(
                fault="reward model's worker, SIGKILL in scoring",
                plan=killed("reward-0", "score", 3),
                named=r"reward-model-0 .*died during (score|pulse)",
            ),
        ),
        changes={"reward": {"model": "REWARD"}, "placement.restarts": 1},
        goes_on=True,
    ),
    Case(
        breaks=(
            Break(
                fault="a worker process of vLLM (tensor parallel), SIGKILL in generation",
                strike=lambda run: kill_below(run, "VLLM"),
                named=r"rollout engine 0 is lost \(.*worker process \S+ was killed by signal 9",
            ),
        ),
        changes={
            "rollout.backend": "vllm",
            "rollout.engines": 1,
            "rollout.tensor_parallel_size": 2,
            "train.steps": 6,
        },
        goes_on=True,
        slow=True,
    ),
]


def kill_below(run: Run, word: str) -> None:
    """End the first process under a run whose command has this word in it."""
    for pid in descendants(run.process.pid):
        if word in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"):
            os.kill(pid, signal.SIGKILL)
            return
    raise LookupError(f"no process under the run has {word!r} in its command")


ON_HOSTS = {
    "the engines": {"policy.hosts": ["10.77.0.1"], "rollout.hosts": ["10.77.0.2"]},
    "the training ranks": {"policy.hosts": ["10.77.0.2"], "rollout.hosts": ["10.77.0.1"]},
    "one rank of two": {"policy.hosts": 2, "rollout.hosts": ["10.77.0.1"]},
}
"""What the host that is lost holds, and the placement that puts it there."""
WAYS = {"kill": "all its processes SIGKILLed", "cut_off": "its network cut off"}


def examine_hosts(bench: Bench, way: str, held: str) -> Finding:
    """Run on two hosts, lose the second by its end (`kill`) or by its wire (`cut_off`), go on with the first."""
    common: dict[str, Any] = {"train.steps": 6}
    whole = bench.whole(common)
    common |= {"placement.ray_address": f"10.77.0.1:{two_hosts.PORT}", "placement.cpus_per_worker": 1}
    placed = {f"placement.{key}": value for key, value in ON_HOSTS[held].items()}
    scratch = Path(tempfile.mkdtemp(prefix="r", dir="/var/tmp"))
    env = {"PYTHONPATH": os.pathsep.join(MODULES), "PATH": os.environ["PATH"]}
    try:
        with two_hosts.two_hosts(scratch, env, (6, 2)) as (first, second):
            with bench.start(common | placed, host=first) as run:
                wait_for(lambda: run.rows() >= 2 or run.process.poll() is not None, 400)
                struck = time.time()
                getattr(second, way)()
                run.process.wait(400)
                ended = time.time()
                held_by_first = [pid for pid in first.processes() if "Worker" in command_of(pid)]
            done = max((int(path.name[-6:]) for path in (run.folder / "checkpoints").glob("step-*")), default=0)
            said = first_line(run, r"10\.77\.0\.2", struck)
            told = "continue with: rlhf train" in run.text and run.process.returncode == 1
            with bench.start(common, "--resume", folder=run.folder, host=first) as resumed:
                resumed.process.wait(400)
            same = resumed.process.returncode == 0 and same_weights(run.folder, whole)
            if said is None or not told or not same:
                text = f"{run.text[-9000:]}\n--- resumed\n{resumed.text[-3000:]}"
                print(f"--- {held}, {way}\n{text}\n---", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Finding(
        fault=f"a host that held {held}, {WAYS[way]}",
        seconds=None if said is None else said[0] - struck,
        said="" if said is None else said[1],
        ended=ended - struck,
        lost=f"work since step {done}; " + ("same bits after --resume on the other" if same else "NOT RESUMED"),
        left=", ".join(map(command_of, held_by_first)) or "nothing",
        good=said is not None and told and same,
    )


def table(findings: list[Finding]) -> str:
    rows = [
        "| fault | seconds until named | ended after | named rightly | lost | left behind |",
        "|---|---|---|---|---|---|",
    ]
    for found in findings:
        named = "no" if found.seconds is None else "yes"
        seconds = "" if found.seconds is None else f"{found.seconds:.1f}"
        ended = "goes on" if found.ended is None else f"{found.ended:.0f} s"
        rows.append(f"| {found.fault} | {seconds} | {ended} | {named} | {found.lost} | {found.left} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="the faults with one of these words in them")
    parser.add_argument("--slow", action="store_true", help="those with vLLM, too")
    parser.add_argument("--list", action="store_true")
    asked = parser.parse_args()
    cases = [case for case in CASES if asked.slow or not case.slow]
    cases = [case for case in cases if any(word in broken.fault for broken in case.breaks for word in asked.only)]
    if asked.list:
        print("\n".join(broken.fault for case in cases for broken in case.breaks))
        return 0
    # Whatever a run leaves behind becomes a child of this process, and is seen.
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
    folder = Path(tempfile.mkdtemp(prefix="rlhf-faults-", dir="/var/tmp"))
    findings = []
    try:
        bench = Bench(folder)
        for case in cases:
            changes = json.loads(json.dumps(case.changes).replace("REWARD", str(folder / "reward")))
            for found in examine(bench, replace(case, changes=changes)):
                findings.append(found)
                print(table([found]).splitlines()[-1], found.said[:300], flush=True)
        hindrance = two_hosts.why_not()
        for way, held in itertools.product(WAYS, ON_HOSTS):
            if not any(word in f"a host that held {held}, {WAYS[way]}" for word in asked.only):
                continue
            if hindrance is not None:
                print(f"two hosts: not tried, {hindrance}")
                break
            found = examine_hosts(bench, way, held)
            findings.append(found)
            print(table([found]).splitlines()[-1], found.said[:300], flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n" + table(findings))
    return 0 if all(found.good for found in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
