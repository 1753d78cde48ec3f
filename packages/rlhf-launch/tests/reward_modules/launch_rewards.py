"""Reward functions that the tests name as `module:function`."""


def share_of_alphanumerics(completions, **columns):
    return [sum(c.isalnum() for c in text) / max(1, len(text)) for text in completions]


def raises(completions, **columns):
    raise RuntimeError("no network today")


calls = 0


def fails_later(completions, **columns):
    """Fails for the ninth group: of four in a step, one of the third step."""
    global calls
    calls += 1
    if calls > 8:
        raise RuntimeError("the service is down")
    return share_of_alphanumerics(completions)


def nan(completions, **columns):
    return [float("nan")] * len(completions)


def too_few(completions, **columns):
    return [0.0]


not_a_function = 3


class CountToThree:
    """An environment of up to three turns: each alphanumeric character is worth a little."""

    def __init__(self):
        self.turns = 0

    def reset(self, metadata):
        from rlhf_core import Observation

        return Observation()

    def step(self, turn):
        from rlhf_core import Observation

        self.turns += 1
        reward = sum(c.isalnum() for c in turn.text) / 10
        return Observation(text=f" turn {self.turns} ", reward=reward, done=self.turns == 3)


async def digits(completion, prompt, offset=0.0):
    return {"score": sum(c.isdigit() for c in completion) + offset, "length": len(completion)}


def by_turns(completion, turns):
    return float(turns)


def kind_of(text):
    """What a picky function makes of a text: it raises, returns NaN, or judges it."""
    return ("raises", "nan", "fine", "fine")[sum(text.encode()) % 4]


def picky(completion, **columns):
    if kind_of(completion) == "raises":
        raise ValueError("this one I cannot judge")
    return float("nan") if kind_of(completion) == "nan" else 1.0


def uneven(completion, prompt):
    """No verdict on a fifth of the prompts, the same one on all samples of another fifth."""
    kind = sum(prompt.encode()) % 5
    if kind == 0:
        raise ValueError("this prompt I cannot judge")
    return 1.0 if kind == 1 else sum(c.isalnum() for c in completion) / max(1, len(completion))


def begins_with(completions, *, answer, **columns):
    """1 for a response that begins with the answer."""
    return [float(text.startswith(gold)) for text, gold in zip(completions, answer, strict=True)]


def nothing(completions, **columns):
    """Every sample scores alike."""
    return [0.0] * len(completions)


def share_of_colour(completion, colour):
    """How much of a response is the letter of the picture's colour."""
    return completion.count(colour) / 4
