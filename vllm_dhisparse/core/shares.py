"""How many units running requests require beside their tails.

The share of a request is the units of its history outside its tail, at most
``base_units``; and all shares together are at most the units of their history, where what
requests share counts once. So requests never require more units than would hold all their
rows, and shares grow out of full tails, without an allocation.
"""


class Shares:
    """History of running requests, in units.

    Attributes:
        base_units: of one request at most.
        shared_units: of history, each counted once less than running requests have it.

    """

    def __init__(self, base_units: int) -> None:
        assert base_units >= 0
        self.base_units = base_units
        self.shared_units = 0
        self._history: dict[str, int] = {}
        self._history_units = self._share_units = 0

    def required_units(self, history_units: int = 0, shared_units: int = 0) -> int:
        """Return what all running requests require, and one more with such a prefix hit.

        Args:
            history_units: of the hit.
            shared_units: those of them that running requests have too.

        """
        shares = self._share_units + min(self.base_units, history_units)
        history = self._history_units - self.shared_units + history_units - shared_units
        return max(min(shares, history), 0)

    def history_units(self, request_id: str) -> int:
        """Return the units before the tail of a running request."""
        return self._history[request_id]

    def start(self, request_id: str, history_units: int, shared_units: int) -> None:
        """Count a request that starts to run; see ``required_units``."""
        assert request_id not in self._history
        self._history[request_id] = 0
        self.extend(request_id, history_units)
        self.shared_units += shared_units

    def extend(self, request_id: str, num_units: int) -> None:
        """Move units from the tail of a request to its history."""
        before = self._history[request_id]
        after = before + num_units
        self._history[request_id] = after
        self._history_units += num_units
        self._share_units += min(self.base_units, after) - min(self.base_units, before)

    def end(self, request_id: str) -> None:
        """Forget a request."""
        self.extend(request_id, -self._history[request_id])
        del self._history[request_id]

    def set_base_units(self, base_units: int) -> None:
        """Change the share of every request."""
        self.base_units = base_units
        self._share_units = sum(min(base_units, units) for units in self._history.values())

    def check_integrity(self, running: set[str]) -> None:
        """Assert that the sums are those of the requests that run."""
        assert self._history.keys() == running
        assert self._history_units == sum(self._history.values())
        assert self._share_units == sum(min(self.base_units, h) for h in self._history.values())
