"""Options of the backend over an OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlhf_core import ConfigError, RolloutConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteOptions:
    """The remote backend's `options`."""

    base_url: str
    """For instance `http://127.0.0.1:8000/v1`."""
    served_model: str | None = None
    """The model's name on the server; `RolloutConfig.model` if not given."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the API key; the key itself belongs in no configuration file."""
    log_probs: Literal["raw", "processed"] = "raw"
    """Whether the server's log-probs are those of the model (`raw`, vLLM's default) or of the distribution that was
    sampled from, after temperature and truncation (`processed`, vLLM's --logprobs-mode processed_logprobs, and this
    package's gateway)."""
    timeout_s: float = 600.0
    """Deadline of a request."""
    retries: int = 2
    """Further attempts after a refused connection, a timeout, or the status 408, 409, 429 or 5xx, with back-off."""

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"rollout.options.base_url must be a URL like http://127.0.0.1:8000/v1, got {self.base_url!r}"
            )
        if self.log_probs not in ("raw", "processed"):
            raise ConfigError(
                f"rollout.options.log_probs must be 'raw' or 'processed', as the server gives them, got "
                f"{self.log_probs!r}"
            )


def read_options(config: RolloutConfig) -> RemoteOptions:
    """The options of a configuration.

    Raises:
        ConfigError: an unknown one, or no `base_url`.
    """
    names = RemoteOptions.__dataclass_fields__
    if unknown := [name for name in config.options if name not in names]:
        raise ConfigError(f"the openai backend has no option {unknown[0]!r}; its options are {', '.join(names)}")
    if "base_url" not in config.options:
        raise ConfigError("the openai backend needs rollout.options.base_url, e.g. http://127.0.0.1:8000/v1")
    return RemoteOptions(**config.options)
