"""What the requests of a simulated run select: template streams, each used at many offsets."""

from functools import cache
from typing import NamedTuple

import numpy as np

from vllm_dhisparse.core.commands import UNIT_ROWS
from vllm_dhisparse.core.traces import Positions, Trace
from vllm_dhisparse.simulator.locality import LOCALITIES, positions

FAR_BACK_STEPS = 512


class Stream(NamedTuple):
    """``context``: tokens before step 0; ``positions``: int32 [steps, k], ascending not needed.

    A step adds one token. A request that starts at step ``n`` has ``context + n`` tokens.
    """

    context: int
    positions: Positions


class Place(NamedTuple):
    """Where a request reads its selections, and its context there."""

    template: int
    offset: int
    context: int


class Templates:
    """Streams that requests share; which one and where is drawn by the request's number.

    Args:
        streams: [templates][index groups].

    """

    def __init__(self, streams: list[list[Stream]]) -> None:
        if not streams or not streams[0]:
            raise ValueError("there are no streams")
        self.streams = streams

    @property
    def groups(self) -> int:
        """Index groups."""
        return len(self.streams[0])

    @property
    def steps(self) -> int:
        """Steps of the shortest template."""
        return min(len(group.positions) for template in self.streams for group in template)

    @property
    def contexts(self) -> list[int]:
        """Tokens before step 0, of each template."""
        return [template[0].context for template in self.streams]

    def place(
        self, seed: int, request: int, context: int, output_tokens: int, drafts: int
    ) -> "Place":
        """Return the stream of a request: one of its context, from a step near its start.

        Raises:
            ValueError: no template has the context, or they are shorter than the request.

        """
        fitting = [number for number, have in enumerate(self.contexts) if have == context]
        if not fitting:
            have = ", ".join(map(str, sorted(set(self.contexts))))
            raise ValueError(f"no stream has a context of {context} tokens; there are: {have}")
        latest = self.steps - output_tokens - 2 * drafts - 1
        if latest < 0:
            raise ValueError(
                f"the streams have {self.steps} steps, too few for {output_tokens} output tokens"
                f" and {drafts} drafts: ask for fewer tokens or longer streams"
            )
        random = np.random.default_rng([seed, request])
        # Not far in, so that all requests have much the same context.
        offset = int(random.integers(min(latest, 256) + 1))
        return Place(int(random.choice(fitting)), offset, context + offset)

    def selections(
        self, template: int, group: int, step: int, queries: int, accepted: int, seed: int
    ) -> Positions:
        """Return int32 [queries, k]: what a verify step's queries select; -1 = none.

        The first ``accepted`` are of tokens that stay. The others are of a continuation that
        is not taken, see ``rejected``.
        """
        stream = self.streams[template][group]
        own = stream.positions[step : step + queries].copy()
        for query in range(accepted, queries):
            own[query] = rejected(stream, step + query, np.random.default_rng([seed, query]))
        newest = stream.context + step + np.arange(queries)
        own[own > newest[:, None]] = -1
        return np.asarray(own, dtype=np.int32)


SHARE_OF_OTHERS = 0.4
SHARE_OF_STRANGERS = 0.05
"""Fitted so that verify steps of 8 queries with 2 tokens each fetch about as many rows as was
measured with a small model's own wrong continuations: 2.3 to 2.7 times those of a token
without drafts in caches of 2 to 8 selections."""


def rejected(stream: Stream, step: int, random: np.random.Generator) -> Positions:
    """Return what a query of a rejected draft selects, int32 [k].

    Part of what the right query selects. In place of the others rows that were selected at
    some time before: like them in age and heat, but not what the text needs now. A few are
    any rows, the nearer the likelier.
    """
    own: Positions = stream.positions[step].copy()
    newest = stream.context + step
    others = random.random(own.size) < SHARE_OF_OTHERS
    others &= own < newest - UNIT_ROWS
    ages = np.exp(random.uniform(0, np.log(FAR_BACK_STEPS), int(others.sum())))
    past = np.maximum(step - ages.astype(np.int64), 0)
    own[others] = stream.positions[past, random.integers(own.size, size=past.size)]
    strangers = others & (random.random(own.size) < SHARE_OF_STRANGERS)
    distance = np.exp(random.uniform(np.log(UNIT_ROWS), np.log(newest), int(strangers.sum())))
    own[strangers] = newest - np.minimum(distance.astype(np.int64), newest)
    return own


@cache
def synthetic(
    locality: str, context: int, steps: int, top_k: int, templates: int, groups: int, seed: int
) -> Templates:
    """Return generated streams; the same arguments give the same ones.

    Raises:
        ValueError: the locality has no such name.

    """
    if locality not in LOCALITIES:
        known = ", ".join(LOCALITIES)
        raise ValueError(f"unknown locality {locality!r}; known: {known}")
    kind = LOCALITIES[locality]

    def stream(template: int, group: int) -> Stream:
        random = np.random.default_rng([seed, template, group])
        return Stream(context, positions(kind, context, steps, top_k, random))

    return Templates(
        [[stream(template, group) for group in range(groups)] for template in range(templates)]
    )


def recorded(traces: list[Trace], groups: int) -> Templates:
    """Return the first ``groups`` index groups of each trace, one template a trace.

    Raises:
        ValueError: a trace has fewer groups, or they differ in context or k.

    """
    for trace in traces:
        if trace.positions.shape[1] < groups:
            raise ValueError(f"a trace has {trace.positions.shape[1]} index groups, not {groups}")
    if len({(int(trace.context[0]), trace.top_k) for trace in traces}) > 1:
        raise ValueError("traces of one run must have the same first context and top_k")
    return Templates([[Stream(*trace.stream(g)) for g in range(groups)] for trace in traces])
