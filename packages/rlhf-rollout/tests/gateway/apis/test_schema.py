"""The schema says what the endpoints honour."""

import httpx
import pytest
from rlhf_core.testing.fakes import ScriptedBackend
from rlhf_core.testing.tiny import byte_tokenizer
from rlhf_rollout import Gateway, GatewayConfig
from rlhf_rollout.gateway.apis import fields
from rlhf_rollout.gateway.apis.schema import FIELDS, openapi


@pytest.mark.parametrize(("path", "kind"), [("/v1/chat/completions", "chat"), ("/v1/completions", "completion")])
def test_the_schema_names_the_fields_that_are_honoured(path, kind):
    assert {"model", *FIELDS[path]} == fields._HONOURED[kind]


def test_the_schema_is_served():
    backend = ScriptedBackend()
    with Gateway(backend, byte_tokenizer(), GatewayConfig(model="m", max_model_len=64)) as gateway:
        found = httpx.get(gateway.url.removesuffix("/v1") + "/openapi.json", headers={"x-api-key": gateway.api_key})
    assert found.json() == openapi("m")
    assert set(found.json()["paths"]) == {"/v1/models", *FIELDS}
