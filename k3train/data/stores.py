"""The token stores of a run: one, or one for each of its sources. Imports no JAX."""

import hashlib
import json
from dataclasses import dataclass

from k3train.data.store import Store


@dataclass(frozen=True)
class Stores:
    """Opened stores by the names of their sources, sorted; under an empty name where there is one source."""

    by_name: dict[str, Store]

    @property
    def only(self) -> Store:
        """The store of a run of one source."""
        (store,) = self.by_name.values()
        return store

    @property
    def fingerprints(self) -> dict[str, str]:
        """``Store.fingerprint`` by source."""
        return {name: store.fingerprint for name, store in self.by_name.items()}

    @property
    def fingerprint(self) -> str:
        """sha256 of everything that decides which tokens are read where; of one source its store's own."""
        if list(self.by_name) == [""]:
            return self.only.fingerprint
        return hashlib.sha256(json.dumps(self.fingerprints, sort_keys=True).encode()).hexdigest()

    @property
    def holdout_tokens(self) -> int:
        """Held-out tokens in the store that has most of them."""
        return max(store.holdout.tokens for store in self.by_name.values())
