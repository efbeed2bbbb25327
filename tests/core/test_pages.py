import pytest

from vllm_dhisparse.core.commands import PageBound, PageDropped
from vllm_dhisparse.core.pages import PageAllocator
from vllm_dhisparse.simulator.pool import SimulatedPool


def make_pages(num_pages=4, num_blocks=16):
    log = []
    source = SimulatedPool(num_blocks)
    return source, PageAllocator(source, num_pages, log), log


def start(source, pages, request_id, count, hit=()):
    """Admit a request that gets ``count`` new blocks after its hit, and bind them."""
    pages.expect_hit(request_id, hit)
    assert pages.fits(request_id, len(hit) + count)
    source.pin(hit)
    blocks = [*hit, *source.take(count)]
    pages.promise(request_id, len(blocks))
    pages.hold(request_id, blocks)
    pages.bind(request_id, blocks[pages.num_bound(request_id) :])
    pages.end_step()
    pages.check_integrity()
    return blocks


def end(source, pages, request_id, blocks):
    pages.end_request(request_id)
    source.release(list(reversed(blocks)))
    pages.end_step()
    pages.check_integrity()


def test_pages_follow_the_blocks_of_a_request():
    source, pages, log = make_pages()
    blocks = start(source, pages, "a", 2)
    assert log == [PageBound(0, 0), PageBound(1, 1)]
    assert [pages.page_of(block) for block in blocks] == [0, 1]
    assert pages.room() == 2
    source.cached.add(blocks[0])
    end(source, pages, "a", blocks)
    assert pages.room() == 4
    assert log[2:] == [PageDropped(1, 1)], "only the un-hashed block's page goes back"
    assert (pages.num_free, pages.num_idle) == (3, 1)


def test_a_block_in_a_running_request_is_watched_for_its_reuse():
    source, pages, log = make_pages()
    blocks = start(source, pages, "a", 1)
    source.cached.add(blocks[0])
    end(source, pages, "a", blocks)
    log.clear()
    source.take(source.num_free)
    assert log == [PageDropped(0, 0)]
    pages.check_integrity()
    assert pages.num_free == 4


def test_a_late_report_of_a_reused_block_is_ignored():
    source, pages, log = make_pages()
    blocks = start(source, pages, "a", 1)
    end(source, pages, "a", blocks)
    assert pages.num_idle == 0
    log.clear()
    source.take(source.num_free)  # the watcher of the block fires only now
    assert log == []


def test_need_counts_idle_hits_but_not_pages_in_use():
    source, pages, _ = make_pages(num_pages=6)
    first = start(source, pages, "a", 3)
    source.cached.update(first)
    pages.expect_hit("b", first)
    assert pages.need("b", 4) == 1
    end(source, pages, "a", first)
    pages.expect_hit("b", first)
    assert pages.need("b", 4) == 4
    start(source, pages, "b", 1, hit=first)
    assert pages.need("b", 4) == 0
    assert pages.need("b", 6) == 2
    assert pages.room() == 2


def test_promises_of_a_step_are_kept_apart_until_bound():
    source, pages, _ = make_pages(num_pages=4)
    pages.expect_hit("a", [])
    pages.promise("a", 3)
    assert pages.room() == 1
    assert not pages.fits("b", 2)
    assert pages.fits("a", 4)
    blocks = source.take(3)
    pages.hold("a", blocks)
    pages.bind("a", blocks)
    assert pages.room() == 1
    pages.promise("a", 4)
    pages.end_step()
    assert pages.room() == 1, "a promise does not outlive its step"
    pages.check_integrity()


def test_idle_pages_are_evicted_in_queue_order_when_pages_run_out():
    source, pages, log = make_pages(num_pages=4)
    first, second = start(source, pages, "a", 2), start(source, pages, "b", 2)
    source.cached.update(first + second)
    end(source, pages, "b", second)
    end(source, pages, "a", first)
    assert pages.fits("c", 3)
    log.clear()
    start(source, pages, "c", 3)
    dropped = [command.block for command in log if isinstance(command, PageDropped)]
    assert dropped == [3, 2, 1], "the order of the queue: last block of the first to end"
    assert source.cached == {0}


def test_an_idle_page_in_use_by_a_request_of_the_step_is_not_evicted():
    source, pages, _ = make_pages(num_pages=3)
    first, second, third = blocks = start(source, pages, "a", 3)
    source.cached.update(blocks)
    end(source, pages, "a", blocks)
    page = pages.page_of(third)
    # A hit with a gap: the middle block of the prefix is a new one of this step, so only
    # the leading block is held before the step is complete.
    source.pin([first, third])
    pages.expect_hit("b", [first, third])
    (other,) = source.take(1)
    pages.hold("b", [first, other, third])
    pages.bind("b", [other, third])
    assert pages.page_of(third) == page, "its rows are in this page"
    assert pages.page_of(second) is None
    pages.check_integrity()


def test_pages_of_blocks_that_are_freed_later_are_no_room():
    source, pages, _ = make_pages(num_pages=2)
    blocks = start(source, pages, "a", 2)
    pages.end_request("a")
    assert pages.room() == 0
    assert not pages.fits("b", 1)
    source.release(blocks)
    assert pages.room() == 2


def test_a_preemption_makes_room_in_the_same_step():
    source, pages, _ = make_pages(num_pages=3)
    first, second = start(source, pages, "a", 2), start(source, pages, "b", 1)
    assert not pages.fits("a", len(first) + 1)
    pages.end_request("b")
    assert not pages.fits("a", len(first) + 1), "still referenced"
    source.release(second)
    assert pages.fits("a", len(first) + 1)


def test_a_request_preempted_after_its_admission_in_the_same_step_takes_its_promise_along():
    source, pages, _ = make_pages(num_pages=4)
    (shared,) = start(source, pages, "a", 1)
    source.cached.add(shared)
    end(source, pages, "a", [shared])
    tables = {}
    for request_id in "bc":  # both hit the idle page, and "c" relies on "b" to keep it
        pages.expect_hit(request_id, [shared])
        assert pages.fits(request_id, 2)
        source.pin([shared])
        tables[request_id] = [shared, *source.take(1)]
        pages.promise(request_id, 2)
        pages.hold(request_id, tables[request_id])
    assert pages.room() == 1
    pages.end_request("b")
    source.release(tables["b"])
    assert pages.room() == 2
    pages.bind("c", tables["c"][1:])
    pages.end_step()
    assert pages.room() == 2
    pages.check_integrity()


def test_room_is_not_lost_by_requests_that_never_run():
    _, pages, _ = make_pages()
    pages.expect_hit("a", [])
    pages.end_request("a")
    pages.end_request("never seen")
    assert pages.room() == 4
    pages.check_integrity()


@pytest.mark.parametrize("length", range(1, 40))
def test_f30_every_length_returns_every_page(length):
    source, pages, _ = make_pages(num_pages=10, num_blocks=20)
    blocks = start(source, pages, "a", -(-length // 4))
    end(source, pages, "a", blocks)
    assert pages.num_free + pages.num_idle == 10
    assert pages.room() == 10
