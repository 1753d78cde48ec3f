"""Kills a run at random moments and goes on with it until it is done; counts what that costs."""

from __future__ import annotations

import getpass
import random
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from chaos.comparison import account_faults, differences
from chaos.forms import Form
from chaos.phases import PhaseFile
from chaos.processes import Family
from chaos.records import How, Kill, Life
from chaos.warm import WarmStarter
from rlhf_algos import read_metrics


class Campaign:
    """Runs of one form: one that is left alone, and others that are killed and compared with it."""

    def __init__(
        self,
        form: Form,
        folder: Path,
        *,
        seed: int = 0,
        hows: Sequence[How] = ("all",),
        say: Callable[[str], None] = print,
        private: bool = False,
        starter: WarmStarter | None = None,
    ) -> None:
        """Run below `folder`.

        Args:
            form: what is run.
            folder: inputs, outputs and logs.
            seed: of the moments.
            hows: ways of killing, by turns.
            say: is told what happens.
            private: whether this process has /tmp and /dev/shm for itself, so that all that is left there is the
                run's.
            starter: starts commands in a moment; not for those that start Ray.
        """
        self.form, self.folder, self.say, self.private = form, folder, say, private
        self.random = random.Random(f"{seed}/{form.name}")
        self.hows = hows
        self.starter = starter
        self.whole = folder / f"{form.name}-whole"
        self._phases: list[str] = []
        self._killed = 0
        self._start_s = 10.0
        self._before = self._scratch()

    def run_whole(self) -> Path:
        """The run that nobody kills; done once."""
        if not (self.whole / "done").exists():
            shutil.rmtree(self.whole, ignore_errors=True)
            begin = time.monotonic()
            family, phases = self._start(self.whole)
            while phases.now == "start" and family.root is not None and family.root.poll() is None:
                time.sleep(0.05)
            self._start_s = time.monotonic() - begin
            code = family.root.wait() if family.root is not None else 1
            if code:
                raise RuntimeError(f"{self.form.name} fails by itself: {family.log.read_text()[-3000:]}")
            (self.whole / "done").write_text(f"{time.monotonic() - begin:.1f} s, start {self._start_s:.1f} s\n")
        return self.whole

    def run_life(self, life: int, kills: int) -> Life:
        """One run, killed up to so often, then left to its end and compared."""
        self.run_whole()
        begin = time.monotonic()
        record = Life(form=self.form.name, life=life)
        output = self.folder / f"{self.form.name}-{life}"
        shutil.rmtree(output, ignore_errors=True)
        resume = done = False
        while len(record.kills) < kills and not done:
            family, phases = self._start(output, resume=resume)
            kill = self._kill(family, phases, output, life, resume=resume)
            if kill is not None:
                record.kills.append(kill)
                self.say(
                    f"{self.form.name} {life}: kill {len(record.kills)} ({kill.how}) in {kill.phase} after step "
                    f"{kill.step}, {kill.seconds:.1f} s"
                    + (f", gone after {kill.until_gone_s:.1f} s" if kill.until_gone_s is not None else "")
                    + (f", exit {kill.exit_code}" if kill.exit_code is not None else "")
                )
            elif family.root is not None and family.root.returncode == 0:
                done = True  # before the moment came
            elif not self._had_nothing_to_resume(family):
                record.faults.append(f"a start failed: {family.log.read_text()[-1500:]}")
                return record
            else:
                record.begun_anew += 1
                resume = False
                continue
            record.resumes += resume
            resume = True
        if not done:
            record.resumes += self._finish(output, record, resume=resume)
        if not record.faults:
            self._judge(record, output)
        record.seconds = time.monotonic() - begin
        return record

    def _finish(self, output: Path, record: Life, *, resume: bool) -> int:
        """Let the run come to its end; returns how many resumes that took."""
        for again in (resume, False):
            family, _ = self._start(output, resume=again)
            assert family.root is not None
            code = family.root.wait()
            gone_s, stayed = family.seconds_until_gone(limit_s=60)
            if stayed:
                record.left += [f"process {name} after {gone_s:.0f} s" for name in stayed]
                family.kill()
            if code == 0:
                return int(again)
            if not self._had_nothing_to_resume(family):
                record.faults.append(f"the last start failed ({code}): {family.log.read_text()[-1500:]}")
                return int(again)
            record.begun_anew += 1
        return 0

    def _judge(self, record: Life, output: Path) -> None:
        if self.form.exact:
            record.differences = differences(self.whole, output)
        if self.form.account:
            record.faults += account_faults(output, **self.form.account)
        record.left += sorted(self._scratch() - self._before)
        record.left += sorted(
            str(path.relative_to(output))
            for pattern in (".*", "checkpoints/.*", "*.tmp", "*.old")
            for path in output.glob(pattern)
            if path.name != ".lock"
        )

    def _start(self, output: Path, *, resume: bool = False) -> tuple[Family, PhaseFile]:
        mark = secrets.token_hex(6)
        output.parent.mkdir(parents=True, exist_ok=True)
        told = self.folder / f"phase-{mark}"
        phases = PhaseFile.open(told, new=True)
        arguments = [str(told), *self.form.write(self.folder, output), *(["--resume"] if resume else [])]
        log = self.folder / f"log-{output.name}-{mark}.txt"
        family = Family(arguments, mark, log, env={"RLHF_TRACEBACK": "1"}, starter=self.starter)
        family.start()
        return family, phases

    def _kill(self, family: Family, phases: PhaseFile, output: Path, life: int, *, resume: bool) -> Kill | None:
        """Kill at a random moment of the next phase on the list; None if the run ended before."""
        begin, root = time.monotonic(), family.root
        assert root is not None
        how, asked = self.hows[self._killed % len(self.hows)], self._next_phase(resume=resume)
        if asked == "start":
            self._sleep(self.random.uniform(0.0, self._start_s), root)
        else:
            left = self.form.steps - _steps(output) if resume else self.form.steps
            once = asked in ("restore", "export", "closing") or left < 4
            self._await_phase(asked, 1 if once else self.random.choice((1, 1, 2, 3)), phases, root, left=left)
            # Anywhere in a phase: most are shorter than this, some are longer.
            self._sleep(self.random.choice((0.0, 0.002, 0.01, 0.05, 0.2)) * self.random.random(), root)
        if root.poll() is not None:
            return None
        phase, seconds = phases.now, time.monotonic() - begin
        kill = Kill(form=self.form.name, life=life, how=how, asked=asked, phase=phase, step=0, seconds=seconds)
        self._end(family, kill)
        kill.step = _steps(output)
        self._killed += 1
        return kill

    def _await_phase(self, asked: str, times: int, phases: PhaseFile, root: Any, *, left: int) -> None:
        """Wait for a phase, or for the last moment before the run comes to its end without it."""
        while root.poll() is None and not (phases.now == asked and phases.entered(asked) >= times):
            time.sleep(0.0005)
            late = asked not in ("export", "closing") and phases.entered("stepping") >= max(1, left - 1)
            if late or phases.now == "closing" or (asked == "restore" and phases.entered("stepping")):
                return

    def _end(self, family: Family, kill: Kill) -> None:
        root = family.root
        assert root is not None
        if kill.how == "all":
            family.kill()
            return
        if kill.how == "command":
            family.kill_root()
        else:
            family.members()
            family.send(signal.SIGTERM)
            begin = time.monotonic()
            root.wait(timeout=120)
            kill.exit_code = root.returncode
            kill.seconds = time.monotonic() - begin
        kill.until_gone_s, kill.stayed = family.seconds_until_gone(limit_s=60)
        family.kill()

    def _next_phase(self, *, resume: bool) -> str:
        """Every phase once, in a random order, then again."""
        if not self._phases:
            self._phases = self.random.sample(self.form.phases, len(self.form.phases))
        for place, phase in enumerate(self._phases):
            if resume or phase != "restore":
                return self._phases.pop(place)
        self._phases = []
        return "start"

    def _had_nothing_to_resume(self, family: Family) -> bool:
        return (
            family.root is not None
            and family.root.returncode == 2
            and "nothing to resume" in family.log.read_text()
        )

    def _sleep(self, seconds: float, root: Any) -> None:
        until = time.monotonic() + seconds
        while root.poll() is None and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))

    def _scratch(self) -> set[str]:
        """What lies in shared memory and among the temporary files, where both are this campaign's alone."""
        if not self.private:
            return set()
        found = {str(path) for folder in ("/dev/shm", "/tmp") for path in Path(folder).iterdir()}
        return found - {f"/tmp/torchinductor_{getpass.getuser()}"}  # torch's cache, for all runs of a user


def _steps(output: Path) -> int:
    file = output / "metrics.jsonl"
    rows = read_metrics(file) if file.exists() else []
    return max((int(row["step"]) for row in rows), default=0)
