"""Messages from the scheduler to every worker: what changed in pages and units.

Plain integers in frozen tuples, so that they pickle small and mean the same in
every process. A worker applies the commands of a step exactly once, in order,
before the forward pass of that step.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias

UNIT_ROWS = 64
"""Rows of a unit in every latent layer; also the tokens of a latent block."""


class UnitState(IntEnum):
    """What a unit is for. Only its slots outside the tail are replaced."""

    DEAD = 0
    TAIL = 1
    REQUIRED = 2
    OPTIONAL = 3


class PageBound(NamedTuple):
    """Indexer block ``block`` (first indexer group) now owns host page ``page``."""

    page: int
    block: int


class PageDropped(NamedTuple):
    """Indexer block ``block`` no longer owns host page ``page``."""

    page: int
    block: int


class UnitAdded(NamedTuple):
    """Unit ``unit`` lives in ``blocks``, one block id per latent KV group."""

    unit: int
    state: UnitState
    blocks: tuple[int, ...]


class UnitMoved(NamedTuple):
    """A live unit changes its state; its rows stay where they are."""

    unit: int
    state: UnitState


class UnitLost(NamedTuple):
    """The blocks of a unit are gone; none of its slots may be read again."""

    unit: int


class SpanRestored(NamedTuple):
    """The rows of ``page`` from ``first_row`` on fill a unit, except those with a slot."""

    unit: int
    page: int
    first_row: int


Command: TypeAlias = PageBound | PageDropped | UnitAdded | UnitMoved | UnitLost | SpanRestored


@dataclass(frozen=True, slots=True)
class StepCommands:
    """All commands of one scheduler step, in the order they happened; steps count from 0."""

    step: int
    commands: tuple[Command, ...] = ()
