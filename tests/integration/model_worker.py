"""What a model runner does in a step, without a model: batches, rows and sampled tokens.

It knows what a real worker knows: the commands of a step, block tables, and how far each
request is. Contents of rows are chained over the prefix, so a row of another prefix,
another position or another time is another number.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from vllm_dhisparse.core.commands import StepCommands, UnitState
from vllm_dhisparse.runtime.plan import Queries

from .row_memory import Batch, RowMemory


def chain(tokens, previous=0):
    contents = []
    for token in tokens:
        previous = hash((previous, token))
        contents.append(previous)
    return contents


class Work(NamedTuple):
    """What one request does in a step; ``prompt`` only when it starts or resumes.

    The first of ``indexer_tables`` is that of the address group.
    """

    request_id: str
    epoch: int
    is_prefill: bool
    num_tokens: int
    prompt: tuple[list[int], int] | None
    latent_tables: list[list[int]]
    indexer_tables: list[list[int]]


class Message(NamedTuple):
    """A step as the scheduler sent it, and what the scheduler held then."""

    commands: StepCommands
    works: list[Work]
    units: dict[UnitState, list[int]]
    pages: list[int]


class Write(NamedTuple):
    """Contents of the rows that a request writes, from ``start`` on."""

    work: Work
    start: int
    contents: list[int]


@dataclass
class Sequence:
    tokens: list[int]
    start: int
    contents: list[int] = field(init=False)

    def __post_init__(self):
        self.contents = chain(self.tokens)

    def extend(self, tokens):
        self.contents += chain(tokens, self.contents[-1])
        self.tokens += tokens


class ModelWorker:
    def __init__(self, setup):
        self.block_tokens = setup.block_tokens
        self.page_tokens = setup.page_tokens
        self.random = random.Random(setup.seed)
        self.memory = RowMemory(setup)
        self.sequences = {}
        self.events = Counter()

    def step(self, message):
        """Run one step; return the new tokens of each request."""
        self.memory.apply(message.commands, message.units, message.pages)
        results, writes = {}, []
        for work in message.works:
            if work.prompt is not None:
                self.sequences[work.request_id] = Sequence(*work.prompt)
            sequence = self.sequences[work.request_id]
            if work.is_prefill:
                new, contents = self.prefill(sequence, work.num_tokens)
            else:
                new, contents = self.verify(sequence, work.num_tokens - 1)
            writes.append(Write(work, sequence.start, contents))
            results[work.request_id] = new
        if writes:
            self.memory.run(self.batch(writes))
        for work, _, contents in writes:
            sequence, new = self.sequences[work.request_id], results[work.request_id]
            sequence.start += len(contents) if work.is_prefill else len(new)
            if new:
                sequence.extend(new)
        return results

    def prefill(self, sequence, num_tokens):
        end = sequence.start + num_tokens
        is_last = end == len(sequence.tokens)
        new = [self.random.randrange(50)] if is_last else []
        return new, sequence.contents[sequence.start : end]

    def verify(self, sequence, num_drafts):
        assert len(sequence.tokens) == sequence.start + 1
        drafts = [self.random.randrange(50) for _ in range(num_drafts)]
        accepted = drafts[: self.random.randrange(num_drafts + 1)]
        self.events["accepted"] += len(accepted)
        self.events["rejected"] += num_drafts - len(accepted)
        last = sequence.contents[-1]
        return [*accepted, self.random.randrange(50)], [last, *chain(drafts, last)]

    def batch(self, writes):
        histories = [
            self.sequences[work.request_id].contents[:start] + contents
            for work, start, contents in writes
        ]
        lengths = torch.tensor([len(history) for history in histories])
        counts = torch.tensor([len(contents) for _, _, contents in writes])
        request = torch.arange(len(writes)).repeat_interleave(counts)
        position = torch.cat([torch.arange(w.start, w.start + len(w.contents)) for w in writes])

        def slots(tables, block_tokens):
            block = padded(tables)[request, position // block_tokens]
            assert (block > 0).all(), "a write into the null block"
            return block * block_tokens + position % block_tokens

        works = [work for work, _, _ in writes]
        latent, indexer = (
            [list(group) for group in zip(*(getattr(w, name) for w in works), strict=True)]
            for name in ("latent_tables", "indexer_tables")
        )
        keys = [slots(tables, self.page_tokens) for tables in indexer]
        return Batch(
            address_slots=keys[0],
            latent_slots=[slots(tables, self.block_tokens) for tables in latent],
            indexer_blocks=(torch.cat(keys) // self.page_tokens).unique().tolist(),
            contents=torch.tensor([content for w in writes for content in w.contents]),
            history=padded(histories),
            lengths=lengths,
            queries=Queries(
                request.int(),
                (position + 1).int(),
                padded(indexer[0]).int(),
                torch.tensor([work.is_prefill for work in works]),
            ),
        )


def padded(rows):
    """[len(rows), longest] int64, zeros behind the shorter ones."""
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])
