"""The options of the DeepSpeed engine, and the DeepSpeed configuration that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlhf_core import ConfigError, EngineConfig, LoraConfig, config_from
from rlhf_core.adapters.lora import FourBit

Stage = Literal[0, 1, 2, 3]
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """What `EngineConfig.options` may hold for this engine.

    >>> ZeroConfig.from_options({"stage": 2}).stage
    2
    """

    packing: bool = True
    """Run rows unpadded, and prompts that rows share once, where the model allows it."""
    stage: Stage = 3
    """0 replicates everything, 1 shards the optimizer, 2 the gradients as well, 3 the parameters as well."""
    lora: LoraConfig | None = None
    """Train adapters only; needs the extra `lora`."""
    freeze: tuple[str, ...] = ()
    """Shell patterns of parameter names (`model.layers.0.*`) that are not trained."""
    freeze_steps: int = 0
    """The first so many calls of `step` report losses and metrics, and leave everything as it is."""
    average_decay: float | None = None
    """Keep an exponential moving average of the weights with this decay, in host memory."""
    sequence_parallel_size: int = 1
    """Consecutive ranks that share their rows and hold a slice of the tokens each (Ulysses); for long rows."""
    autotp_size: int = 1
    """Consecutive ranks that share their rows and hold a slice of each layer's weights (DeepSpeed's AutoTP, tensor
    parallelism); stages 1 and 2."""
    deep_compile: bool = False
    """Compile the model with DeepCompile. CUDA, stages 1 and 3."""
    routing_replay: bool = False
    """Mixture-of-experts models: `score` of log-probs also says which experts each token went through
    (`routed_experts`), and a batch with this column runs through them again, in `score` and `step`."""
    offload_optimizer: bool = False
    """Keep optimizer state and master weights in host memory (stage 1 and up)."""
    offload_parameters: bool = False
    """Keep the parameter shards in host memory (stage 3)."""
    pin_memory: bool = True
    """Page-lock offloaded buffers; has no effect on the CPU."""
    zero_hpz_partition_size: int = 1
    """Ranks within which a second copy of the parameter shards is kept, so that the backward pass gathers within
    a node (ZeRO++); 1 switches it off. Stage 3."""
    param_persistence_threshold: int = 100_000
    """Parameters of up to this many elements are not sharded (stage 3)."""
    prefetch_bucket_size: int = 50_000_000
    """Elements gathered ahead of their use (stage 3)."""
    max_live_parameters: int = 1_000_000_000
    """Elements of gathered parameters per rank above which none is gathered ahead (stage 3)."""
    reduce_bucket_size: int = 50_000_000
    """Elements of gradients that are reduced together."""
    overlap_comm: bool | None = None
    """Reduce gradients during the backward pass; None does so on CUDA."""
    accumulate_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Micro-batch gradients are added up in this type. float32 for a 16-bit model needs stage 2 or 3."""
    export_shard_bytes: int = 4 << 30
    """Size of the files that `export` writes; also the host memory it takes."""
    timeout_s: float = 1800.0
    """Deadline of every collective among the training ranks."""

    def __post_init__(self) -> None:
        if self.stage not in (0, 1, 2, 3):
            raise ConfigError(f"engine options: stage must be 0, 1, 2 or 3, got {self.stage!r}")
        for name in (
            "packing",
            "routing_replay",
            "offload_optimizer",
            "offload_parameters",
            "pin_memory",
            "deep_compile",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"engine options: {name} must be true or false, got {getattr(self, name)!r}")
        if self.average_decay is not None and not 0 < self.average_decay < 1:
            raise ConfigError(f"engine options: average_decay must lie in (0, 1), got {self.average_decay}")
        if self.freeze_steps < 0:
            raise ConfigError(f"engine options: freeze_steps must not be negative, got {self.freeze_steps}")
        if self.offload_optimizer and self.stage == 0:
            raise ConfigError("engine options: offload_optimizer needs stage 1, 2 or 3, got stage 0")
        if self.offload_parameters and self.stage != 3:
            raise ConfigError(f"engine options: offload_parameters needs stage 3, got stage {self.stage}")
        if self.zero_hpz_partition_size > 1 and self.quantize is not None:
            raise ConfigError(
                "engine options: zero_hpz_partition_size does not work with 4-bit weights (lora.quantize); leave "
                "it at 1"
            )
        if self.zero_hpz_partition_size > 1 and self.stage != 3:
            raise ConfigError(f"engine options: zero_hpz_partition_size needs stage 3, got stage {self.stage}")
        if self.routing_replay and self.sequence_parallel_size > 1:
            raise ConfigError("engine options: routing_replay does not work with sequence_parallel_size above 1")
        for name in (
            "zero_hpz_partition_size",
            "sequence_parallel_size",
            "autotp_size",
            "reduce_bucket_size",
            "export_shard_bytes",
            "timeout_s",
        ):
            if getattr(self, name) <= 0:
                raise ConfigError(f"engine options: {name} must be positive, got {getattr(self, name)}")
        if self.accumulate_dtype not in _SHORT:
            raise ConfigError(
                f"engine options: accumulate_dtype must be one of {', '.join(_SHORT)}, "
                f"got {self.accumulate_dtype!r}"
            )

    @property
    def quantize(self) -> FourBit | None:
        """The 4-bit type of the frozen linear layers, if they are to be quantised."""
        return None if self.lora is None else self.lora.quantize

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ZeroConfig:
        """The configuration that `EngineConfig.options` describe.

        Raises:
            ConfigError: an unknown key, for which the nearest known one is given, or a value that is refused.
        """
        given = dict(options)
        if isinstance(freeze := given.get("freeze"), str):
            given["freeze"] = (freeze,)
        if isinstance(lora := given.get("lora"), Mapping):
            given["lora"] = config_from(LoraConfig, lora, what="the option lora")
        return config_from(cls, given, what="the deepspeed engine")


