"""Where attention on CUDA reads rows of the device in place, and where they are copied."""

from dataclasses import replace

import pytest
from vllm.platforms.interface import DeviceCapability

from vllm_dhisparse.integration.cuda import workspace
from vllm_dhisparse.runtime.span import span

from .cuda_memory import CudaMemory
from .kv_setup import Setup

pytestmark = pytest.mark.usefixtures("flash_mla_operators")
SETUP = Setup(num_blocks=20, page_tokens=576, block_tokens=64, top_k=40, staging_rows=128)


@pytest.mark.parametrize(
    ("row_bytes", "block_bytes", "capability", "copied"),
    [
        (1152, 66 * 1152, (9, 0), False),
        (1152, 66 * 1152, (10, 0), False),
        (1152, 65 * 1152 + 16, (9, 0), True),
        (656, 42_240, (9, 0), False),
        (656, 42_240, (10, 0), True),
        (656, 65 * 656, (10, 0), False),
    ],
)
def test_layouts_that_attention_can_address(row_bytes, block_bytes, capability, copied):
    reason = workspace._cannot_reach(row_bytes, block_bytes, DeviceCapability(*capability))
    assert (reason is not None) == copied
    if copied:
        assert f"blocks of {block_bytes} bytes are not whole rows of {row_bytes}" in reason


def test_memory_too_far_apart_is_copied_and_said_once(monkeypatch):
    said = []
    monkeypatch.setattr(workspace.logger, "info_once", lambda text, *rest: said.append(text % rest))

    def fail(*_):
        raise ValueError("further than an index reaches")

    monkeypatch.setattr(workspace, "span", fail)
    memory = CudaMemory(SETUP, monkeypatch, "auto")
    assert all(place.span is None for place in memory.worker.places)
    assert set(said) == {
        "DHISPARSE copies rows that are on the device to staging: further than an index reaches"
    }


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("seed", [0, 1], ids=["staging below", "staging above"])
def test_every_layer_is_reached_from_the_lower_address(monkeypatch, cache_dtype, seed):
    """The address of each row, by index, in slab and staging; block 0 reads as zeros."""
    pages = {"auto": 576, "fp8_ds_mla": 320}
    setup = replace(SETUP, page_tokens=pages[cache_dtype], seed=seed)
    memory = CudaMemory(setup, monkeypatch, cache_dtype)
    for place in memory.worker.places:
        found, slab = place.span, place.kv_cache
        page_rows = found.rows.shape[1]

        def address(index, rows=found.rows, page_rows=page_rows):
            return rows[index // page_rows, index % page_rows].data_ptr()

        for block, offset in ((0, 0), (0, 63), (7, 5), (19, 63)):
            index = found.slab_first + block * found.block_rows + offset
            assert address(index) == slab[block, offset].data_ptr()
        for row in (0, 63, 64, 127):
            index = found.staging_first + row
            assert address(index) == found.staging[row // 64, row % 64].data_ptr()
        assert min(found.slab_first, found.staging_first) == 0
        assert not slab[0].any()


def test_an_index_that_reaches_other_rows_is_found_at_start(monkeypatch):
    def shifted(*arguments):
        found = span(*arguments)
        return found._replace(staging_first=found.staging_first - 1)

    monkeypatch.setattr(workspace, "span", shifted)
    with pytest.raises(RuntimeError, match="attention by FlashMlaAttention is off by"):
        CudaMemory(SETUP, monkeypatch, "auto")
