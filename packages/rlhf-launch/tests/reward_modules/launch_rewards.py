"""Reward functions that the tests name as `module:function`."""


def share_of_alphanumerics(completions, **columns):
    return [sum(c.isalnum() for c in text) / max(1, len(text)) for text in completions]


def raises(completions, **columns):
    raise RuntimeError("no network today")


def nan(completions, **columns):
    return [float("nan")] * len(completions)


def too_few(completions, **columns):
    return [0.0]


not_a_function = 3
