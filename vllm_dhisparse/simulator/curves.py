"""How much of a selection misses, by the rows that the device holds of a request."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_dhisparse.core.commands import UNIT_ROWS
from vllm_dhisparse.simulator.replacement import clock_misses, lru_distances
from vllm_dhisparse.simulator.streams import Stream, Templates
from vllm_dhisparse.simulator.workloads import NO_ROW, Workload, workload

WARM_STEPS = 256
_SHARES = np.array([0.0, 0.1, 0.25, 0.5, 0.75, 1.0])  # of the context that is held whole
_POINTS = 96
_FULL_POINTS = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24)  # in units of k

Floats = NDArray[np.float64]


class MissCurve(NamedTuple):
    """Missing share of a selection, 0 to 1.

    ``shares``: [r] - part of the context, its newest rows, that is held whole; ``rows``: [h] -
    other rows held, in order of use; ``misses``: [r, h], while the cache fills, which is as
    exact LRU; ``full``: [h], CLOCK in a full cache over LRU; ``tail``: share of a selection
    in the newest rows.
    """

    shares: Floats
    rows: Floats
    misses: Floats
    full: Floats
    tail: float

    def scaled(self, factor: float) -> "MissCurve":
        """Return the curve for selections ``factor`` times as large, of as long a context."""
        return self._replace(rows=self.rows * factor)

    def at(self, rows: Floats, share: Floats, is_full: bool) -> Floats:
        """Return the missing share for requests with so many rows and so large a share."""
        by_share = np.array([np.interp(rows, self.rows, line) for line in self.misses])
        place = np.clip(np.searchsorted(self.shares, share, side="right") - 1, 0, len(by_share) - 2)
        low, high = self.shares[place], self.shares[place + 1]
        weight = np.clip((share - low) / (high - low), 0.0, 1.0)
        index = np.arange(len(rows))
        found = by_share[place, index] * (1 - weight) + by_share[place + 1, index] * weight
        if is_full:
            found = found * np.interp(rows, self.rows, self.full)
        return np.asarray(np.minimum(found, 1.0))


def miss_curve(templates: Templates, keeps_written: bool) -> MissCurve:
    """Measure the curve over all templates and index groups.

    Args:
        templates: what requests select, all of one context.
        keeps_written: whether rows that leave the tail stay on the device, as under
            ``adaptive``; else their next use is a miss.

    """
    streams = [stream for template in templates.streams for stream in template]
    assert len(set(templates.contexts)) == 1
    context = templates.contexts[0]
    rows = np.concatenate([[0], np.geomspace(16, context, _POINTS - 1)])
    misses = np.zeros((len(_SHARES), rows.size))
    for number, share in enumerate(_SHARES[:-1]):
        lines = [_line(stream, round(share * context), rows, keeps_written) for stream in streams]
        misses[number] = np.mean(lines, axis=0)
    tail = 1 - np.mean([_line(stream, 0, rows[:1], keeps_written)[0] for stream in streams])
    return MissCurve(_SHARES, rows, misses, _clock_over_lru(streams, rows), float(tail))


def _clock_over_lru(streams: list[Stream], rows: Floats) -> Floats:
    """Misses of a full CLOCK over those of LRU with as many rows, by rows of a request."""
    load = workload([(stream.context, stream.positions) for stream in streams])
    distances = lru_distances(load)[WARM_STEPS:]
    k = streams[0].positions.shape[1]
    held, ratios = [], []
    for point in _FULL_POINTS:
        capacity = round(point * k) * len(streams)
        if capacity >= load.num_rows // 2:
            break
        clock = clock_misses(load, capacity)[WARM_STEPS:].sum()
        held.append(point * k)
        ratios.append(clock / max((distances >= capacity).sum(), 1))
    return np.asarray(np.interp(rows, [*held, held[-1] * 2], [*ratios, 1.0]))


def _line(stream: Stream, held_whole: int, rows: Floats, keeps_written: bool) -> Floats:
    """Missing share by rows held, of the rows before the newest ``held_whole``."""
    steps, k = stream.positions.shape
    leaving = stream.context + np.arange(steps) + 1 - UNIT_ROWS  # the newest row outside the tail
    is_held = stream.positions >= leaving[:, None]
    if held_whole:
        is_whole = stream.positions >= stream.context - held_whole
        # What is written later leaves the tail as used rows, or joins the newest.
        is_held |= is_whole & (stream.positions < stream.context) if keeps_written else is_whole
    used = np.where(is_held, NO_ROW, stream.positions)
    if keeps_written:
        used = np.concatenate([used, np.where(leaving >= 0, leaving, NO_ROW)[:, None]], axis=1)
    length = stream.context + steps
    first_row = np.zeros(1, np.int64)
    load = Workload(used[:, None].astype(np.int32), np.array([stream.context]), first_row, length)
    distances = lru_distances(load)[:, 0]
    distinct = np.cumsum((distances == length).sum(axis=1))
    distances = distances[:, :k]
    is_first = distances == length
    late = distances[WARM_STEPS:]
    cached = np.sort(late[(late >= 0)])
    line = (cached.size - np.searchsorted(cached, rows, side="left")) / late.size
    # A cache that holds more than has been used at all misses what is used for the first time.
    known, span = int(distinct[WARM_STEPS]), 64
    ends = np.arange(WARM_STEPS + span, steps, span)
    held = [float(distinct[end - span // 2]) for end in ends]
    first = [float(is_first[end - span : end].mean()) for end in ends]
    beyond = rows > known
    whole = stream.context - held_whole
    line[beyond] = np.interp(rows[beyond], [*held, max(whole, held[-1] + 1)], [*first, 0.0])
    return np.asarray(np.minimum.accumulate(line))
