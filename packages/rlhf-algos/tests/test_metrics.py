import json

from rlhf_algos.metrics import MetricsWriter, StepFile, read_metrics


def test_rows_are_on_disk_as_soon_as_they_are_written(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as metrics:
        metrics.write(1, {"loss": 0.5, "norm": float("nan")})
        assert read_metrics(metrics.path) == [{"step": 1, "loss": 0.5, "norm": None}]
    json.loads(metrics.path.read_text(), parse_constant=lambda name: 1 / 0)  # strict JSON, no NaN


def test_resume_drops_rows_after_the_resumed_step_and_a_torn_line(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as metrics:
        for step in (1, 2, 3):
            metrics.write(step, {"loss": step})
    with metrics.path.open("a") as file:
        file.write('{"step": 4, "lo')
    with MetricsWriter(tmp_path, resume_step=2, tensorboard=False) as metrics:
        metrics.write(3, {"loss": 30})
    assert [(row["step"], row["loss"]) for row in read_metrics(metrics.path)] == [(1, 1), (2, 2), (3, 30)]


def test_a_new_run_starts_a_new_file(tmp_path):
    for _ in range(2):
        with MetricsWriter(tmp_path, tensorboard=False) as metrics:
            metrics.write(1, {"loss": 1.0})
    assert len(read_metrics(metrics.path)) == 1


def test_tensorboard_files_appear(tmp_path):
    with MetricsWriter(tmp_path) as metrics:
        metrics.write(1, {"loss": 1.0})
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_rows_of_any_shape_are_cut_at_the_resumed_step(tmp_path):
    path = tmp_path / "run" / "samples.jsonl"
    with StepFile(path) as rows:
        for step in (1, 1, 2, 3):
            rows.write(step, {"prompts": [{"position": step, "lengths": [1, 2]}]})
    before = path.read_text().splitlines(keepends=True)
    with path.open("a") as file:
        file.write('{"step": 3, "prompts": []}')  # whole, but for the end of its line
    with StepFile(path, resume_step=2):
        assert path.read_text().splitlines(keepends=True) == before[:3]
    with StepFile(path):
        assert path.read_text() == ""
