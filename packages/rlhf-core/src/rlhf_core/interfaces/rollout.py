"""The rollout seam: what a training loop asks of whatever generates its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from rlhf_core.checks import check_choice, check_switch, check_whole
from rlhf_core.data.generation import GenerationRequest, GenerationResult
from rlhf_core.errors import CapabilityError, ConfigError
from rlhf_core.interfaces.engine_config import DType
from rlhf_core.weight_sync.manifest import WeightManifest
from rlhf_core.weight_sync.probe import Precision
from rlhf_core.weight_sync.transports.transport import Link

PauseMode = Literal["keep", "abort"]
"""`keep`: running requests freeze and continue on resume; `abort`: they end now with what they have."""

PartialSync = Literal["none", "tensors", "values"]
"""What may travel in place of all weights: nothing, whole tensors that changed, or single values of them too."""
PARTIAL_SYNCS: tuple[PartialSync, ...] = get_args(PartialSync)
"""From least to most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutConfig:
    """What every rollout backend needs to know. `options` belong to the one backend that reads them."""

    model: str
    """Path of a Transformers directory, or a hub name."""
    dtype: DType = "float32"
    device: str = "cpu"
    max_model_len: int = 2048
    """Prompt plus response tokens of one sequence."""
    max_num_seqs: int = 64
    """Sequences that run at the same time."""
    tensor_parallel_size: int = 1
    """Devices among which each layer is divided."""
    pipeline_parallel_size: int = 1
    """Stages among which the layers are divided, of `tensor_parallel_size` devices each."""
    hosts: int = 1
    """Hosts that the engine sits on, with as many pipeline stages on each; above 1 for backends that are
    `SpansHosts`."""
    host: int = 0
    """Which of these hosts this is said on: the backend is on host 0, and an `EnginePart` on each other."""
    meeting: str = ""
    """`address:port` of host 0, where the parts of an engine over several hosts meet."""
    adapter_rank: int = 0
    """Largest rank of an adapter that a weight sync may bring on its own; 0 for none. A backend that cannot take
    adapters ignores it and says so in its capabilities."""
    shares_devices: bool = False
    """Training engines take turns with the backend on its devices: it must be able to `sleep`, and hold the same
    weights when it wakes."""
    weight_buffer_bytes: int = 0
    """Bytes of each accelerator that its end of a weight link takes beside the engine (`receiver_bytes`): a backend
    that takes a share of the memory leaves them free."""
    keep_kv_cache: bool = False
    """Requests that run on across a weight sync keep the keys and values (states) that older weights made, in place
    of computing them again. Their log-probs stay those of the distribution that each token was drawn from, which
    then is no version's own; what starts after the sync takes nothing of them. A backend that cannot do this says
    so in its capabilities."""
    seed: int = 0
    trust_remote_code: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings that only this backend knows."""

    def __post_init__(self) -> None:
        check_choice("rollout: dtype", self.dtype, get_args(DType))
        for name in ("max_model_len", "max_num_seqs", "tensor_parallel_size", "pipeline_parallel_size", "hosts"):
            check_whole(f"rollout: {name}", getattr(self, name), at_least=1)
        for name in ("adapter_rank", "seed", "weight_buffer_bytes", "host"):
            check_whole(f"rollout: {name}", getattr(self, name), at_least=0)
        for name in ("keep_kv_cache", "shares_devices", "trust_remote_code"):
            check_switch(f"rollout: {name}", getattr(self, name))
        if self.pipeline_parallel_size % self.hosts:
            raise ConfigError(
                f"rollout: {self.pipeline_parallel_size} pipeline stages cannot be divided evenly over "
                f"{self.hosts} hosts; each host of an engine holds whole stages, so give a multiple "
                "(pipeline_parallel_size)"
            )
        if self.host >= self.hosts:
            raise ConfigError(f"rollout: host {self.host} is none of the engine's {self.hosts}, counted from 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendCapabilities:
    """What a backend can do. A loop reads it before it asks for anything."""

    transports: frozenset[str]
    """Kinds of weight transport it can join; see rlhf_core.weight_sync.transports.transport."""
    receivers: int = 1
    """Transport ranks this backend takes up (one per tensor-parallel worker)."""
    shares_memory: bool = True
    """All of these can map what processes beside the backend make. False where some are on another host: then `shm`
    and `ipc` are not among the transports."""
    pause_modes: frozenset[PauseMode] = frozenset({"keep", "abort"})
    stop_strings: bool = False
    truncated_sampling: bool = True
    """top_p, top_k and min_p."""
    penalties: bool = False
    """repetition_penalty, presence_penalty and frequency_penalty."""
    json_schema: bool = False
    """Samples may be kept to a JSON Schema."""
    images: bool = False
    """Requests may carry images."""
    partial_sync: PartialSync = "none"
    """What may travel besides all weights: whole tensors that changed (with those that the engine fuses them with,
    see rlhf_core.weight_sync.delta), or also single values of them."""
    adapters: bool = False
    """A sync may bring an adapter alone (`WeightManifest.adapter`), which takes the place of the last one."""
    sleep: bool = False
    """`sleep` gives the accelerator's memory back; where False, `sleep` does nothing."""
    keeps_kv_cache: bool = False
    """Requests that run on across a sync keep the states that older weights made, as `RolloutConfig.keep_kv_cache`
    asks it to; where False they are computed again."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the engine has settled of its own options (sizes of its batches, scheduling), for people to read."""
    token_scores: Precision | None = None
    """It can score given tokens, computing in these numbers: `ScoresTokens`. None: it cannot, and nobody can tell
    whether it has loaded its weights rightly."""


