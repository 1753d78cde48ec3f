"""A configuration as YAML that explains itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_algos import commented_yaml
from rlhf_core import ROLLOUT_BACKENDS, TRAIN_ENGINES, DescribesOptions, PluginError, load_plugin


def printed(config: Any) -> str:
    """Every setting of a configuration with its meaning, those of the chosen engine and backend as comments."""
    return commented_yaml(config, options=option_groups(config))


def option_groups(config: Any) -> Mapping[str, Any]:
    """The classes behind `train.options` and `rollout.options` of the parts that the configuration chooses."""
    chosen = {"train.options": (TRAIN_ENGINES, config.train.engine_name)}
    if hasattr(config, "rollout"):
        chosen["rollout.options"] = (ROLLOUT_BACKENDS, config.rollout.backend_name)
    found = {}
    for key, (group, name) in chosen.items():
        try:
            plugin = load_plugin(group, name)
        except PluginError:  # not installed here: the file may be for another machine
            continue
        if isinstance(plugin, DescribesOptions):
            found[key] = plugin.options_type
    return found
