import math
from dataclasses import dataclass

import pytest
from rlhf_core import ConfigError, EngineConfig, LoraConfig, OptimizerConfig


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"learning_rate": math.nan}, "learning_rate must be a finite number, got nan"),
        ({"learning_rate": math.inf}, "learning_rate must be a finite number, got inf"),
        ({"learning_rate": -1e-6}, "learning_rate must be at least 0, got -1e-06"),
        ({"learning_rate": "1e-6"}, "learning_rate must be a finite number, got '1e-6'"),
        ({"muon_learning_rate": math.nan}, "muon_learning_rate must be a finite number"),
        ({"muon_momentum": 1.0}, r"muon_momentum must be at least 0 and below 1, got 1\.0"),
        ({"weight_decay": -0.1}, r"weight_decay must be at least 0, got -0\.1"),
        ({"betas": (0.9, 1.0)}, r"each of betas must be at least 0 and below 1, got 1\.0"),
        ({"betas": (math.nan, 0.9)}, "each of betas must be a finite number, got nan"),
        ({"betas": (0.9,)}, r"betas must be two numbers, got \(0\.9,\)"),
        ({"eps": 0.0}, r"eps must be above 0, got 0\.0"),
        ({"eps": math.nan}, "eps must be a finite number, got nan"),
        ({"max_grad_norm": -1.0}, r"max_grad_norm must be at least 0, got -1\.0"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"warmup_steps": 1.5}, r"warmup_steps must be a whole number, got 1\.5"),
        ({"total_steps": -5}, "total_steps must be at least 0, got -5"),
        ({"min_learning_rate_ratio": 1.5}, r"min_learning_rate_ratio must be at least 0 and at most 1, got 1\.5"),
        ({"kind": "adam"}, r"kind must be one of adamw, muon, got 'adam'; did you mean 'adamw'\?"),
        ({"schedule": "cosin"}, r"schedule must be one of .*got 'cosin'; did you mean 'cosine'\?"),
        ({"schedule": "cosine", "warmup_steps": 10, "total_steps": 10}, "needs total_steps > warmup_steps"),
    ],
    ids=str,
)
def test_an_impossible_optimizer_is_refused(fields, complaint):
    with pytest.raises(ConfigError, match=f"^optimizer: .*{complaint}"):
        OptimizerConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"role": "polcy"}, r"role must be one of .*got 'polcy'; did you mean 'policy'\?"),
        ({"dtype": "bf16"}, r"dtype must be one of float32, bfloat16, float16, got 'bf16'"),
        ({"max_tokens_per_micro_batch": 0}, "max_tokens_per_micro_batch must be at least 1, got 0"),
        ({"max_tokens_per_micro_batch": "much"}, "max_tokens_per_micro_batch, if no number, must be one of auto"),
        ({"longest_row": 0}, "longest_row must be at least 1, got 0"),
        ({"max_tokens_per_mlp_tile": 0}, "max_tokens_per_mlp_tile must be at least 1, got 0"),
        ({"sequence_parallel_size": 0}, "sequence_parallel_size must be at least 1, got 0"),
        ({"max_skipped_steps": -1}, "max_skipped_steps must be at least 0, got -1"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"packing": "no"}, "packing must be true or false, got 'no'"),
        ({"gradient_checkpointing": 1}, "gradient_checkpointing must be true or false, got 1"),
        ({"average_decay": 1.0}, r"average_decay must be above 0 and below 1, got 1\.0"),
        ({"average_decay": math.nan}, "average_decay must be a finite number"),
        ({"average_decay": 0.9, "optimizer": None, "role": "reference"}, "this reference is frozen"),
        ({"routing_replay": True, "role": "critic"}, "routing_replay is for a policy, the role is critic"),
    ],
    ids=str,
)
def test_an_impossible_engine_is_refused(fields, complaint):
    with pytest.raises(ConfigError, match=f"^engine: .*{complaint}"):
        EngineConfig(**{"model": "m", "optimizer": OptimizerConfig(), **fields})


def test_what_an_engine_is():
    frozen = EngineConfig(model="m", role="reference", lora=LoraConfig(quantize="nf4"))
    assert (frozen.trained, frozen.quantize) == (False, "nf4")
    trained = EngineConfig(model="m", optimizer=OptimizerConfig(), lora=LoraConfig())
    assert (trained.trained, trained.quantize) == (True, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Own:
    stage: int = 3
    names: tuple[str, ...] = ()


def test_options_as_an_engines_own_dataclass():
    config = EngineConfig(model="m", options={"stage": 2, "names": ["a", "b"]})
    assert config.options_as(Own, engine="own") == Own(stage=2, names=("a", "b"))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"stag": 2}, r"unknown key 'stag'; did you mean 'stage'\?"),
        ({"lora": {"rank": 4}}, "'lora' is a setting of every engine.*give it as the field lora of EngineConfig"),
        ({"average_decay": 0.9}, "'average_decay' is a setting of every engine"),
    ],
)
def test_options_that_are_not_the_engines_are_refused(options, complaint):
    with pytest.raises(ConfigError, match=f"^options of the own engine: {complaint}"):
        EngineConfig(model="m", options=options).options_as(Own, engine="own")
