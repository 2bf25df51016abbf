"""Where the model is: a directory, or a Hugging Face Hub id that is downloaded first."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..io.errors import CheckpointNotFound, MoestreamError
from .arguments import first_line, path_argument, show_path
from .errors import HubUnavailable, InvalidRequest

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(model: str | Path) -> Path:
    """The local directory of a model; downloads a Hub id, with a progress bar on a terminal.

    Raises:
        InvalidRequest: not a name at all.
        CheckpointNotFound: neither a directory nor a Hub id.
        HubUnavailable: the id is unknown, or the hub cannot be reached and there is no cached copy.
    """
    path = _path(model)
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        if isinstance(model, str) and _HUB_ID.fullmatch(model):
            return _download(model)
        raise CheckpointNotFound(
            f"{show_path(path)} does not exist; give a model directory or a Hub id"
        ) from None
    except OSError as error:  # too long, no permission, a circle of links
        raise CheckpointNotFound(
            f"{show_path(path)} cannot be opened: {error.strerror}; give a model directory or a "
            "Hub id"
        ) from error
    return path


def local_model(model: str | Path) -> Path | None:
    """The local directory of a model that need not be downloaded (any more), or None."""
    try:
        path = _path(model)
        if os.path.exists(path):
            return path
    except MoestreamError:
        return None
    if not (isinstance(model, str) and _HUB_ID.fullmatch(model)):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(model, allow_patterns=_patterns(), local_files_only=True))
    except (HFValidationError, OSError):  # its errors about missing files are OSErrors
        return None


def _patterns() -> list[str]:
    """The files to download: those of mlx-lm, and the experts of a packed store."""
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    return [*DEFAULT_ALLOW_PATTERNS, "experts/*.bin"]


def _path(model: object) -> Path:
    given = path_argument("model", model)
    if given is None:
        raise InvalidRequest("model=None must be a model directory or a Hub id")
    try:
        return given.expanduser()
    except RuntimeError as error:
        raise CheckpointNotFound(
            f"{show_path(given)} does not exist: there is no home directory for {given.parts[0]}"
        ) from error


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=_patterns()))
    except HFValidationError as error:
        raise CheckpointNotFound(
            f"{show_path(name)} is neither a directory nor a Hub id ({first_line(error)})"
        ) from error
    except GatedRepoError as error:
        raise HubUnavailable(
            f"{name} is gated: accept its licence on the hub and log in"
        ) from error
    except RepositoryNotFoundError as error:
        raise HubUnavailable(f"there is no model {name} on the hub, or it is private") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        raise HubUnavailable(
            f"cannot download {name}: this machine seems to be offline and has no complete cached "
            "copy; give the directory of a model instead"
        ) from error
