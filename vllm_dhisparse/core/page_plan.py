"""Block sizes and page padding, so that latent, indexer and draft layers share one block pool.

vLLM gives every layer pages of one size. It pads the page of an ordinary attention
layer, but an indexer page only grows by whole blocks; so the latent page is padded to
a multiple of the indexer's.
"""

from dataclasses import dataclass

from vllm_dhisparse.core.commands import UNIT_ROWS


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Block and page sizes of one model; tokens per block, bytes per layer and block."""

    latent_block_tokens: int
    latent_page_bytes: int
    """Size without padding."""
    page_bytes: int
    """Size of every layer's page."""
    indexer_block_tokens: int
    """Also the tokens of one host page."""
    drafter_block_tokens: int | None
    """Largest draft block whose page fits and that divides the indexer block, at whose borders
    prefix hits end; None without a drafter."""

    @property
    def page_size_padded(self) -> int | None:
        """Value for the latent layers' spec; None where nothing needs padding."""
        return self.page_bytes if self.page_bytes != self.latent_page_bytes else None

    @property
    def resident_page_size_padded(self) -> int | None:
        """Value for vLLM's own MLA spec under resident residency.

        None without a drafter: vLLM then puts latent and indexer layers, which are MLA
        specs of one block size, into one uniform group, and their pages may differ.
        """
        return None if self.drafter_block_tokens is None else self.page_size_padded

    @property
    def padding_ratio(self) -> float:
        """Unused share of a latent page, 0 to 1."""
        return 1 - self.latent_page_bytes / self.page_bytes


def plan_pages(
    latent_row_bytes: int,
    indexer_row_bytes: int,
    drafter_row_bytes: int | None = None,
    drafter_block_multiple: int = 16,
) -> PagePlan:
    """Plan the pages of a model.

    Args:
        latent_row_bytes: one token's latent row in one layer.
        indexer_row_bytes: one token's indexer key (and scale) in one layer.
        drafter_row_bytes: one token's draft key and value in one layer and rank.
        drafter_block_multiple: the draft block is a multiple of this, in tokens; a divisor
            of 64.

    Raises:
        ValueError: a size is not positive, or the smallest draft page is so large that
            more than half of every latent page would be padding.

    """
    sizes = {
        "latent_row_bytes": latent_row_bytes,
        "indexer_row_bytes": indexer_row_bytes,
        "drafter_row_bytes": 1 if drafter_row_bytes is None else drafter_row_bytes,
        "drafter_block_multiple": drafter_block_multiple,
    }
    for name, value in sizes.items():
        if value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")
    latent_page = UNIT_ROWS * latent_row_bytes
    indexer_page = UNIT_ROWS * indexer_row_bytes
    smallest_draft_page = drafter_block_multiple * (drafter_row_bytes or 0)
    ratio = -(-max(latent_page, smallest_draft_page) // indexer_page)
    page = ratio * indexer_page
    if smallest_draft_page > latent_page and page > 2 * latent_page:
        raise ValueError(
            f"a draft page of {drafter_block_multiple} tokens x {drafter_row_bytes} B = "
            f"{smallest_draft_page} B does not fit beside latent pages of "
            f"{UNIT_ROWS} rows x {latent_row_bytes} B = {latent_page} B: every page "
            f"would have to be {page} B, more than twice the latent page. Raise "
            f"tensor_parallel_size, which splits the draft heads, or use a smaller drafter"
        )
    draft_block = None
    if drafter_row_bytes is not None:
        indexer_block = ratio * UNIT_ROWS
        draft_block = next(
            block
            for block in range(indexer_block, 0, -1)
            if indexer_block % block == 0
            and block % drafter_block_multiple == 0
            and block * drafter_row_bytes <= page
        )
    return PagePlan(
        latent_block_tokens=UNIT_ROWS,
        latent_page_bytes=latent_page,
        page_bytes=page,
        indexer_block_tokens=ratio * UNIT_ROWS,
        drafter_block_tokens=draft_block,
    )


def check_host_pool(
    num_pages: int,
    page_tokens: int,
    page_bytes: int,
    max_model_len: int,
    num_lookahead_tokens: int,
) -> None:
    """Refuse a host pool that cannot hold one request of the maximum length.

    Args:
        num_pages: host pages of the engine.
        page_tokens: tokens of one page.
        page_bytes: bytes of one page, all layers and ranks.
        max_model_len: tokens of the longest request.
        num_lookahead_tokens: slots that speculation takes beyond the last token.

    Raises:
        ValueError: names what is missing and the setting to raise.

    """
    needed = -(-(max_model_len + num_lookahead_tokens) // page_tokens)
    if num_pages < needed:
        raise ValueError(
            f"the host pool has {num_pages} pages of {page_tokens} tokens, but one request of "
            f"max_model_len={max_model_len} needs {needed}: raise dhisparse.host_pool_gib to at "
            f"least {needed * page_bytes / 2**30:.3f} or lower max_model_len"
        )
