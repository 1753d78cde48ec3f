"""Reward functions: where they run, how they fail, how they are combined."""
