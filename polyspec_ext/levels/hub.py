"""Ids of models where the hub cannot be reached: their cached files, or an error at once."""

from __future__ import annotations

import functools
from pathlib import Path

_FILES = ("config.json", "adapter_config.json")


@functools.cache
def place_of(model_id: str) -> str:
    """Return what to load an id from: the id, or where the hub cannot be reached the folder of its
    cached files, since `transformers` would try for minutes.

    Raises:
        ValueError: the hub cannot be reached, and no file of the model is in the cache.
    """
    import huggingface_hub as hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        hub.file_exists(model_id, _FILES[0])
    except HfHubHTTPError:  # the hub answered, and so it will `transformers`
        return model_id
    except Exception:  # of the HTTP client, of which releases of the hub have several
        for name in _FILES:
            file = hub.try_to_load_from_cache(model_id, name)
            if isinstance(file, str):
                return str(Path(file).parent)
        raise ValueError(
            "no such folder here, no model of this id in the cache, and the hub cannot be reached"
        ) from None
    return model_id
