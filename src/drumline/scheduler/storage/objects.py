"""What is known of objects in storage: the newest facts, as many as may be remembered."""

from drumline.contract.storage import StorageKey


class KnownObjects:
    """Objects that are stored, so that they are not stored again, and those that are bad."""

    __slots__ = ("_limit", "_stored", "bad")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._stored: dict[StorageKey, bool] = {}
        self.bad = 0
        """How many are known to be bad."""

    def stored(self, key: StorageKey) -> bool:
        return self._stored.get(key, False)

    def is_bad(self, key: StorageKey) -> bool:
        return self._stored.get(key) is False

    def learn(self, key: StorageKey, *, stored: bool) -> None:
        """Remember that an object is stored and sound, or else that it is bad."""
        self.forget(key)
        if len(self._stored) == self._limit:
            self.forget(next(iter(self._stored)))
        self._stored[key] = stored
        self.bad += not stored

    def forget(self, key: StorageKey) -> None:
        """Remember nothing of an object."""
        if self._stored.pop(key, True) is False:
            self.bad -= 1

    def clear(self) -> None:
        self._stored.clear()
        self.bad = 0
