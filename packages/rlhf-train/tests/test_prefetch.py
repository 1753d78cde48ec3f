"""What ZeRO-3 gathers ahead of its use, below and above `max_live_parameters`."""

import pytest
from deepspeed.runtime.zero.partitioned_param_profiler import PartitionedParameterProfiler
from rlhf_core import EngineConfig, Loss, OptimizerConfig
from rlhf_core.testing.engine_ground import rows, supervised_loss
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_train import DeepSpeedEngine


@pytest.fixture
def gathered_ahead(monkeypatch):
    """The elements of all parameters that DeepSpeed gathers ahead, as it counts them for its own profile."""
    found = []
    stop = PartitionedParameterProfiler.stop_event

    def noting(self, name, elements):
        if "prefetch_submit" in name:
            found.append(elements)
        stop(self, name, elements)

    monkeypatch.setattr(PartitionedParameterProfiler, "stop_event", noting)
    return found


@pytest.mark.parametrize("limit", [None, 0])
def test_layers_are_gathered_ahead_only_where_there_is_room(tmp_path, gathered_ahead, limit):
    path = save_tiny_model(tmp_path)
    options = {"stage": 3, "param_persistence_threshold": 0}
    if limit is not None:
        options["max_live_parameters"] = limit
    engine = DeepSpeedEngine(EngineConfig(model=path, optimizer=OptimizerConfig(), options=options))
    try:
        for _ in range(4):  # the order of the layers is recorded first
            gathered_ahead.clear()
            engine.step(rows(), Loss(function=supervised_loss))
    finally:
        engine.close()
    assert bool(sum(gathered_ahead)) == (limit is None)
