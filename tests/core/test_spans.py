import random

from vllm_dhisparse.core.spans import MissingSpans, Span


def test_each_request_in_turn_gives_its_newest_span():
    missing = MissingSpans()
    for request in "ab":
        missing.start(request)
    missing.miss([Span("a", 3), Span("b", 9), Span("a", 7), Span("a", 5), Span("c", 1)])
    assert len(missing) == 4
    assert missing.take(3) == [Span("a", 7), Span("b", 9), Span("a", 5)]
    assert missing.take(3) == [Span("a", 3)]
    assert missing.take(3) == []


def test_a_span_is_missed_once_in_whatever_order():
    positions = [*range(50), *range(0, 50, 3)]
    random.Random(0).shuffle(positions)
    missing = MissingSpans()
    missing.start("a")
    missing.miss(Span("a", position) for position in positions)
    assert missing.take(100) == [Span("a", position) for position in range(49, -1, -1)]


def test_an_ended_request_misses_nothing():
    missing = MissingSpans()
    missing.start("a")
    missing.miss([Span("a", 0)])
    missing.end("a")
    missing.end("never seen")
    missing.start("a")
    assert len(missing) == 0
