"""What `rlhf plan` does, and what every run says of itself before it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rlhf_core import ConfigError, ResourceError

from rlhf_launch.config.run import OnlineConfig
from rlhf_launch.placement.fill import filled
from rlhf_launch.placement.layout import Host, lay_out
from rlhf_launch.placement.overview import plans_of
from rlhf_launch.placement.resolve import ResolvedBackends, hosts_there, resolve_backends
from rlhf_launch.planning.calibration import Calibration
from rlhf_launch.planning.devices import Device, device_here, device_named, this_host
from rlhf_launch.planning.fit import fit_run
from rlhf_launch.planning.memory import KnownModels
from rlhf_launch.planning.report import RunPlan, plan_run, refuse_what_does_not_fit
from rlhf_launch.planning.search import Searcher, search
from rlhf_launch.planning.search_report import search_text
from rlhf_launch.planning.timing import own_calibration, step_work


def imagined_hosts(hosts: int, gpus: int) -> list[Host]:
    """So many hosts with so many GPUs each, to plan for."""
    return [Host(name=f"host {number + 1}", gpus=gpus) for number in range(hosts)]


def planned(
    config: OnlineConfig, hosts: Sequence[Host] | None, *, device: str = "", metrics: Path | None = None
) -> RunPlan:
    """The plan of a run on these hosts.

    Args:
        config: the run.
        hosts: where it would be; looked for if not given.
        device: a name of `DEVICES`, or `cpu`; that of this host if empty.
        metrics: of an earlier run, to calibrate on.

    Raises:
        UserError: it cannot be placed there, or a model's configuration is not at hand.
    """
    hosts = hosts_there(config.placement.ray_address) if hosts is None else hosts
    config, _ = filled(config, hosts)
    backends = resolve_backends(config, hosts=hosts)
    lay_out(plans_of(config, backends), hosts)
    chosen = device_named(device) if device else _device(backends)
    known = KnownModels()
    calibration = _calibrated(metrics, config, hosts, chosen, known)
    return plan_run(config, backends, chosen, calibration, host_gpus=_host_gpus(hosts), known=known)


def searched(
    config: OnlineConfig, hosts: Sequence[Host] | None, *, device: str = "", metrics: Path | None = None
) -> str:
    """The best layouts of a run on these hosts, as text; arguments as for `planned`.

    Raises:
        UserError: there is nothing to choose, or a model's configuration is not at hand.
    """
    hosts = hosts_there(config.placement.ray_address) if hosts is None else hosts
    written, _ = filled(config, hosts)
    chosen = device_named(device) if device else device_here()
    if chosen is None:
        raise ConfigError("plan --search: there is no GPU on this host; name one, as in --device h100")
    calibration = _calibrated(metrics, written, hosts, chosen, KnownModels())
    return search_text(search(Searcher(written, hosts, chosen, calibration)), config)


def _calibrated(
    metrics: Path | None, config: OnlineConfig, hosts: Sequence[Host], device: Device | None, known: KnownModels
) -> Calibration | None:
    """The calibration on an earlier run of this configuration, if there was one."""
    if metrics is None or device is None:
        return None
    fit = fit_run(config, resolve_backends(config, hosts=hosts), device, known)
    return own_calibration(metrics, step_work(config, fit, host_gpus=_host_gpus(hosts)), device)


def _host_gpus(hosts: Sequence[Host]) -> int:
    return max((host.gpus for host in hosts), default=0) or 8


def say_plan(config: OnlineConfig, backends: ResolvedBackends, say: Callable[[str], None]) -> None:
    """The short plan before a run. What cannot be planned is said, and stops nothing.

    Raises:
        ResourceError: the run does not fit its GPUs by more than the plan may be off, and
            `placement.check_memory` is `refuse`.
    """
    check = config.placement.check_memory
    if check == "off":
        return
    try:
        found = plan_run(config, backends, _device(backends))
    except Exception as error:  # of whatever kind: a plan is no reason for a run not to start
        say(f"no plan: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
        return
    for line in found.short():
        say(line)
    try:
        refuse_what_does_not_fit(found.fit)
    except ResourceError:
        if check == "refuse":
            raise


def _device(backends: ResolvedBackends) -> Device | None:
    """What the workers sit on: on a cluster, the accelerators of this host stand for all."""
    return device_here() if backends.device == "cuda" else this_host()
