"""`rlhf quickstart`: the whole stack in a few minutes."""
