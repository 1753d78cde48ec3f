import pytest
from transformers import LlamaConfig


@pytest.fixture(scope="session")
def llama_7b(tmp_path_factory):
    """LLaMA2 7B, of which only the configuration is there."""
    path = tmp_path_factory.mktemp("7b")
    LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        vocab_size=32000,
    ).save_pretrained(path)
    return str(path)
