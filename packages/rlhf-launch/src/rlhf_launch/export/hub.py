"""An exported directory onto the hub, or any server with its interface (`HF_ENDPOINT`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core import ConfigError, ResourceError

_MAIN = "main"


@dataclass(frozen=True, kw_only=True, slots=True)
class HubTarget:
    """Where an export is to go."""

    repo: str
    """`owner/name`, or `name` for one's own."""
    private: bool = False
    """Make the repository private, if it is new."""
    revision: str | None = None
    """Branch, made if it is not there; None for the main one."""

    def __post_init__(self) -> None:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        try:
            validate_repo_id(self.repo)
        except HFValidationError as error:
            raise ConfigError(f"--push-to-hub: {self.repo!r} is no name of a repository: {error}") from None


def check_hub(target: HubTarget) -> None:
    """Ask the hub who we are, before anything heavy is done.

    Raises:
        ConfigError: there is no token, or the hub does not know it.
        ResourceError: the hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise ConfigError(
            f"--push-to-hub {target.repo}: there is no token of the hub; set HF_TOKEN to one that may write, or "
            "write `hf auth login`"
        )
    with _explained(target):
        HfApi().whoami()


def push(folder: Path, target: HubTarget) -> str:
    """Upload a directory as one commit; returns the commit's address.

    Raises:
        ConfigError: the hub refuses it.
        ResourceError: the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    with _explained(target):
        repo = hub.create_repo(target.repo, private=target.private or None, exist_ok=True).repo_id
        if target.revision is not None and target.revision != _MAIN:
            hub.create_branch(repo, branch=target.revision, exist_ok=True)
        done = hub.upload_folder(
            repo_id=repo, folder_path=folder, revision=target.revision, commit_message="Upload by rlhf export"
        )
    return str(done.commit_url)


@contextmanager
def _explained(target: HubTarget) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    # Of the HTTP library that the client uses, which has changed with its versions.
    library_error: Any = HfHubHTTPError.__bases__[0]
    begin = f"--push-to-hub {target.repo}"
    try:
        yield
    except OfflineModeIsEnabled:
        raise ResourceError(f"{begin}: HF_HUB_OFFLINE is set, so nothing is uploaded; unset it") from None
    except HfHubHTTPError as error:
        status = None if error.response is None else error.response.status_code
        said = error.server_message or str(error).strip().splitlines()[0]
        if status == 401:
            raise ConfigError(f"{begin}: the hub does not take the token; it said: {said}") from None
        raise ConfigError(f"{begin}: the hub refused it with {status}; it said: {said}") from None
    except (KeyError, ValueError) as error:
        raise ResourceError(
            f"{begin}: the hub's answer cannot be read ({type(error).__name__}: {error})"
        ) from error
    except (library_error, OSError) as error:
        raise ResourceError(
            f"{begin}: the hub cannot be reached ({type(error).__name__}: {error}); look at the network and "
            "HF_ENDPOINT"
        ) from None
