"""Conversations with images: what clients send, the tokens that a model runs, and what a trainer is shown."""

import asyncio
import base64
import io
from dataclasses import replace

import anthropic
import numpy as np
import openai
import pytest
import torch
from PIL import Image
from rlhf_core import ConfigError, PackedInts, RolloutConfig, image_row, load_processor
from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_core.testing.vision import save_tiny_vision_model
from rlhf_rollout import ChatTokens, Gateway, GatewayConfig, VLLMBackend
from rlhf_rollout.chat import images as chat_images

pytest.importorskip("torchvision")

SEEN = [(0, (56, 84)), (1, (84, 56))]
"""Seeds and sizes of the images of a conversation."""


def noise(seed, size=(56, 84)):
    return np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8)


def encoded(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def shown(seed, size=(56, 84)):
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(noise(seed, size))}"}}


def text(words):
    return {"type": "text", "text": words}


def user(*parts):
    return {"role": "user", "content": list(parts)}


@pytest.fixture(scope="module", params=["qwen2_vl", "gemma3"])
def family(request, tmp_path_factory):
    return save_tiny_vision_model(tmp_path_factory.mktemp(request.param), request.param)


class Seeing(ScriptedBackend):
    """Says one thing, and expands the places of images by the checkpoint's processor, as an engine does."""

    def __init__(self, processor, words):
        self.processor, self.ran = processor, []

        def script(request, index):
            return processor.tokenizer(words + "<|im_end|>", add_special_tokens=False)["input_ids"]

        super().__init__(script=script)

    async def generate(self, request):
        result = await super().generate(request)
        if not request.images:
            return result
        asked = self.processor.tokenizer.decode(list(request.prompt_token_ids))
        ids, _ = image_row(self.processor, asked, list(request.images), add_special_tokens=False)
        self.ran.append(ids)
        return replace(result, prompt_token_ids=PackedInts(ids))


class Talk:
    def __init__(self, path, words="Red."):
        self.processor = load_processor(path)
        self.backend = Seeing(self.processor, words)
        config = GatewayConfig(model="m", max_model_len=4096)
        self.gateway = Gateway(self.backend, self.processor.tokenizer, config, processor=self.processor)

    def client(self, access, kind=openai.OpenAI):
        url = access.root_url if kind is anthropic.Anthropic else access.url
        return kind(base_url=url, api_key=access.api_key, max_retries=0)


@pytest.fixture(scope="module")
def talk(family):
    talk = Talk(family)
    with talk.gateway:
        yield talk


@pytest.fixture
def access(talk, request):
    name = request.node.name
    yield talk.gateway.open_session(name)
    if talk.gateway._sessions.find(name):
        talk.gateway.drop_session(name)


