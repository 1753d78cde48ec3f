import pytest
from rlhf_core import ConfigError
from rlhf_train.parallel.ranks import RankInfo, TrainingRanks
from rlhf_train.parallel.sequence import SequenceGroup


def test_groups_must_fill_the_ranks():
    with pytest.raises(ConfigError, match="2 does not divide the 3 training ranks"):
        SequenceGroup(TrainingRanks(RankInfo(rank=0, world_size=3)), size=2)
