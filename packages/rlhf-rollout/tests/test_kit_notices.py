"""A conformance kit is worth what it notices: backends with one fault each, and the check that must fail."""

import pytest
import torch
from rlhf_core import RolloutConfig, receive_weights
from rlhf_core.testing.rollout import RolloutBackendConformance
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_core.testing.weight_sync import Trainer
from rlhf_rollout import TransformersBackend
from rlhf_rollout.backends.transformers import backend as transformers_backend
from rlhf_rollout.backends.transformers import decoder as decoding
from rlhf_rollout.backends.transformers.loop import DecodingLoop
from rlhf_rollout.backends.transformers.token_sampling import draw_tokens

kit = RolloutBackendConformance()
must_fail = pytest.raises((AssertionError, pytest.fail.Exception))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def trainer(path):
    return Trainer(path)


@pytest.fixture
def start(path):
    """Starts a backend some of whose methods are replaced."""
    started = []

    def start(**methods):
        assert all(hasattr(TransformersBackend, name) for name in methods)
        backend_class = type("Faulty", (TransformersBackend,), methods)
        started.append(backend_class(RolloutConfig(model=path, max_model_len=kit.max_model_len)))
        return started[-1]

    yield start
    for backend in started:
        backend.close()


def test_log_probs_at_another_temperature(start, trainer, monkeypatch):
    def unscaled(logits, samplings, generators):
        tokens, _ = draw_tokens(logits, samplings, generators)
        return tokens, logits.log_softmax(dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    monkeypatch.setattr(decoding, "draw_tokens", unscaled)
    backend = start()
    kit.test_log_probs_are_those_of_a_forward_pass(backend, trainer, 1.0)
    with must_fail:
        kit.test_log_probs_are_those_of_a_forward_pass(backend, trainer, 0.7)


def test_seeds_that_are_ignored(start):
    backend = start(_generators=lambda self, request: [torch.Generator() for _ in range(request.n)])
    with must_fail:
        kit.test_other_seeds_and_no_seed_give_other_samples(backend)


def test_samples_that_share_a_seed(start):
    def same(self, request):
        return [torch.Generator().manual_seed(request.seed) for _ in range(request.n)]

    with must_fail:
        kit.test_sample_i_is_the_single_sample_of_seed_plus_i(start(_generators=same))


def test_a_version_that_stays(start, trainer):
    def take(self, manifest):
        before = self._loop.version
        TransformersBackend._take_weights(self, manifest)
        self._loop.version = before

    with must_fail:
        kit.test_a_sync_brings_the_trainers_weights(start(_take_weights=take), trainer, "local")


def test_one_weight_that_is_not_taken(start, trainer, monkeypatch):
    lost = "model.layers.1.mlp.up_proj.weight"

    def all_but_one(manifest, receiver, load, *, base, place):
        def load_others(pairs):
            load((name, tensor) for name, tensor in pairs if name != lost)

        receive_weights(
            manifest, receiver, load_others, base=base, place=lambda name: None if name == lost else place(name)
        )

    monkeypatch.setattr(transformers_backend, "receive_weights", all_but_one)
    with must_fail:
        kit.test_a_sync_brings_the_trainers_weights(start(), trainer, "local")


def test_states_of_old_weights_that_are_kept(start, trainer, monkeypatch):
    monkeypatch.setattr(decoding.Decoder, "forget_states", lambda self: None)
    with must_fail:
        kit.test_a_sync_amid_running_requests_changes_versions_between_tokens(start(), trainer)


def test_scores_of_old_weights_or_at_another_place(start, trainer, monkeypatch):
    right = transformers_backend.score_rows
    kept = {}

    def old(model, rows):
        return [kept.setdefault(tuple(row), scores) for row, scores in zip(rows, right(model, rows), strict=True)]

    def shifted(model, rows):
        return [[0.0, *scores[:-1]] for scores in right(model, rows)]

    for wrong in (old, shifted):
        monkeypatch.setattr(transformers_backend, "score_rows", wrong)
        with must_fail:
            kit.test_given_tokens_are_scored_with_the_weights_of_the_last_sync(start(), trainer)


def test_scores_that_are_stated_and_not_given(start, trainer):
    with must_fail:
        kit.test_given_tokens_are_scored_with_the_weights_of_the_last_sync(start(score_tokens=None), trainer)


def test_another_way_of_loading_that_is_wrong(start, trainer, monkeypatch):
    def old_model(model, manifest, receiver):
        receive_weights(manifest, receiver, list)
        return model

    monkeypatch.setattr(transformers_backend, "_loaded_anew", old_model)
    with must_fail:
        kit.test_weights_that_come_for_another_way_of_loading_are_loaded_rightly(start(), trainer)


@pytest.mark.parametrize("fault", ["sender closes", "unknown name", "missing name"])
def test_weights_that_are_trusted_after_a_failure(start, trainer, fault, monkeypatch):
    monkeypatch.setattr(DecodingLoop, "refuse", lambda self, error: None)
    with must_fail:
        kit.test_after_a_failed_sync_it_refuses_to_sample_until_a_good_one(start(), trainer, fault)


def test_coverage_that_is_not_checked(start, trainer, monkeypatch):
    monkeypatch.setattr(transformers_backend, "check_coverage", lambda manifest, model: None)
    with must_fail:
        kit.test_after_a_failed_sync_it_refuses_to_sample_until_a_good_one(start(), trainer, "missing name")


def test_a_pause_that_does_nothing(start, monkeypatch):
    monkeypatch.setattr(DecodingLoop, "pause", lambda self, *, abort: None)
    with must_fail:
        kit.test_requests_wait_while_paused(start())


@pytest.mark.stack
def test_an_abort_that_waits_for_the_end(start, monkeypatch):
    pause = DecodingLoop.pause

    def wait(self, *, abort):
        while abort and self._tickets:
            self.decoder.step(self._admit(), version=self.version)
            self._deliver()
        pause(self, abort=False)

    monkeypatch.setattr(DecodingLoop, "pause", wait)
    with must_fail:
        kit.test_paused_with_abort_requests_end_with_what_they_have(start())


def test_a_stop_token_that_is_dropped(start, monkeypatch):
    whole = decoding.Draw.sample

    def without_stop(self):
        if self.finish_reason == "stop":
            for column in (self.tokens, self.log_probs, self.versions):
                column.pop()
        return whole(self)

    monkeypatch.setattr(decoding.Draw, "sample", without_stop)
    with must_fail:
        kit.test_stop_token_ids_end_a_sample_and_stay_in_it(start())


def test_long_prompts_that_are_cut(start):
    def no_check(self, request):
        object.__setattr__(request, "prompt_token_ids", request.prompt_token_ids[-9:])

    with must_fail:
        kit.test_a_prompt_that_fills_the_context_is_refused(start(_check=no_check))
