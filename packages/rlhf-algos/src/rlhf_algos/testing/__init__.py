"""What must hold for every loss and every advantage estimator, as pytest classes to subclass. Needs `pytest`.

The frozen vectors beside them, `check_vectors`, are for other implementations of the same functions.

from rlhf_algos.testing import LossCase, LossInvariances

class TestMyLoss(LossInvariances):
    @pytest.fixture
    def case(self):
        return LossCase(Loss(function=my_loss, config=MyConfig()))
"""

import sys

if "pytest" in sys.modules:
    # Failing checks then show the compared values, as in a test module.
    for name in ("losses", "advantages"):
        sys.modules["pytest"].register_assert_rewrite(f"{__name__}.{name}")

from rlhf_algos.testing.advantages import AdvantageInvariances
from rlhf_algos.testing.losses import LossCase, LossInvariances
from rlhf_algos.testing.samples import sample_batch, sample_outputs
from rlhf_algos.testing.vectors.reader import VectorCase, check_vectors, load_vectors

__all__ = [
    "AdvantageInvariances",
    "LossCase",
    "LossInvariances",
    "VectorCase",
    "check_vectors",
    "load_vectors",
    "sample_batch",
    "sample_outputs",
]
