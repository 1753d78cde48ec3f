"""Settings of the DeepSpeed engine that exclude each other."""

from __future__ import annotations

from rlhf_core import ConfigError, EngineConfig

from rlhf_train.config.options import ZeroConfig

_HALF = ("bfloat16", "float16")


def check_compatible(config: EngineConfig, zero: ZeroConfig) -> None:
    """Refuse settings with which DeepSpeed would compute wrongly, or fail later without saying why.

    Raises:
        ConfigError: says which setting to change.
    """
    check_tensor_parallel(config, zero)
    if zero.zero_hpz_partition_size > 1 and config.quantize is not None:
        raise ConfigError(
            "engine options: zero_hpz_partition_size does not work with 4-bit weights (lora.quantize); leave it "
            "at 1"
        )
    if config.routing_replay and config.sequence_parallel_size > 1:
        raise ConfigError(
            "engine: routing_replay does not work with sequence_parallel_size above 1, got "
            f"{config.sequence_parallel_size}; leave one of them out"
        )
    if config.sequence_parallel_size > 1 and not config.packing:
        raise ConfigError(
            "engine: sequence_parallel_size above 1 cuts packed rows, and packing is false; leave one of them out"
        )
    if config.max_tokens_per_mlp_tile is not None and zero.deep_compile:
        raise ConfigError(
            "engine options: deep_compile does not work with max_tokens_per_mlp_tile, whose tiles are run by hand "
            "in the backward pass; leave one of them out"
        )
    check_fused_kernels(config, zero)
    if config.optimizer is None:
        return
    check_optimizer(config, zero)
    if zero.deep_compile and (zero.stage not in (1, 3) or config.quantize is not None):
        raise ConfigError(
            f"engine options: deep_compile needs stage 1 or 3 and no 4-bit weights, got stage {zero.stage}"
            f"{'' if config.quantize is None else f' and lora.quantize {config.quantize}'}"
        )
    if zero.deep_compile and not config.device.startswith("cuda"):
        raise ConfigError(f"engine options: deep_compile needs CUDA, the device is {config.device!r}; leave it out")
    if config.dtype in _HALF and zero.stage == 0:
        # DeepSpeed's wrapper for this case takes an optimizer step with no gradient when it is made, which spoils
        # Adam's bias correction.
        raise ConfigError(
            f"engine options: stage 0 trains in float32 only, dtype is {config.dtype}; use stage 1, 2 or 3, "
            "also on a single rank"
        )
    if config.dtype in _HALF and zero.accumulate_dtype == "float32" and zero.stage == 1:
        raise ConfigError(
            f"engine options: stage 1 cannot add up {config.dtype} gradients in float32; use stage 2 or 3, or set "
            f"accumulate_dtype: {config.dtype}"
        )
    for name in ("accumulate_dtype", "reduce_dtype"):
        if getattr(zero, name) not in ("float32", config.dtype):
            raise ConfigError(
                f"engine options: {name} {getattr(zero, name)!r} fits neither the model's dtype "
                f"{config.dtype!r} nor float32; use one of these two"
            )
    if config.dtype == "float16" and config.device == "cpu":
        raise ConfigError("dtype float16 does not train on the CPU; use bfloat16 or float32")


def check_fused_kernels(config: EngineConfig, zero: ZeroConfig) -> None:
    """Refuse settings that do not work with Liger's kernels (`liger_kernels`).

    Raises:
        ConfigError: says which setting to change.
    """
    if not zero.liger_kernels:
        return
    if not config.device.startswith("cuda"):
        raise ConfigError(
            f"engine options: liger_kernels needs CUDA, the device is {config.device!r}; leave it out"
        )
    if zero.deep_compile or zero.autotp_size > 1:
        other = "deep_compile" if zero.deep_compile else "autotp_size"
        raise ConfigError(f"engine options: liger_kernels is not combined with {other}; leave one of them out")


def check_tensor_parallel(config: EngineConfig, zero: ZeroConfig) -> None:
    """Refuse settings that do not work with slices of layers (`autotp_size`).

    Raises:
        ConfigError: says which setting to change.
    """
    if zero.autotp_size == 1:
        return
    if zero.stage not in (1, 2) or config.optimizer is None:
        what = "a frozen engine" if config.optimizer is None else f"stage {zero.stage}"
        raise ConfigError(
            f"engine options: autotp_size works with a trained engine at stage 1 or 2, got {what}; give a frozen "
            "role options of its own (stage: 3, autotp_size: 1)"
        )
    others = {
        "lora": config.lora is not None,
        "average_decay": config.average_decay is not None,
        "images": config.images,
        "sequence_parallel_size": config.sequence_parallel_size > 1,
        "deep_compile": zero.deep_compile,
        "max_tokens_per_mlp_tile": config.max_tokens_per_mlp_tile is not None,
        "optimizer kind muon": config.optimizer.kind == "muon",
    }
    if found := [name for name, given in others.items() if given]:
        raise ConfigError(
            f"engine options: autotp_size is not combined with {', '.join(found)}; leave one of them out"
        )


def check_optimizer(config: EngineConfig, zero: ZeroConfig) -> None:
    """Refuse settings that do not work with DeepSpeed's Muon.

    Raises:
        ConfigError: says which setting to change.
    """
    if config.optimizer is None or config.optimizer.kind != "muon":
        return
    if zero.zero_hpz_partition_size > 1:
        raise ConfigError("optimizer: muon does not work with zero_hpz_partition_size; use adamw, or leave it at 1")
    if config.lora is not None:
        raise ConfigError("optimizer: muon is for whole matrices, and lora trains factors of them; use adamw")
