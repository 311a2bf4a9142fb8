"""A stable name for the content of config sections. Imports no JAX."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def fingerprint(sections: Mapping[str, Any]) -> str:
    """SHA-256 (64 hex digits) of ``sections`` (``model_dump()`` output) as canonical JSON: sorted keys, no spaces.

    Raises:
      ValueError, TypeError: for values JSON does not have (NaN, infinities, objects).
    """
    text = json.dumps(sections, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
