"""A server of OpenEnv as its authors' template has it: guess the number that the seed draws."""

import random
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str


class Answer(Observation):
    text: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.secret, self.left = 0, 0

    def reset(self, seed=None, episode_id=None, tries=3, **_):
        self.secret, self.left = random.Random(seed).randint(1, 9), tries
        return Answer(text="Guess.")

    def step(self, action, timeout_s=None, **_):
        if action.message == "crash":
            raise ValueError("the world broke")
        self.left -= 1
        guess = int(action.message)
        right = guess == self.secret
        said = "right" if right else "higher" if guess < self.secret else "lower"
        return Answer(text=said, reward=float(right), done=right or not self.left)

    @property
    def state(self):
        return State(step_count=0)


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Answer, max_concurrent_envs=4)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