@runtime_checkable
class RolloutBackend(Protocol):
    """A generator of samples. Constructed as `Backend(config: RolloutConfig)`; ready when that returns.

    All methods but `close` are coroutines. `generate` may be called many times at once: batching is the
    engine's business. A class whose processes need variables set before they start also has `env_vars`; see
    `rlhf_core.NeedsEnvVars`.
    """

    @property
    def capabilities(self) -> BackendCapabilities:
        """What this backend can do, the same for its whole life."""
        ...

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token is sampled with; 0 for those loaded at the start."""
        ...

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Draw the samples of one request.

        Raises:
            CapabilityError: the request needs something outside `capabilities`, or exceeds `max_model_len`.
            StaleWeightsError: the last weight transfer failed and none has succeeded since.
        """
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling. Returns when no token is being computed; new requests queue up."""
        ...

    async def resume(self) -> None:
        """Go on sampling, from where `pause` stopped."""
        ...

    async def connect(self, link: Link, rank: int) -> None:
        """Join a weight transport as receivers `rank ... rank + capabilities.receivers - 1`.

        A later call replaces the connection. Blocks until the sender accepts or the link's deadline passes.
        """
        ...

    async def receive_weights(self, manifest: WeightManifest) -> None:
        """Take the weights that the sender is sending now; afterwards `weight_version` is the manifest's.

        Running requests stand still meanwhile and no token is sampled from a mixture. Caches that depend on the
        weights are dropped, but for what `RolloutConfig.keep_kv_cache` lets running requests keep. On failure
        raises WeightSyncError; the backend is stale until the next success.
        """
        ...

    async def sleep(self) -> None:
        """Give the accelerator's memory back; only called while paused."""
        ...

    async def wake(self) -> None:
        """Take the accelerator's memory again. Weights may be undefined until the next `receive_weights`, unless
        the backend shares its devices (`RolloutConfig.shares_devices`)."""
        ...

    def close(self) -> None:
        """Release everything; may be called twice."""
        ...


class EnginePart(Protocol):
    """What an engine over several hosts has on a host that is not its first."""

    def wait(self) -> str:
        """Block until the part has ended, by `close` or by a failure; says why. Called on a thread of its own."""
        ...

    def close(self) -> None:
        """Release everything; may be called twice, and while another thread waits."""
        ...


@runtime_checkable
class SpansHosts(Protocol):
    """A backend's class whose engines can sit on several hosts (`RolloutConfig.hosts`).

    The backend and all parts are constructed at the same time, and each construction returns when all of them are
    there. Failures and deaths of a part need not be noticed by the others: whoever constructed it waits for it.
    """

    @staticmethod
    def part(config: RolloutConfig) -> EnginePart:
        """The part on `config.host`, which is not 0.

        Raises:
            ConfigError: the engine refuses a setting.
            EngineDiedError: the part did not start.
        """
        ...


@runtime_checkable
class ScoresTokens(Protocol):
    """A backend that can score given tokens with the weights that it holds (`BackendCapabilities.token_scores`)."""

    async def score_tokens(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of the tokens of each row, from its second on, given those before them.

        Those of the model itself: temperature 1, nothing cut off, with the adapter that a sync brought last.
        Nothing is taken from a cache that could be older than the weights. It answers while paused, too, and
        requests that stand still then get no token by it.

        Args:
            rows: token ids, two at least and fewer than `max_model_len` in each row.

        Raises:
            CapabilityError: a row is too short or too long, or has an id outside the vocabulary.
            StaleWeightsError: the last weight transfer failed and none has succeeded since.
        """
        ...


def check_rows_to_score(rows: Sequence[Sequence[int]], *, max_model_len: int, vocab_size: int) -> None:
    """Refuse rows that `ScoresTokens.score_tokens` does not take.

    Raises:
        CapabilityError: a row is too short or too long, or has an id outside the vocabulary.
    """
    for row in rows:
        if not 2 <= len(row) < max_model_len:
            raise CapabilityError(
                f"rows to score need at least 2 tokens and fewer than max_model_len={max_model_len}, got {len(row)}"
            )
        if bad := [token for token in row if not 0 <= token < vocab_size]:
            raise CapabilityError(
                f"a row to score has the token id {bad[0]}, outside the vocabulary of {vocab_size}"
            )
