"""What a search found, as text: the best layouts, what each gains over that of the file, and what to paste."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.planning.calibration import Seconds
from rlhf_launch.planning.candidates import fragment
from rlhf_launch.planning.fit import ERROR
from rlhf_launch.planning.report import RunPlan
from rlhf_launch.planning.search import FoundLayout, Search
from rlhf_launch.tables import aligned


def search_text(result: Search, config: OnlineConfig) -> str:
    """All of it, for people.

    Args:
        result: of the search.
        config: the run as its file has it.
    """
    lines = [f"{result.tried:,} layouts priced; {result.too_large:,} of the fastest do not fit"]
    if not result.found:
        return "\n".join([*lines, "no layout fits: more or larger GPUs are needed, or a smaller max_length"])
    rows = [("", "step (s)", "from", "to", "fullest GPU", "layout")]
    if result.written is not None:
        rows.append(("file", *_numbers(result.written), "as the file says"))
    rows += [
        (str(place), *_numbers(one.plan), one.candidate.summary) for place, one in enumerate(result.found, start=1)
    ]
    lines += ["", aligned(rows, right=(1, 2, 3, 4))]
    if result.written is None:
        lines += ["", f"the layout of the file cannot be placed there: {result.why_not}"]
    for place, one in enumerate(result.found, start=1):
        lines += ["", f"{place}. {_reason(one, result.written)}", fragment(one.config, config)]
    calibrated = result.found[0].plan.source
    return "\n".join([*lines, "", f"seconds are calibrated on {calibrated}, responses as long as they may be"])


def _numbers(plan: RunPlan) -> tuple[str, str, str, str]:
    step = plan.seconds["step"]
    fullest = max(one.peak for one in plan.fit.sets)
    there = 0 if plan.fit.device is None else plan.fit.device.memory
    doubt = " ?" if plan.fit.close or plan.fit.too_large else ""
    memory = f"{fullest / 2**30:.1f} of {there / 2**30:.1f} GiB{doubt}"
    return f"{step.value:,.0f}", f"{step.low:,.0f}", f"{step.high:,.0f}", memory


def _reason(one: FoundLayout, written: RunPlan | None) -> str:
    may_not = f" (planned within {ERROR:.0%}, so it may not fit)" if one.plan.fit.close else ""
    if written is None:
        return f"{one.candidate.summary}{may_not}"
    found = gains(written.seconds, one.plan.seconds)
    if not found:
        return f"as fast as the file{may_not}"
    said = ", ".join(
        f"{name} {abs(seconds):,.1f} s {'less' if seconds > 0 else 'more'}" for name, seconds in found.items()
    )
    return f"against the file: {said}{may_not}"


def gains(before: Mapping[str, Seconds], after: Mapping[str, Seconds]) -> dict[str, float]:
    """Seconds that each phase gained, the step aside; the largest change first, none below a tenth of a second."""
    names = dict.fromkeys([*before, *after])
    found = {name: _of(before, name) - _of(after, name) for name in names if name != "step"}
    changed = {name: seconds for name, seconds in found.items() if abs(seconds) >= 0.1}
    return dict(sorted(changed.items(), key=lambda one: -abs(one[1])))


def _of(seconds: Mapping[str, Seconds], name: str) -> float:
    return seconds[name].value if name in seconds else 0.0
