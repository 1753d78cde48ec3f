"""Settings of a gateway."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_core import ConfigError, SamplingConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayConfig:
    """Settings of a gateway."""

    model: str
    """Name under which clients ask for the model."""
    max_model_len: int
    """Prompt plus response tokens that the backend takes."""
    sampling: SamplingConfig | None = None
    """Settings for all requests: clients can only ask for shorter answers and further stops. None: as they ask."""
    host: str = "127.0.0.1"
    """Address to listen on. Another one than loopback opens the model to the network: use it behind TLS."""
    port: int = 0
    """Port to listen on; 0 takes a free one."""
    api_key: str | None = None
    """The key that clients must send; None makes a random one."""
    stream_tokens: int = 16
    """Tokens that are sampled between two pieces of a stream; 0 sends the answer when it is complete. Requests with
    several choices, a seed, stops or tools are always sampled in one piece."""
    max_body_bytes: int = 32 << 20
    """Size of the largest request that is read."""
    request_s: float = 60.0
    """How long a client may take to send a request: its head, and then its body."""
    vocab_size: int | None = None
    """Token ids in prompts and stops lie below it. None: below the tokenizer's size, or at most one sampled."""
    max_sessions: int = 4096
    """Sessions that may be open at the same time."""
    session_idle_s: float = 3600.0
    """A session that nobody has used for this long is dropped."""
    close_wait_s: float = 60.0
    """How long closing a session waits for turns under way, which are aborted then."""

    def __post_init__(self) -> None:
        if self.max_model_len < 2:
            raise ConfigError(f"gateway: max_model_len must be at least 2, got {self.max_model_len}")
        if self.stream_tokens < 0:
            raise ConfigError(f"gateway: stream_tokens must be 0 (off) or positive, got {self.stream_tokens}")
        if self.max_sessions < 1:
            raise ConfigError(f"gateway: max_sessions must be at least 1, got {self.max_sessions}")
        if not self.request_s > 0:
            raise ConfigError(f"gateway: request_s must be positive, got {self.request_s}")
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ConfigError(f"gateway: vocab_size must be at least 1, got {self.vocab_size}")
        if not self.session_idle_s > 0:
            raise ConfigError(f"gateway: session_idle_s must be positive, got {self.session_idle_s}")
        if not self.close_wait_s >= 0:
            raise ConfigError(
                f"gateway: close_wait_s must be 0 (abort at once) or positive, got {self.close_wait_s}"
            )
        if self.api_key is not None and not self.api_key.strip():
            raise ConfigError("gateway: api_key is empty; give a secret, or leave it out for a random one")
