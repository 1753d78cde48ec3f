"""The options of the DeepSpeed engine, and the DeepSpeed configuration that follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from rlhf_core import (
    ConfigError,
    EngineConfig,
    check_choice,
    check_number,
    check_switch,
    check_whole,
)

Stage = Literal[0, 1, 2, 3]
LIVE_BEYOND_HEAD = 1_000_000_000
"""Elements beside the head's that may be gathered, where nothing else is asked for: DeepSpeed's default for all."""
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


_NO_EXPERT_PARALLELISM = (
    "this engine does not divide experts among ranks. DeepSpeed's AutoEP puts blocks of its own in the place of "
    "the model's, and a rank holds w1, w2 and w3 of its share of the experts, which are no tensors of the "
    "checkpoint: weights could not be sent to rollout engines or exported (docs/training-engine.md). Leave it out; "
    "at stage 3 experts are sharded like all parameters"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """The options of this engine: what `EngineConfig.options` may hold.

    >>> ZeroConfig.of(EngineConfig(model="m", options={"stage": 2})).stage
    2
    """

    stage: Stage = 3
    """0 replicates everything, 1 shards the optimizer, 2 the gradients as well, 3 the parameters as well."""
    freeze: tuple[str, ...] = ()
    """Shell patterns of parameter names (`model.layers.0.*`) that are not trained."""
    freeze_steps: int = 0
    """For this many calls, `step` reports losses and metrics and changes nothing."""
    autotp_size: int = 1
    """Consecutive ranks that share their rows and hold a slice of each layer's weights (DeepSpeed's AutoTP, tensor
    parallelism); stages 1 and 2."""
    deep_compile: bool = False
    """Compile the model with DeepCompile. CUDA, stages 1 and 3."""
    liger_kernels: bool = False
    """Run norms and gated MLPs by the fused kernels of the library Liger. CUDA; needs the extra `liger`. Off, since
    the bits of scores and gradients are others, and not those of the rollout engine's kernels either."""
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
    max_live_parameters: int | None = None
    """Elements of gathered parameters per rank above which none is gathered ahead (stage 3). None: those of the
    language-model head and 1e9 more, since the head is gathered all the time, and that of a large model has more
    than DeepSpeed's 1e9 by itself (a Llama of 70B 1.05e9): nothing would be gathered ahead."""
    reduce_bucket_size: int = 50_000_000
    """Elements of gradients that are reduced together."""
    overlap_comm: bool | None = None
    """Reduce gradients during the backward pass; None does so on CUDA."""
    accumulate_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Micro-batch gradients are added up in this type. float32 for a 16-bit model needs stage 2 or 3."""
    reduce_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Gradients are added up over ranks in this type (DeepSpeed's `communication_data_type`, whose own default is
    the model's). The model's 16 bits halve what is sent, and round each sum (docs/numbers.md)."""
    export_shard_bytes: int = 4 << 30
    """Size of the files that `export` writes; also the host memory it takes."""
    timeout_s: float = 1800.0
    """Deadline of every collective among the training ranks."""

    def __post_init__(self) -> None:
        if isinstance(self.freeze, str):
            object.__setattr__(self, "freeze", (self.freeze,))
        check_choice("engine options: stage", self.stage, get_args(Stage))
        for name in ("offload_optimizer", "offload_parameters", "pin_memory", "deep_compile", "liger_kernels"):
            check_switch(f"engine options: {name}", getattr(self, name))
        for name in ("zero_hpz_partition_size", "autotp_size", "reduce_bucket_size", "export_shard_bytes"):
            check_whole(f"engine options: {name}", getattr(self, name), at_least=1)
        for name in (
            "freeze_steps",
            "param_persistence_threshold",
            "prefetch_bucket_size",
            "max_live_parameters",
        ):
            if getattr(self, name) is not None:
                check_whole(f"engine options: {name}", getattr(self, name), at_least=0)
        check_number("engine options: timeout_s", self.timeout_s, above=0)
        check_choice("engine options: accumulate_dtype", self.accumulate_dtype, _SHORT)
        check_choice("engine options: reduce_dtype", self.reduce_dtype, _SHORT)
        if self.offload_optimizer and self.stage == 0:
            raise ConfigError("engine options: offload_optimizer needs stage 1, 2 or 3, got stage 0")
        if self.offload_parameters and self.stage != 3:
            raise ConfigError(f"engine options: offload_parameters needs stage 3, got stage {self.stage}")
        if self.zero_hpz_partition_size > 1 and self.stage != 3:
            raise ConfigError(f"engine options: zero_hpz_partition_size needs stage 3, got stage {self.stage}")

    def most_live(self, head: int) -> int:
        """`max_live_parameters` for a head of so many elements."""
        return head + LIVE_BEYOND_HEAD if self.max_live_parameters is None else self.max_live_parameters

    @classmethod
    def of(cls, config: EngineConfig) -> ZeroConfig:
        """The configuration that the options of `config` describe.

        Raises:
            ConfigError: a key is unknown or is no option of one engine, or a value is refused.
        """
        for name in ("autoep_size", "expert_parallel"):
            if name in config.options:
                raise ConfigError(f"engine options: {name}: {_NO_EXPERT_PARALLELISM}")
        return config.options_as(cls, engine="deepspeed")


def deepspeed_config(config: EngineConfig, zero: ZeroConfig, *, world_size: int) -> dict[str, Any]:
    """The dictionary that `deepspeed.initialize` and `deepspeed.zero.Init` take."""
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
    if config.trained:
        dtype = "float32" if config.dtype == "float32" else zero.accumulate_dtype
        result["data_types"] = {"grad_accum_dtype": _SHORT[dtype]}
        result["communication_data_type"] = _SHORT[zero.reduce_dtype]
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
            "stage3_max_live_parameters": zero.most_live(0),
            "zero_hpz_partition_size": zero.zero_hpz_partition_size,
        }
        if zero.offload_parameters:
            section["offload_param"] = {"device": "cpu", "pin_memory": pin}
    return section
