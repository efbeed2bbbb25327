"""What the bits of ``Tables.errors`` mean."""

from vllm_dhisparse.kernels import errors
from vllm_dhisparse.runtime.tables import Tables

_MESSAGES = {
    errors.NO_HOST_PAGE_SELECTED: "a row is selected without a host page",
    errors.NO_HOST_PAGE_WRITTEN: "a row is written without a host page",
    errors.PADDING_DIFFERS: "padding of the two slot mappings differs",
    errors.OUTSIDE_UNITS: "a row is written outside all units",
    errors.OUTSIDE_TAIL: "a row is written outside a tail",
    errors.OTHER_GROUP: "block of another group",
    errors.PAGE_BOUND_TWICE: "a page is bound already, or a block has a page already",
    errors.PAGE_NOT_OWNED: "a block does not own the page that it drops",
    errors.UNIT_LIVES: "a unit is added that lives already",
    errors.BLOCK_IN_UNIT: "blocks of a new unit are in a unit",
    errors.UNIT_IS_DEAD: "a dead unit is moved or lost",
    errors.SPAN_OUTSIDE_OPTIONAL: "a span is restored into a unit that is not optional",
    errors.SPAN_OF_UNBOUND_PAGE: "a span of an unbound page is restored",
    errors.SPAN_OVER_ROWS: "a span is restored into a unit with rows",
    errors.UNION_OVERFLOWS: "a union is larger than its buffer",
}


def messages(word: int) -> list[str]:
    """Return what the bits of an error word mean."""
    return [text for bit, text in _MESSAGES.items() if word & bit.value]


def raise_word(word: int) -> None:
    """Raise an AssertionError if a bit of an error word is set."""
    if word:
        raise AssertionError("; ".join(messages(word)))


def raise_errors(tables: Tables) -> None:
    """Raise an AssertionError if a kernel found something impossible; waits for the device."""
    word = int(tables.errors)
    tables.errors.zero_()
    raise_word(word)
