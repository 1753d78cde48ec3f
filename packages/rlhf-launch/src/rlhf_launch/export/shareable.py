"""What of a run may be shown to everybody: no paths of a machine, no addresses, no secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

LEFT_OUT = "(left out)"
_SECTIONS = ("model", "data", "lengths", "reward", "algorithm", "rollout", "train", "evaluation", "seed")
_DROPPED = frozenset({"headers", "forward_env", "api_key_env", "env", "environment_variables", "reference_cache"})
_SECRET_NAME = re.compile(r"(?:^|_)token$|secret|passw|api_?key|authori[sz]ation|credential|cookie", re.IGNORECASE)
_ENVIRONMENT_NAME = re.compile(r"token|secret|passw|_key$|_key_|credential", re.IGNORECASE)
_SECRET = re.compile(
    r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[pousr]_\w{20,}|AKIA[0-9A-Z]{16}|Bearer\s+[\w.~+/=-]{8,}"
    r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
)
_ADDRESS = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"<>)\]]+", re.IGNORECASE)
_PATH = re.compile(
    r"(?<![\w/.<~])(?:~(?:/[^\s/'\",;:()<>\[\]{}]+)+|(?:/[^\s/'\",;:()<>\[\]{}]+){2,})/?"
    r"|(?:\b[A-Za-z]:|(?<!\\)\\)\\[^\s'\",;<>\\]+\\[^\s'\",;<>]+"
)
_CACHED = re.compile(r"models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_SHORTEST_SECRET = 8


def hub_name(path: str) -> str | None:
    """The hub name that a path stands for: itself, or the one in a path of the hub's cache; None for a directory.

    >>> hub_name("org/name"), hub_name("/data/runs/a"), hub_name("/x/hub/models--org--name/snapshots/0f3a/")
    ('org/name', None, 'org/name')
    """
    if cached := _CACHED.search(path):
        return f"{cached['owner']}/{cached['name']}"
    return path if _HUB_NAME.fullmatch(path) and not Path(path).exists() else None


def last_part(path: str) -> str:
    """A name for a path: its hub name, or its last part.

    >>> last_part("/home/me/data/pairs.jsonl"), last_part("C:\\\\data\\\\pairs.jsonl"), last_part("org/name")
    ('pairs.jsonl', 'pairs.jsonl', 'org/name')
    """
    if (name := hub_name(path)) is not None:
        return name
    if "\\" in path and "/" not in path:
        return PureWindowsPath(path).name
    return PurePosixPath(path).name or LEFT_OUT


def shareable_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that say what was trained, without those of the machine it ran on."""
    return {name: _shareable(settings[name], name) for name in _SECTIONS if name in settings}


def shareable_text(text: str) -> str:
    """The text without secrets, addresses of servers and directories.

    >>> shareable_text("python /home/me/x/train.py --key hf_abcdefghijklmnopqrst http://10.0.0.7:81/v1")
    'python train.py --key (left out) (left out)'
    """
    text = _ADDRESS.sub(LEFT_OUT, without_secrets(text))
    for folder in (Path.cwd(), Path.home()):  # these may have spaces in them
        if len(folder.parts) > 1:
            text = text.replace(f"{folder}/", "/_/")
    return _PATH.sub(lambda found: last_part(found.group()), text)


def without_secrets(text: str) -> str:
    """The text without what looks like a key, and without the values of this environment's secret variables."""
    text = _SECRET.sub(LEFT_OUT, text)
    for name, value in os.environ.items():
        if _ENVIRONMENT_NAME.search(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, LEFT_OUT)
    return text


def _shareable(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _shareable(inner, name) for name, inner in value.items() if name not in _DROPPED}
    if isinstance(value, list | tuple):
        return [_shareable(inner, key) for inner in value]
    if not isinstance(value, str):
        return value
    if _SECRET_NAME.search(key):
        return LEFT_OUT
    if key == "path" and hub_name(value) is None:
        return last_part(value)
    if key in ("tokenizer", "chat_template", "reference", "critic") and "/" in value and hub_name(value) is None:
        return last_part(value) if "\n" not in value and "{" not in value else value
    return shareable_text(value)