def test_turns_with_images_are_one_trajectory_with_all_that_was_shown(talk, access):
    messages = [user(text("what "), text("colour?"), shown(0)), user(shown(1, (84, 56)), text("or this?"))]
    with talk.client(access) as agent:
        first = agent.chat.completions.create(model="m", messages=messages[:1], max_tokens=9)
        said = {"role": "assistant", "content": first.choices[0].message.content}
        history = [messages[0], said, messages[1]]
        chunks = agent.chat.completions.create(model="m", messages=history, max_tokens=9, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Red."
    assert first.usage.prompt_tokens == len(talk.backend.ran[-2])
    assert talk.gateway.session(access.session_id).misses == 0
    (trajectory,) = talk.gateway.close_session(access.session_id)
    answer = len(talk.processor.tokenizer("Red.<|im_end|>", add_special_tokens=False)["input_ids"])
    assert sum(trajectory.response_mask) == 2 * answer
    assert list(trajectory.token_ids)[:-answer] == talk.backend.ran[-1], (
        "the engine ran the tokens that are trained"
    )
    asked = talk.backend.requests[-1]
    for one, seen in zip(asked.images, SEEN, strict=True):
        assert np.array_equal(np.asarray(one), noise(*seen))
    seen = trajectory.shown.load()
    _, whole = image_row(talk.processor, talk.processor.image_token * 2, [noise(*one) for one in SEEN])
    assert seen.token_ids == whole.token_ids
    for name, tensor in whole.tensors.items():
        assert torch.equal(seen.tensors[name], tensor), name


def test_another_image_is_another_conversation(talk, access):
    with talk.client(access) as agent:
        for seed in (0, 0, 1):
            history = [user(shown(0), text("a")), {"role": "assistant", "content": "Red."}, user(text("b"))]
            history[0] = user(shown(seed), text("a"))
            if not talk.gateway.session(access.session_id).turns:
                agent.chat.completions.create(model="m", messages=history[:1], max_tokens=9)
            agent.chat.completions.create(model="m", messages=history, max_tokens=9)
    record = talk.gateway.session(access.session_id)
    assert record.misses == 1
    assert [turn.parent is record.turns[0] for turn in record.turns] == [False, True, True, False]


def test_images_of_messages_and_of_tools_results_come_by_anthropics_client(talk, access):
    source = {"type": "base64", "media_type": "image/png", "data": encoded(noise(0))}
    picture = {"type": "image", "source": source}
    asked = [{"role": "user", "content": [picture, text("colour?")]}]
    with talk.client(access, anthropic.Anthropic) as claude:
        claude.messages.create(model="m", max_tokens=9, messages=asked)
        asked += [
            {"role": "assistant", "content": "Red."},
            {"role": "user", "content": [text("and "), picture]},
        ]
        claude.messages.create(model="m", max_tokens=9, messages=asked)
        assert len(talk.backend.requests[-1].images) == 2
        use = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t", "content": [text("seen"), picture]}
        calls = [asked[0], {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        claude.messages.create(model="m", max_tokens=9, messages=calls)
        assert len(talk.backend.requests[-1].images) == 2
    assert (
        talk.gateway.session(access.session_id).turns[1].parent is talk.gateway.session(access.session_id).turns[0]
    )


def test_images_come_by_the_responses_client(talk, access):
    picture = {"type": "input_image", "image_url": shown(0)["image_url"]["url"], "detail": "auto"}
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": [picture]}
    said = {"role": "user", "content": [{"type": "input_text", "text": "colour?"}, picture]}
    with talk.client(access) as gpt:
        answer = gpt.responses.create(model="m", input=[said])
        assert answer.output_text == "Red."
        assert len(talk.backend.requests[-1].images) == 1
        gpt.responses.create(model="m", input=[said, call, output])
        assert len(talk.backend.requests[-1].images) == 2


def url(value):
    return {"type": "image_url", "image_url": {"url": value}}


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (user(url("https://example.org/a.png")), "message 1, image 1: an image must be in the request"),
        (user(url("file:///etc/passwd")), "an image must be in the request"),
        (user(url("data:text/html;base64,AAAA")), "an image must be in the request"),
        (user(url("data:image/png;base64,A*A")), "message 1, image 1 is not base64"),
        (user(url("data:image/png;base64,AAAA")), "message 1, image 1 cannot be decoded"),
        (user({"type": "image_url", "image_url": "x"}), "`image_url` must be"),
        (user({"type": "image_url", "image_url": {"url": "x", "detail": "high"}}), "sets the detail"),
        (user({"type": "input_audio"}), "text and images can be in"),
        ({"role": "assistant", "content": [shown(0)]}, "a message of the assistant has no images"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_image_is_refused_by_its_place(talk, access, message, problem):
    asked = len(talk.backend.requests)
    with talk.client(access) as agent, pytest.raises(openai.BadRequestError, match=problem):
        agent.chat.completions.create(model="m", messages=[message], max_tokens=9)
    assert len(talk.backend.requests) == asked


def test_tokens_of_images_in_texts_are_refused(talk, access):
    mark = talk.processor.image_token
    marks = {mark, talk.processor.tokenizer.decode([talk.gateway._tokens.images.token_ids[0]])}
    with talk.client(access) as agent:
        for words in marks:
            for message in (user(text(f"a {words}")), user(text(f"a {words}"), shown(0))):
                with pytest.raises(openai.BadRequestError, match=r"places for them|has the token of an image"):
                    agent.chat.completions.create(model="m", messages=[message], max_tokens=9)
        (token,) = talk.gateway._tokens.images.token_ids
        with pytest.raises(openai.BadRequestError, match="has the token of an image"):
            agent.completions.create(model="m", prompt=[5, token], max_tokens=9)


def test_many_pixels_in_few_bytes_are_refused_before_they_are_decoded(talk, access, monkeypatch):
    monkeypatch.setattr(chat_images, "MAX_IMAGE_PIXELS", 10_000)
    message = user(*[shown(seed) for seed in range(3)])
    with talk.client(access) as agent, pytest.raises(openai.BadRequestError, match=r"3 images.*14,112 pixels"):
        agent.chat.completions.create(model="m", messages=[message], max_tokens=9)


def test_a_turn_in_which_the_policy_wrote_an_image_is_not_continued(family):
    talk = Talk(family, words="x" + load_processor(family).image_token)
    with talk.gateway:
        access = talk.gateway.open_session("s")
        history = [user(shown(0), text("a"))]
        with talk.client(access) as agent:
            for _ in range(2):
                answer = agent.chat.completions.create(model="m", messages=history, max_tokens=9)
                words = answer.choices[0].message.content
                history += [{"role": "assistant", "content": words}, user(text("more"))]
        record = talk.gateway.session("s")
        assert [turn.parent for turn in record.turns] == [None, None]
        assert record.misses == 1


def test_an_engine_that_runs_other_tokens_is_found_out(family):
    talk = Talk(family)

    async def otherwise(request, generate=talk.backend.generate):
        result = await generate(request)
        return replace(result, prompt_token_ids=result.prompt_token_ids[1:])

    talk.backend.generate = otherwise
    with talk.gateway:
        access = talk.gateway.open_session("s")
        with talk.client(access) as agent, pytest.raises(openai.BadRequestError, match="mm_processor_kwargs"):
            agent.chat.completions.create(model="m", messages=[user(shown(0))], max_tokens=9)
        assert talk.gateway.close_session("s") == []


def test_a_processor_that_cannot_be_used_is_found_out_at_once(family):
    processor = load_processor(family)

    class Odd:
        image_token = "<odd>"
        tokenizer = processor.tokenizer

        def __call__(self, **_):
            return {"input_ids": torch.tensor([[1, 2]])}

    with pytest.raises(ConfigError, match="Odd cannot be used for chats with images: Odd does not say"):
        ChatTokens(processor.tokenizer, Odd())


@pytest.mark.stack
def test_vllm_runs_the_tokens_that_are_trained_and_sees_the_images(tmp_path):
    from transformers import AutoModelForImageTextToText

    path = save_tiny_vision_model(tmp_path / "model", hidden_size=128)
    processor = load_processor(path)
    options = {"limit_mm_per_prompt": {"image": 3, "video": 0}}
    backend = VLLMBackend(RolloutConfig(model=path, max_model_len=512, max_num_seqs=8, options=options))
    config = GatewayConfig(model="m", max_model_len=512)
    with Gateway(backend, processor.tokenizer, config, processor=processor) as gateway:
        access = gateway.open_session("s")

        async def ask():
            async with openai.AsyncOpenAI(base_url=access.url, api_key=access.api_key, max_retries=0) as agent:
                history = []
                for turn in range(3):
                    history.append(user(text(f"turn {turn}"), shown(turn)))
                    answer = await agent.chat.completions.create(
                        model="m", messages=history, max_tokens=8, seed=turn
                    )
                    history.append({"role": "assistant", "content": answer.choices[0].message.content})

        asyncio.run(ask())
        record = gateway.session("s")
        trajectories = gateway.close_session("s")
    backend.close()
    model = AutoModelForImageTextToText.from_pretrained(path).eval()
    sampled = sum(turn.sample.length for turn in record.turns)
    assert sum(sum(one.response_mask) for one in trajectories) == sampled > 8
    assert record.misses == len(trajectories) - 1
    for trajectory in trajectories:
        ids = torch.tensor([list(trajectory.token_ids)])
        seen = trajectory.shown.load()
        types = torch.isin(ids, torch.tensor(seen.token_ids)).int()
        with torch.no_grad():
            logits = model(input_ids=ids, mm_token_type_ids=types, **seen.tensors).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        gap = (expected - torch.tensor(list(trajectory.rollout_log_probs))[1:]).abs()
        assert gap[torch.tensor(list(trajectory.response_mask))[1:]].max() < 1e-4
