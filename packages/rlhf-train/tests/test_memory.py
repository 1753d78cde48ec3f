import torch
from rlhf_core import MemoryReport
from rlhf_train.memory import PhaseMemory


def test_a_report_as_metrics_in_gib():
    gib = 1 << 30
    report = MemoryReport(
        parameters=2 * gib,
        gradients=gib,
        optimizer=4 * gib,
        average=0,
        resident=gib // 2,
        peaks={"step": 8 * gib},
        device=3 * gib,
        after_offload=gib // 4,
    )
    assert report.metrics("memory/policy") == {
        "memory/policy/parameters_gib": 2.0,
        "memory/policy/gradients_gib": 1.0,
        "memory/policy/optimizer_gib": 4.0,
        "memory/policy/average_gib": 0.0,
        "memory/policy/resident_gib": 0.5,
        "memory/policy/device_gib": 3.0,
        "memory/policy/peak_step_gib": 8.0,
        "memory/policy/after_offload_gib": 0.25,
    }


def test_what_stays_after_an_offload_is_told_from_then_on():
    memory = PhaseMemory(torch.device("cpu"))
    model = torch.nn.Linear(4, 2)
    before = memory.report(None, model, None)
    assert before.after_offload is None
    assert "memory/after_offload_gib" not in before.metrics()
    memory.note_offloaded()
    assert memory.report(None, model, None).after_offload == 0
    assert before.parameters == 4 * 10
