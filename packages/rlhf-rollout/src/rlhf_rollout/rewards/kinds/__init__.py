"""The kinds of reward, a module each."""
