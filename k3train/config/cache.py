"""Where k3train keeps what it can make or fetch again. Imports no JAX."""

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """The folder ``k3train/NAME`` of the user's cache (``$XDG_CACHE_HOME``, else ``~/.cache``), there or not."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "k3train" / name
