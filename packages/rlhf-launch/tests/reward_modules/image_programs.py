"""Agent programs that show pictures to the policy."""

import base64
import io

import httpx
import numpy as np
from PIL import Image


async def name_colours(task):
    """A program that shows two pictures, one after the other, and asks for the letter of each one's colour."""
    share, messages = 0.0, []
    async with httpx.AsyncClient(base_url=task.base_url, headers={"x-api-key": task.api_key}, timeout=60) as client:
        for number, colour in enumerate(task.metadata["colours"]):
            url = {"url": picture_url(colour, seed=f"{task.prompt}{number}")}
            content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "colour?"}]
            messages.append({"role": "user", "content": content})
            answer = await client.post("/chat/completions", json={"model": task.model, "messages": messages})
            answer.raise_for_status()
            messages.append(answer.json()["choices"][0]["message"])
            share += (messages[-1]["content"] or "").count(colour) / 8
    return share


def picture_url(colour, *, seed):
    """A noisy picture of one colour, red or blue."""
    noise = np.random.default_rng(list(seed.encode())).integers(-30, 30, (56, 56, 3))
    pixels = np.clip(np.array({"r": (210, 30, 30), "b": (30, 30, 210)}[colour]) + noise, 0, 255)
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
