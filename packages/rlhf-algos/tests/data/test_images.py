"""Images of rows: where they may come from, what is refused, and how rows with them are encoded."""

from __future__ import annotations

import io
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import rlhf_algos.data.images as images_module
import torch
from PIL import Image
from rlhf_algos.data.encoding import Encoder, EncodingOptions, load_encoder
from rlhf_algos.data.examples import collate_examples, encode_rows
from rlhf_algos.data.images import row_images
from rlhf_algos.data.lengths import LengthSection
from rlhf_algos.data.readers import (
    preference_examples,
    step_examples,
    supervised_examples,
    triple_examples,
    unpaired_examples,
)
from rlhf_algos.data.sources import Row, read_rows
from rlhf_core import DataError
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_core.testing.vision import save_tiny_vision_model

pytest.importorskip("torchvision")

ROOM = LengthSection(max_length=512)


def picture(seed: int = 0, size: tuple[int, int] = (56, 84)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8))


def png(image: Image.Image | None = None) -> bytes:
    file = io.BytesIO()
    (image or picture()).save(file, format="PNG")
    return file.getvalue()


@pytest.fixture
def row(tmp_path):
    source = tmp_path / "data" / "rows.jsonl"
    source.parent.mkdir()
    source.write_text("{}\n")

    def made(**values) -> Row:
        return Row(source=str(source), number=7, values=values)

    return made


@pytest.fixture(scope="module", params=["qwen2_vl", "gemma3", "idefics3"])
def encoder(request, tmp_path_factory) -> Encoder:
    return load_encoder(save_tiny_vision_model(tmp_path_factory.mktemp(request.param), request.param))


