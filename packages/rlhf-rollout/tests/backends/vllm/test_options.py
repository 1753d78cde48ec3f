"""What of the vLLM backend's configuration can be checked without vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rlhf_core import ConfigError, RolloutConfig
from rlhf_core.testing.tiny import save_tiny_model
from rlhf_rollout.backends.vllm.options import (
    _cpu_cache_bytes,
    _has_tokenizer,
    _shorter_window,
    env_vars,
    share_left,
)
from transformers import Cohere2Config, MistralConfig


def test_a_cpu_process_computes_with_one_thread_unless_told_otherwise() -> None:
    assert "OMP_NUM_THREADS" not in env_vars(RolloutConfig(model="m"))  # for whoever starts the process to say
    config = RolloutConfig(model="m", options={"cpu_threads": 8})
    assert env_vars(config)["OMP_NUM_THREADS"] == "8"


def test_a_gpu_process_keeps_its_compiler_and_threads() -> None:
    variables = env_vars(RolloutConfig(model="m", device="cuda"))
    assert variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert not {"OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE"} & set(variables)


def test_a_directory_without_tokenizer_files_is_noticed(tmp_path: Path) -> None:
    assert not _has_tokenizer(save_tiny_model(tmp_path / "without", tokenizer=False))
    assert _has_tokenizer(save_tiny_model(tmp_path / "with"))
    assert _has_tokenizer("organisation/name-on-the-hub")


def test_cache_holds_all_sequences_of_a_small_model(tmp_path: Path) -> None:
    """Keys and values, 2 layers, 2 heads of 16 floats: 512 bytes a token; 300 tokens are 10 blocks of 32, and
    one is vLLM's own."""
    path = save_tiny_model(tmp_path, hidden_size=64, tokenizer=False)
    config = RolloutConfig(model=path, max_model_len=300, max_num_seqs=5)
    assert _cpu_cache_bytes(config) == 5 * 11 * 32 * 512


def test_cache_of_an_unknown_architecture_is_a_part_of_the_free_memory(tmp_path: Path) -> None:
    """vLLM by itself takes nine tenths of it."""
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}')
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < _cpu_cache_bytes(RolloutConfig(model=str(tmp_path))) <= memory / 4


def test_windows_that_vllm_lengthens_by_a_token_are_given_a_token_shorter(tmp_path: Path) -> None:
    Cohere2Config(sliding_window=16).save_pretrained(tmp_path / "cohere2")
    MistralConfig(sliding_window=16).save_pretrained(tmp_path / "mistral")
    assert _shorter_window(RolloutConfig(model=str(tmp_path / "cohere2"))) == 15
    assert _shorter_window(RolloutConfig(model=str(tmp_path / "mistral"))) is None
    assert _shorter_window(RolloutConfig(model="no/such-model")) is None


@pytest.mark.stack
def test_importing_the_backend_imports_no_vllm() -> None:
    code = "import sys, rlhf_rollout.backends.vllm.backend; print('vllm' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1] == "False"


def test_the_memory_of_a_weight_link_is_left_free() -> None:
    assert share_left(0.92, taken=0, total=80 << 30) == 0.92
    assert share_left(0.5, taken=1 << 30, total=16 << 30) == 0.4375
    with pytest.raises(ConfigError, match=r"=0\.1 is 1\.6 GiB.*2\.0 GiB.*bucket_bytes smaller"):
        share_left(0.1, taken=2 << 30, total=16 << 30)
