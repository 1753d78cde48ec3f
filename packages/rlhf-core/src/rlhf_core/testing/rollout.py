"""Conformance kit for rollout backends: subclass, give a factory, run pytest.

    from rlhf_core.testing.rollout import RolloutBackendConformance

    class TestMyBackend(RolloutBackendConformance):
        @pytest.fixture(scope="class")
        @classmethod
        def backend_factory(cls):
            return MyBackend

One backend is started for the class and closed after it. Log-probs are compared with a plain forward pass of the
same model by Transformers, so a backend that samples from other weights than it claims cannot pass.
"""

from __future__ import annotations

from rlhf_core.testing.rollout_control import ControlChecks
from rlhf_core.testing.rollout_sampling import SamplingChecks
from rlhf_core.testing.rollout_scoring import ScoringChecks


class RolloutBackendConformance(SamplingChecks, ControlChecks, ScoringChecks):
    """What every rollout backend must do. Override the fixture `backend_factory`, and what else does not fit.

    `tied`, `long_tokens`, `max_model_len`, `tolerance` and `timeout_s` are class attributes; the fixture
    `rollout_config` gives the backend's config.
    """
