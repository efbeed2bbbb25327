"""The adapter against the traps of vLLM's BlockPool."""

import pytest
from vllm.v1.core.block_pool import BlockPool

from vllm_dhisparse.integration.block_source import PoolBlockSource

from .kv_setup import Setup, make_kv_cache_manager, make_request, make_state


@pytest.fixture
def pool():
    return BlockPool(num_gpu_blocks=9, enable_caching=True, hash_block_size=16)


def queue_of(pool):
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


@pytest.fixture
def source(pool):
    return PoolBlockSource(pool)


@pytest.fixture
def reused(source):
    blocks = []
    source.add_reuse_listener(blocks.append)
    return blocks


def test_blocks_are_counted_without_the_null_block(source):
    assert source.num_blocks == source.num_free == 8
    assert source.take(3) == [1, 2, 3]
    assert source.num_free == 5
    with pytest.raises(ValueError, match="Cannot get 6 free blocks"):
        source.take(6)


def test_released_blocks_are_at_the_head_and_readable_ones_at_the_tail(source, pool):
    first, second = source.take(2), source.take(2)
    source.release_readable(first)
    source.release(second)
    assert queue_of(pool) == [3, 4, 5, 6, 7, 8, 1, 2]


@pytest.mark.parametrize("free", ["release", "release_readable"])
def test_f34_a_block_that_is_freed_twice_is_an_error(source, free):
    blocks = source.take(2)
    getattr(source, free)(blocks)
    with pytest.raises(AssertionError):
        getattr(source, free)(blocks)
    assert source.num_free == 8
    assert blocks == [1, 2], "the caller's list is its own"


def test_reuse_of_a_readable_block_is_told_once(source, reused):
    source.release_readable(source.take(2))
    source.take(7)
    assert reused == [1]
    source.take(1)
    assert reused == [1, 2]


def test_all_listeners_hear_although_the_pool_keeps_one_watcher(source, pool, reused):
    also = []
    source.add_reuse_listener(also.append)
    blocks = source.take(1)
    source.watch(blocks)
    source.release_readable(blocks)
    assert len(pool._reuse_watchers) == 1
    source.take(8)
    assert reused == also == [1]


def test_watching_leaves_references_as_they_are(source, pool, reused):
    blocks = source.take(2)
    source.watch(blocks)
    assert [pool.blocks[block].ref_cnt for block in blocks] == [1, 1]
    assert source.num_free == 6
    source.release(blocks)
    assert reused == []
    source.take(2)
    assert reused == [1, 2]


def test_only_blocks_in_use_can_be_watched(source):
    with pytest.raises(AssertionError):
        source.watch([1])


def test_a_watcher_survives_pinning_and_plain_release(source, reused):
    blocks = source.take(1)
    source.release_readable(blocks)
    source.pin(blocks)
    source.release(blocks)
    assert reused == []
    source.take(1)
    assert reused == [1]


def test_touching_a_sibling_while_told_is_impossible(source):
    """Why a listener calls nothing of the source: the pool has popped all blocks already."""
    blocks = source.take(2)
    source.release_readable(blocks)
    source.pin(blocks)
    source.release(blocks)
    source.add_reuse_listener(lambda block: source.pin([3 - block]))
    with pytest.raises(RuntimeError, match="invalid block"):
        source.take(2)


def test_claim_tells_listeners_as_an_allocation_does(source, reused):
    blocks = source.take(2)
    source.watch(blocks)
    source.release(blocks)
    source.claim([2, 5])
    assert reused == [2, 5]
    assert source.is_referenced(2)
    assert not source.is_referenced(1)


def test_an_evicted_block_is_the_next_to_be_reused_and_nobody_is_told():
    setup = Setup(num_groups=1)
    kv = make_kv_cache_manager(setup)
    state = make_state(kv, setup)
    source = PoolBlockSource(kv.block_pool)
    reused = []
    source.add_reuse_listener(reused.append)
    request = make_request("a", range(130))
    assert state.pages.num_free == setup.num_pages
    kv.allocate_slots(request, 130)
    table = [b.block_id for b in state._address.req_to_blocks["a"]]
    source.watch(table)
    kv.free(request)
    assert [source.is_cached(block) for block in table] == [True, True, False]
    used = source.take(1)
    assert used == table[2:]
    plain = source.plain_head(table.__contains__)
    source.evict_prefix(table)
    assert not any(source.is_cached(block) for block in table)
    assert sorted(queue_of(kv.block_pool)[:2]) == sorted(table[:2])
    assert source.plain_head(used.__contains__)[2:] == plain
    assert reused == used


def test_the_plain_head_ends_at_what_is_cached_or_known(source, pool):
    assert source.plain_head(lambda block: block == 4) == [1, 2, 3]
    pool.blocks[2].set_block_hash(b"a prefix")
    assert source.plain_head(lambda block: block == 4) == [1]


def test_reset_of_the_prefix_cache_tells_of_every_watched_block(source, pool, reused):
    source.release_readable(source.take(3))
    assert pool.reset_prefix_cache()
    assert reused == [1, 2, 3]
    assert not pool._reuse_watchers
