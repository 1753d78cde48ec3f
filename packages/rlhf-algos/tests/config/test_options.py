import pytest
from rlhf_algos.config.options import from_options
from rlhf_algos.losses.online.clipped import PolicyLossConfig
from rlhf_core import ConfigError


def test_fields_are_set():
    config = from_options(PolicyLossConfig, {"clip_range": 0.1, "kl_coef": 0.2}, what="x")
    assert config == PolicyLossConfig(clip_range=0.1, kl_coef=0.2)


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(ConfigError, match=r"x: unknown key 'clip_rnge'; did you mean 'clip_range'\?"):
        from_options(PolicyLossConfig, {"clip_rnge": 0.1}, what="x")


def test_values_are_checked_by_the_config():
    with pytest.raises(ConfigError, match="clip_range"):
        from_options(PolicyLossConfig, {"clip_range": 7}, what="x")
    with pytest.raises(ConfigError, match="x: "):
        from_options(PolicyLossConfig, {"clip_range": "wide"}, what="x")
