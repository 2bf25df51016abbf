"""Where the model is: a directory, or a Hugging Face Hub id that is downloaded first."""

from __future__ import annotations

import re
from pathlib import Path

from ..io.errors import CheckpointNotFound
from .errors import HubUnavailable

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(model: str | Path) -> Path:
    """The local directory of a model; downloads a Hub id, with a progress bar on a terminal.

    Raises:
        CheckpointNotFound: neither a directory nor a Hub id.
        HubUnavailable: the id is unknown, or the hub cannot be reached and there is no cached copy.
    """
    path = Path(model).expanduser()
    if path.exists() or not (isinstance(model, str) and _HUB_ID.fullmatch(model)):
        if not path.exists():
            raise CheckpointNotFound(f"{path} does not exist; give a model directory or a Hub id")
        return path
    return _download(model)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    try:
        return Path(snapshot_download(name, allow_patterns=DEFAULT_ALLOW_PATTERNS))
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
