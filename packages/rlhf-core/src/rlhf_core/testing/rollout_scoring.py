"""Checks of a rollout backend that scores given tokens, by which the weights that it has loaded are verified."""
# ruff: noqa: D102 - the name of each check is its sentence

from __future__ import annotations

import asyncio

import pytest
import torch

from rlhf_core.errors import CapabilityError, StaleWeightsError, WeightSyncError
from rlhf_core.interfaces.rollout import RolloutBackend, ScoresTokens
from rlhf_core.testing.rollout_ground import Results, RolloutGround, generate_all, token_ids
from rlhf_core.testing.weight_sync import Trainer, broken_sync, sync


class ScoringChecks(RolloutGround):
    """What `score_tokens` must do; skipped for a backend that does not state `token_scores`."""

    def need_scores(self, backend: RolloutBackend) -> ScoresTokens:
        """Skip the check if the backend does not state that it scores tokens."""
        if backend.capabilities.token_scores is None:
            pytest.skip("the backend does not state token_scores: its weight syncs cannot be verified")
        assert isinstance(backend, ScoresTokens), "token_scores is stated, and there is no method score_tokens"
        return backend

    def check_scores(self, scores: list[list[float]], trainer: Trainer, rows: list[tuple[int, ...]]) -> None:
        """Each row has the trainer's log-probs at temperature 1, from its second token on."""
        assert [len(found) for found in scores] == [len(row) - 1 for row in rows]
        for row, found in zip(rows, scores, strict=True):
            gap = float((trainer.row_log_probs(row) - torch.tensor(found)).abs().max())
            assert gap < self.tolerance, f"scores differ by {gap:.2e} from a forward pass of the same tokens"

    def test_given_tokens_are_scored_with_the_weights_of_the_last_sync(
        self, backend: RolloutBackend, trainer: Trainer
    ) -> None:
        scoring = self.need_scores(backend)
        rows = [self.prompt(20, length=40), self.prompt(21, length=7), self.prompt(22, length=2)]
        self.check_scores(self.run(scoring.score_tokens(rows)), trainer, rows)
        # The same tokens again and as a prompt: neither may come out of a cache that the next sync makes old.
        self.generate(backend, self.request(prompt=rows[0]))
        trainer.perturb()
        self.run(sync(backend, trainer))
        self.check_scores(self.run(scoring.score_tokens(rows)), trainer, rows)

    def test_scores_are_given_while_paused_and_change_no_request(
        self, backend: RolloutBackend, trainer: Trainer
    ) -> None:
        scoring = self.need_scores(backend)
        self.need_pause_mode(backend, "keep")
        rows = [self.prompt(23, length=24)] * 2
        requests = self.long_requests()

        async def score_amid() -> tuple[list[list[float]], Results]:
            tasks = [asyncio.create_task(backend.generate(request)) for request in requests]
            await asyncio.sleep(0.05)
            await backend.pause("keep")
            running = [task.done() for task in tasks]
            scores = await scoring.score_tokens(rows)
            await asyncio.sleep(0.05)
            assert [task.done() for task in tasks] == running, "a paused request has gone on"
            await backend.resume()
            return scores, list(await asyncio.gather(*tasks))

        whole = self.run(generate_all(backend, requests))
        scores, interrupted = self.run(score_amid())
        self.check_scores(scores, trainer, rows)
        assert token_ids(whole) == token_ids(interrupted)

    def test_rows_that_cannot_be_scored_are_refused(self, backend: RolloutBackend) -> None:
        scoring = self.need_scores(backend)
        for row in [(5,), (5, self.vocab_size + 1000), self.prompt(24, length=self.max_model_len + 1)]:
            with pytest.raises(CapabilityError):
                self.run(scoring.score_tokens([row]))

    def test_after_a_failed_sync_nothing_is_scored(self, backend: RolloutBackend, trainer: Trainer) -> None:
        scoring = self.need_scores(backend)
        with pytest.raises(WeightSyncError):
            self.run(broken_sync(backend, trainer, "missing name"))
        with pytest.raises(StaleWeightsError):
            self.run(scoring.score_tokens([self.prompt(25)]))
        self.run(sync(backend, trainer))
        rows = [self.prompt(25)]
        self.check_scores(self.run(scoring.score_tokens(rows)), trainer, rows)

    def test_weights_that_come_for_another_way_of_loading_are_loaded_rightly(
        self, backend: RolloutBackend, trainer: Trainer
    ) -> None:
        trainer.perturb()
        for other_way in (True, False, True):
            self.run(sync(backend, trainer, other_way=other_way))
            request = self.request(n=2)
            for sample in self.generate(backend, request).samples:
                self.check_log_probs(trainer, request, sample)