class TestSources:
    def test_a_path_beside_the_data_bytes_and_an_image(self, row, tmp_path):
        (tmp_path / "data" / "deep").mkdir()
        (tmp_path / "data" / "deep" / "one.png").write_bytes(png())
        given = [
            "deep/one.png",
            {"bytes": png(), "path": None},
            {"bytes": None, "path": "deep/one.png"},
            png(),
            picture(),
        ]
        found = row_images(row(images=given))
        assert len({np.asarray(one.open()).tobytes() for one in found}) == 1
        assert [one.place.split(", ")[1] for one in found] == [f"image {n}" for n in range(1, 6)]
        assert row_images(row(image="deep/one.png"))[0].digest == found[0].digest
        assert row_images(row(images=[], prompt="x")) == row_images(row(image=None)) == []

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            ("../outside.png", "does not lie under"),
            ("/etc/hostname", "does not lie under"),
            ("link.png", "does not lie under"),
            ("missing.png", "there is no file"),
            ("text.png", "cannot be decoded"),
            ("cut.png", "cannot be decoded"),
            ("huge.png", "9000 x 9000 pixels"),
            ("https://example.org/a.png", "data.image_urls: true"),
            ("file:///etc/passwd", "no image that is read"),
            ("data:image/png;base64,AAAA", "no image that is read"),
            (b"no image", "cannot be decoded"),
            (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "cannot be decoded"),
            (7, "is a int"),
        ],
    )
    def test_what_may_not_be_read_is_refused_with_its_row(self, row, tmp_path, value, said):
        data = tmp_path / "data"
        (tmp_path / "outside.png").write_bytes(png())
        os.symlink(tmp_path / "outside.png", data / "link.png")
        (data / "text.png").write_text("hello")
        (data / "cut.png").write_bytes(png()[:2000])
        # All of one colour: 200 kB that would take 240 MB.
        Image.new("L", (9000, 9000)).save(data / "huge.png")
        with pytest.raises(DataError, match=r"rows.jsonl row 7, image 2.*") as raised:
            row_images(row(images=[png(), value]))
        assert said in str(raised.value)

    def test_too_many_bytes_both_columns_and_a_path_without_a_file(self, row, monkeypatch, tmp_path):
        with pytest.raises(DataError, match="both 'images' and 'image'"):
            row_images(row(images=[png()], image=png()))
        with pytest.raises(DataError, match="no file that it could lie beside"):
            row_images(Row(source="hub/name[train]", number=1, values={"image": "a.png"}))
        (tmp_path / "data" / "a.png").write_bytes(png())
        monkeypatch.setattr(images_module, "MAX_IMAGE_BYTES", 100)
        for value in ("a.png", png()):
            with pytest.raises(DataError, match="100"):
                row_images(row(image=value))

    def test_an_image_that_changes_after_it_was_read(self, row, tmp_path):
        file = tmp_path / "data" / "a.png"
        file.write_bytes(png())
        (stored,) = row_images(row(image="a.png"))
        file.write_bytes(png(picture(1)))
        with pytest.raises(DataError, match="has changed"):
            stored.open()

    def test_urls_where_they_are_asked_for(self, row, monkeypatch):
        class Server(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200 if self.path == "/a.png" else 404)
                self.end_headers()
                self.wfile.write(png())

            def log_message(self, *args):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        try:
            (stored,) = row_images(row(image=f"{address}/a.png"), urls=True)
            assert np.array_equal(np.asarray(stored.open()), np.asarray(picture()))
            with pytest.raises(DataError, match="cannot be fetched"):
                row_images(row(image=f"{address}/b.png"), urls=True)
            monkeypatch.setattr(images_module, "MAX_IMAGE_BYTES", 100)
            with pytest.raises(DataError, match="gives more than 100 bytes"):
                row_images(row(image=f"{address}/a.png"), urls=True)
        finally:
            server.shutdown()

    def test_images_of_a_saved_dataset_come_as_they_are_stored(self, tmp_path):
        datasets = pytest.importorskip("datasets")
        features = datasets.Features(
            {"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())}
        )
        datasets.Dataset.from_dict({"prompt": ["a"], "images": [[picture()]]}, features=features).save_to_disk(
            str(tmp_path / "saved")
        )
        (found,) = read_rows(str(tmp_path / "saved"))
        assert set(found["images"][0]) == {"bytes", "path"}
        assert np.array_equal(np.asarray(row_images(found)[0].open()), np.asarray(picture()))


def marked(encoder: Encoder, text: str) -> str:
    return text.replace("IMAGE", encoder.processor.image_token)


class TestEncoding:
    def test_text_and_its_answer_are_the_processors_tokens(self, encoder, row):
        given = row(prompt=marked(encoder, "IMAGE what? "), completion="red", images=[png()])
        (example,) = supervised_examples(given, encoder)
        (tokens,) = example.rows
        whole = encoder.processor(
            text=[marked(encoder, "IMAGE what? red<|im_end|>")], images=[[picture()]], return_tensors="pt"
        )
        assert list(tokens.token_ids) == whole["input_ids"][0].tolist()
        counted = [t for t, m in zip(tokens.token_ids, tokens.response_mask, strict=True) if m]
        assert encoder.tokenizer.decode(counted) == "red<|im_end|>"
        batch = collate_examples([example], pad_token_id=0)
        assert torch.equal(batch.images[0].tensors["pixel_values"], whole["pixel_values"])

    def test_conversations_count_the_assistants_turns(self, encoder, row):
        messages = [
            {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "first?"}]},
            {"role": "assistant", "content": "one"},
            {"role": "user", "content": [{"type": "text", "text": "and "}, {"type": "image"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "two"}]},
        ]
        (example,) = supervised_examples(row(messages=messages, images=[png(), png(picture(1))]), encoder)
        (tokens,) = example.rows
        counted = [t for t, m in zip(tokens.token_ids, tokens.response_mask, strict=True) if m]
        assert encoder.tokenizer.decode(counted) == "one<|im_end|>\ntwo<|im_end|>\n"

    def test_generation_marks_of_the_template_are_heeded(self, encoder, row):
        before = encoder.tokenizer.chat_template
        body = "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'][0]['text'] }}"
        body += "{% endgeneration %}{% else %}{% for part in message['content'] %}"
        body += f"{{% if part['type'] == 'image' %}}{encoder.processor.image_token}"
        body += "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}|"
        encoder.tokenizer.chat_template = "{% for message in messages %}" + body + "{% endfor %}"
        try:
            messages = [
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]},
                {"role": "assistant", "content": "yes"},
            ]
            (example,) = supervised_examples(row(messages=messages, image=png()), encoder)
        finally:
            encoder.tokenizer.chat_template = before
        counted = [t for t, m in zip(example.rows[0].token_ids, example.rows[0].response_mask, strict=True) if m]
        assert encoder.tokenizer.decode(counted) == "yes"

    def test_pairs_share_their_images_and_prompt(self, encoder, row):
        prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "colour?"}]}]
        answers = {
            name: [{"role": "assistant", "content": name}]
            for name in ("chosen", "rejected", "reference", "completion")
        }
        given = row(prompt=prompt, images=[png()], label=True, **answers)
        (example,) = preference_examples(given, encoder)
        chosen, rejected = example.rows
        assert chosen.token_ids[: chosen.prompt_length] == rejected.token_ids[: rejected.prompt_length]
        batch = collate_examples([example, example], pad_token_id=0)
        assert batch.images[0] is batch.images[1]
        assert batch.images[0] is not None
        assert len(triple_examples(given, encoder)[0].rows) == 3
        assert unpaired_examples(given, encoder)[0].rows[0].images is not None

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"prompt": "none", "completion": "x", "images": [png()]}, "not as many places"),
            ({"prompt": "IMAGE", "completion": "x", "images": [png(), png()]}, "not as many places"),
            ({"prompt": "IMAGE IMAGE", "completion": "x", "images": [png()]}, "2 places for images"),
            ({"prompt": "IMAGE", "completion": "x"}, "no column images"),
        ],
    )
    def test_places_and_images_must_be_as_many(self, encoder, row, values, said):
        values = {name: marked(encoder, v) if isinstance(v, str) else v for name, v in values.items()}
        with pytest.raises(DataError, match=r"rows.jsonl row 7") as raised:
            encode_rows([row(**values)], supervised_examples, encoder, ROOM)
        assert said in str(raised.value)

    def test_an_image_in_the_message_itself_and_a_video(self, encoder, row):
        for part, said in (
            ({"type": "image", "url": "x"}, "into the column images"),
            ({"type": "video"}, "'video'"),
        ):
            messages = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "a"}]
            with pytest.raises(DataError, match=said):
                supervised_examples(row(messages=messages, images=[png()]), encoder)

    def test_steps_and_text_models_take_no_images(self, encoder, row):
        with pytest.raises(DataError, match="reasoning steps"):
            step_examples(row(prompt="p", completions=["a"], labels=[True], images=[png()]), encoder)
        with pytest.raises(DataError, match="no processor"):
            supervised_examples(row(prompt="p", completion="a", images=[png()]), Encoder(byte_tokenizer()))

    def test_no_cut_goes_through_an_image(self, encoder, row):
        given = row(prompt=marked(encoder, "IMAGE " + "long " * 20), completion="x" * 100, images=[png()])
        (whole,), _ = encode_rows([given], supervised_examples, encoder, ROOM)
        length = len(whole.rows[0].token_ids)
        (cut,), report = encode_rows([given], supervised_examples, encoder, LengthSection(max_length=length - 9))
        assert report.truncated == 1
        assert cut.rows[0].images is whole.rows[0].images or cut.rows[0].images is not None
        ends = {"max_length": 60, "long_prompts": "keep_end"}
        with pytest.raises(DataError, match="cut through an image"):
            encode_rows([given], supervised_examples, encoder, LengthSection(**ends))
        late = row(prompt="a", completion=marked(encoder, "b" * 90 + "IMAGE c"), images=[png()])
        with pytest.raises(DataError, match=r"row 7.*cut through an image"):
            encode_rows([late], supervised_examples, encoder, LengthSection(max_length=50))
        kept, report = encode_rows(
            [given, late], supervised_examples, encoder, LengthSection(max_length=length, long_rows="drop")
        )
        assert len(kept) + report.dropped == 2

    def test_tokens_of_an_image_in_an_answer_do_not_count(self, encoder, row):
        given = row(prompt="show", completion=marked(encoder, " IMAGE done"), images=[png()])
        (example,) = supervised_examples(given, encoder)
        (tokens,) = example.rows
        counts = [
            m for t, m in zip(tokens.token_ids, tokens.response_mask, strict=True) if t in tokens.images.token_ids
        ]
        assert counts
        assert not any(counts)

    def test_rows_of_text_are_encoded_as_without_a_processor(self, encoder, row):
        given = row(prompt="plain ", completion="text")
        plain = Encoder(encoder.tokenizer, EncodingOptions())
        assert supervised_examples(given, encoder) == supervised_examples(given, plain)


def test_a_tokenizer_alone_has_no_processor(tmp_path: Path):
    byte_tokenizer().save_pretrained(tmp_path)
    assert load_encoder(str(tmp_path)).processor is None
