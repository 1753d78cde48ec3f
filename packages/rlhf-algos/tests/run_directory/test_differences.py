import pytest
from rlhf_algos.run_directory.differences import differences


def effect(key, before, now, *, train=None):
    """What a change at a dotted key does."""

    def record(value):
        settings = {"train": dict(train or {})}
        *path, last = key.split(".")
        inner = settings
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
        return {"settings": settings, "fingerprint": {}, "versions": {}}

    (found,) = differences(record(before), record(now))
    assert found.key == key
    return found.effect


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("evaluation.every", "none"),
        ("evaluation.sets.sums.samples", "none"),
        ("checkpoint.minutes", "none"),
        ("placement.executor", "none"),
        ("train.steps", "none"),
        ("model.path", "none"),
        ("reward.parts.judge.url", "none"),
        ("reward.on_failure.attempts", "none"),
        ("reward.timeout_s", "none"),
        ("placement.device", "rounding"),
        ("rollout.engines", "rounding"),
        ("weight_sync.transport", "rounding"),
        ("train.options.stage", "rounding"),
        ("model.dtype", "course"),
        ("model.lora.rank", "course"),
        ("data.hold_out", "course"),
        ("data.shuffle", "course"),
        ("lengths.max_length", "course"),
        ("algorithm.kl_coef", "course"),
        ("train.batch_size", "course"),
        ("train.prompts_per_step", "course"),
        ("train.optimizer.learning_rate", "course"),
        ("rollout.samples_per_prompt", "course"),
        ("rollout.sampling.temperature", "course"),
        ("rollout.overlap.max_staleness", "course"),
        ("rollout.overlap.max_in_flight", "none"),
        ("reward.parts.judge.weight", "course"),
        ("reward.function", "course"),
        ("evaluation.best_metric", "course"),
        ("a_key_of_tomorrow", "course"),
    ],
)
def test_what_a_changed_setting_does(key, expected):
    assert effect(key, 1, 2) == expected


def test_another_length_under_a_schedule_is_another_course():
    assert effect("train.steps", 1, 2, train={"optimizer": {"schedule": "linear"}}) == "course"
    assert effect("train.epochs", 1, 2, train={"critic_optimizer": {"warmup": 0.5}}) == "course"
    assert effect("train.epochs", 1, 2, train={"optimizer": {"warmup": 10}}) == "none"


def test_a_group_that_comes_or_goes_is_named_by_its_keys():
    def record(lora):
        return {"settings": {"model": {"lora": lora}}, "fingerprint": {}, "versions": {}}

    found = differences(record(None), record({"rank": 8}))
    assert {(one.key, one.before, one.now) for one in found} == {("model.lora.rank", None, 8)}


def test_equal_records_have_no_differences():
    record = {"settings": {"a": [{"b": 1}], "c": [1, 2]}, "fingerprint": {"t": "x"}, "versions": {"torch": "2"}}
    assert differences(record, record) == []
