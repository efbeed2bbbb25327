"""Count optional units that were lost, from the commands of a ledger."""

from vllm_dhisparse.core.commands import UnitAdded, UnitLost, UnitMoved, UnitState


class UnitLosses:
    """Follows the states of units; commands come in the order they happened."""

    def __init__(self):
        self._states = {}

    def count(self, commands):
        """Return how many units these commands lose while optional."""
        lost = 0
        for command in commands:
            if isinstance(command, UnitLost):
                lost += self._states.pop(command.unit) is UnitState.OPTIONAL
            elif isinstance(command, UnitAdded | UnitMoved):
                self._states[command.unit] = command.state
        return lost
