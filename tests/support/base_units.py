"""A change of the share of all running requests, which the package itself never makes."""

from vllm_dhisparse.core.ledger import Ledger


def set_base_units(ledger: Ledger, base_units: int) -> None:
    """Change the largest share of every running request at once.

    Raises:
        ValueError: the pool has too few free blocks; nothing is changed.

    """
    shares, before = ledger._shares, ledger.base_units
    shares.set_base_units(base_units)
    missing_blocks = ledger.missing_units() * ledger.num_groups
    if missing_blocks > ledger._source.num_free:
        shares.set_base_units(before)
        raise ValueError(f"{missing_blocks} blocks are missing, {ledger._source.num_free} are free")
    ledger._require(ledger.missing_units())
    ledger.settle(shares.shared_units)