def deepspeed_config(config: EngineConfig, zero: ZeroConfig, *, world_size: int) -> dict[str, Any]:
    """The dictionary that `deepspeed.initialize` and `deepspeed.zero.Init` take."""
    trained = config.optimizer is not None
    result: dict[str, Any] = {
        # Micro-batches have any number of rows and a step any number of them; the engine scales losses itself.
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.optimizer.max_grad_norm if config.optimizer else 0.0,
        "steps_per_print": 1 << 60,
        "zero_optimization": _zero_section(config, zero),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": config.dtype == "bfloat16"},
    }
    if zero.autotp_size > 1:
        # DeepSpeed derives the size of the batch from the ranks that have rows of their own.
        del result["train_batch_size"]
        result["tensor_parallel"] = {"autotp_size": zero.autotp_size}
    if zero.deep_compile:
        result["compile"] = {"deepcompile": True}
    if config.optimizer is not None and config.optimizer.kind == "muon":
        # Muon needs whole gradients, which a reduce-scatter does not leave.
        result["zero_optimization"]["reduce_scatter"] = False
    if config.dtype == "float16":
        result["fp16"] = {"enabled": True, "initial_scale_power": 16, "hysteresis": 1}
    if trained:
        dtype = "float32" if config.dtype == "float32" else zero.accumulate_dtype
        result["data_types"] = {"grad_accum_dtype": _SHORT[dtype]}
    return result


def _zero_section(config: EngineConfig, zero: ZeroConfig) -> dict[str, Any]:
    on_cuda = config.device.startswith("cuda")
    pin = zero.pin_memory and on_cuda
    section: dict[str, Any] = {
        "stage": zero.stage,
        "reduce_bucket_size": zero.reduce_bucket_size,
        "overlap_comm": on_cuda if zero.overlap_comm is None else zero.overlap_comm,
        "contiguous_gradients": True,
    }
    if zero.offload_optimizer:
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": pin}
    if zero.stage == 3:
        section |= {
            "stage3_param_persistence_threshold": zero.param_persistence_threshold,
            "stage3_prefetch_bucket_size": zero.prefetch_bucket_size,
            "stage3_max_live_parameters": zero.max_live_parameters,
            "zero_hpz_partition_size": zero.zero_hpz_partition_size,
        }
        if zero.offload_parameters:
            section["offload_param"] = {"device": "cpu", "pin_memory": pin}
    return section
