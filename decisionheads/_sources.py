"""Where a model lies: a folder, a GGUF file, or a hub name and the commit it stands for."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from .errors import InputError

SAFE = {"trust_remote_code": False}  # not said, transformers asks on the terminal whether to run code that lies beside a model


def is_hub_name(name_or_path: str | Path) -> bool:
    """Whether something is looked up on the hub: no folder, no file, and no text that can only be a path."""
    path, name = Path(name_or_path), str(name_or_path)
    return not (path.is_dir() or path.suffix == ".gguf" or path.is_absolute() or name.startswith((".", "~")) or name.endswith("/") or name.count("/") > 1)


@cache  # all of a run is of one commit, whatever happens on the hub
def hub_commit(name: str) -> str:
    """The commit that a hub name (`owner/name`, or `owner/name@revision`) stands for now; from the cache where the hub is out of reach.

    Raises:
        InputError: if neither knows it.
    """
    from transformers.utils import cached_file

    owned, _, revision = name.partition("@")
    with quiet():
        try:
            config = cached_file(owned, "config.json", revision=revision or None)
        except Exception as error:
            raise InputError(f"{name}: there is no such folder, and no such model on the hub or in its cache ({first_line(error)}); give a folder or a hub name") from None
    return Path(config).parent.name  # .../snapshots/<commit>/config.json


def locate(name_or_path: str | Path) -> tuple[str, dict]:
    """What to hand to transformers: a folder, or a folder and its GGUF file, or a hub name and its commit."""
    path, name = Path(name_or_path), str(name_or_path)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"{path}: no such GGUF file; give one that is there")
        return str(path.parent), {"gguf_file": path.name, **SAFE}
    if path.is_dir():
        return str(path), dict(SAFE)
    if not is_hub_name(name):
        raise InputError(f"{path}: no such model folder; give one that is there, or a hub name")
    return name.partition("@")[0], {"revision": hub_commit(name), **SAFE}


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:160].rstrip(".")


@contextmanager
def quiet():
    """Keep library chatter off the terminal while models are loaded and saved; the caller's log level comes back."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    hub.setLevel(logging.ERROR)
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        hub.setLevel(hub_level)
        if bars:
            hf_logging.enable_progress_bar()

