"""Checks of a rollout backend under way: pausing, aborting, and taking new weights."""
# ruff: noqa: D102 - the name of each check is its sentence

from __future__ import annotations

import asyncio
import time

import pytest
import torch

from rlhf_core.data.generation import GenerationResult
from rlhf_core.data.sampling import SamplingConfig
from rlhf_core.errors import StaleWeightsError, WeightSyncError
from rlhf_core.interfaces.rollout import RolloutBackend
from rlhf_core.testing.rollout_ground import EOS, Results, RolloutGround, token_ids
from rlhf_core.testing.weight_sync import (
    Trainer,
    broken_sync,
    connect,
    cpu_transport,
    delta_syncs,
    send_and_receive,
    sync,
)


class ControlChecks(RolloutGround):
    """What pause, resume and weight sync must do."""

    # ------------------------------------------------------------ pause and resume

    def test_paused_with_keep_requests_go_on_as_if_nothing_had_happened(self, backend: RolloutBackend) -> None:
        self.need_pause_mode(backend, "keep")
        whole, interrupted = self.interrupted(backend, "keep", lambda results: True)
        assert token_ids(whole) == token_ids(interrupted)

    def test_paused_with_abort_requests_end_with_what_they_have(self, backend: RolloutBackend) -> None:
        self.need_pause_mode(backend, "abort")

        def cut_off(results: Results) -> bool:
            return any(0 < s.length < self.long_tokens for r in results for s in r.samples)

        whole, interrupted = self.interrupted(backend, "abort", cut_off)
        for complete, partial in zip(whole, interrupted, strict=True):
            for full, part in zip(complete.samples, partial.samples, strict=True):
                assert part.token_ids == full.token_ids[: part.length]
                assert (part.finish_reason == "abort") == (part.length < self.long_tokens)

    def test_requests_wait_while_paused(self, backend: RolloutBackend) -> None:
        async def wait_and_go_on() -> GenerationResult:
            begin = time.monotonic()
            await backend.generate(self.request("not-waiting"))
            needed = time.monotonic() - begin
            await backend.pause("keep" if "keep" in backend.capabilities.pause_modes else "abort")
            task = asyncio.create_task(backend.generate(self.request("waiting")))
            await asyncio.sleep(max(0.2, 3 * needed))  # a request that did not wait would have ended
            assert not task.done()
            await backend.resume()
            return await task

        assert self.run(wait_and_go_on()).request_id == "waiting"

    # ------------------------------------------------------------ weight sync

    @pytest.mark.parametrize("kind", ["local", "gloo", "shm", "disk"])
    def test_a_sync_brings_the_trainers_weights(self, backend: RolloutBackend, trainer: Trainer, kind: str) -> None:
        if kind not in backend.capabilities.transports:
            pytest.skip(f"the backend does not list the transport {kind}")
        # A long prompt, twice: cached prompt states of the old weights must not survive.
        request = self.request(n=4, prompt=self.prompt(2, length=100), sampling=SamplingConfig(max_tokens=24))
        old = self.generate(backend, request)
        trainer.perturb()
        gap = max(self.log_prob_gap(trainer, request, sample) for sample in old.samples)
        assert gap > 0.05, "the changed weights must show, or the check below proves nothing"
        before = backend.weight_version
        version = self.run(sync(backend, trainer, kind=kind, version=before + 3))
        assert backend.weight_version == version == before + 3
        for sample in self.generate(backend, request).samples:
            assert set(sample.weight_versions) == {version}
            self.check_log_probs(trainer, request, sample)

    def test_one_link_serves_several_syncs(self, backend: RolloutBackend, trainer: Trainer) -> None:
        async def twice() -> None:
            sender = await connect(backend, cpu_transport(backend), timeout_s=30)
            for _ in range(2):
                trainer.perturb()
                await send_and_receive(backend, trainer, sender, trainer.manifest(backend.weight_version + 1))
            sender.close()

        self.run(twice())
        request = self.request(n=2)
        for sample in self.generate(backend, request).samples:
            self.check_log_probs(trainer, request, sample)

    @pytest.mark.parametrize("checksums", [False, True])
    def test_what_changed_since_the_last_sync_is_enough(
        self, backend: RolloutBackend, trainer: Trainer, checksums: bool
    ) -> None:
        mode = backend.capabilities.partial_sync
        if mode == "none":
            pytest.skip("the backend takes all weights or none")
        changed, total = self.run(delta_syncs(backend, trainer, mode, checksums=checksums))
        assert 0 < changed < total / 2
        request = self.request(n=2)
        for sample in self.generate(backend, request).samples:
            assert set(sample.weight_versions) == {backend.weight_version}
            self.check_log_probs(trainer, request, sample)

    def test_changes_to_another_version_are_refused(self, backend: RolloutBackend, trainer: Trainer) -> None:
        if backend.capabilities.partial_sync == "none":
            pytest.skip("the backend takes all weights or none")
        with pytest.raises(WeightSyncError):
            self.run(broken_sync(backend, trainer, "other base"))
        with pytest.raises(StaleWeightsError):
            self.generate(backend, self.request())
        self.run(sync(backend, trainer))

    def test_a_sync_amid_running_requests_changes_versions_between_tokens(
        self, backend: RolloutBackend, trainer: Trainer
    ) -> None:
        for _ in range(8):
            trainer.perturb()
            old = backend.weight_version
            results = self.run(self.sync_amid(backend, trainer))
            versions = [sample.weight_versions for result in results for sample in result.samples]
            assert all(list(v) == sorted(v) for v in versions)
            assert {version for v in versions for version in v} <= {old, old + 1}
            if any(len(set(v)) == 2 for v in versions):
                break
        else:
            pytest.fail(f"no request was caught running by 8 syncs; raise long_tokens ({self.long_tokens})")
        # Tokens after the sync are those of the new weights alone, unless older keys and values were to be kept.
        for request, result in zip(self.long_requests(), results, strict=True):
            for sample in result.samples:
                if backend.capabilities.keeps_kv_cache and len(set(sample.weight_versions)) == 2:
                    continue
                new = torch.tensor(sample.weight_versions) == old + 1
                # Long requests may not sample end-of-text: a backend renormalises without it, or it does not.
                gaps = [
                    (trainer.log_probs(request, sample, banned=banned) - torch.tensor(sample.log_probs)).abs()
                    for banned in ((EOS,), ())
                ]
                assert min(float(gap.where(new, 0.0).max()) for gap in gaps) < self.tolerance

    @pytest.mark.parametrize("fault", ["sender closes", "unknown name", "missing name"])
    def test_after_a_failed_sync_it_refuses_to_sample_until_a_good_one(
        self, backend: RolloutBackend, trainer: Trainer, fault: str
    ) -> None:
        with pytest.raises(WeightSyncError):
            self.run(broken_sync(backend, trainer, fault))
        request = self.request()
        with pytest.raises(StaleWeightsError):
            self.generate(backend, request)
        trainer.perturb()
        self.run(sync(backend, trainer))
        (sample,) = self.generate(backend, request).samples
        self.check_log_probs(trainer, request, sample)

    def test_it_serves_again_after_sleep_wake_and_sync(self, backend: RolloutBackend, trainer: Trainer) -> None:
        async def nap() -> None:
            await backend.pause("keep" if "keep" in backend.capabilities.pause_modes else "abort")
            await backend.sleep()
            await backend.wake()
            await sync(backend, trainer)
            await backend.resume()

        self.run(nap())
        request = self.request()
        (sample,) = self.generate(backend, request).samples
        self.check_log_probs(trainer, request, sample)
