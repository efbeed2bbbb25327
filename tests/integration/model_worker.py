"""A worker that moves row contents instead of tensors, and checks every row that it reads.

It knows what a real worker knows: the commands of a step, block tables, and its own
slot maps. Contents are chained over the prefix, so a row of another prefix, another
position or another time is another number.
"""

import random
from dataclasses import dataclass, field

from vllm_dhisparse.core.commands import (
    Command,
    PageBound,
    PageDropped,
    UnitAdded,
    UnitLost,
    UnitMoved,
    UnitState,
)


def chain(tokens, previous=0):
    contents = []
    for token in tokens:
        previous = hash((previous, token))
        contents.append(previous)
    return contents


@dataclass
class Work:
    """What one request does in a step; ``prompt`` only when it starts or resumes."""

    request_id: str
    epoch: int
    is_prefill: bool
    num_tokens: int
    prompt: tuple[list[int], int] | None
    tables: list[list[int]]
    address_table: list[int]


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
    def __init__(self, num_groups, block_tokens, page_tokens, seed):
        self.num_groups = num_groups
        self.block_tokens = block_tokens
        self.page_tokens = page_tokens
        self.random = random.Random(seed)
        self.units = {}  # unit -> blocks
        self.state = {}  # unit -> UnitState
        self.unit_of_block = {}
        self.page_of_block = {}
        self.device = {}  # (group, block, offset) -> content
        self.host = {}  # host row -> content
        self.slot_of_row = {}
        self.row_of_slot = {}
        self.sequences = {}
        self.num_hits = self.num_misses = 0

    def apply(self, commands: tuple[Command, ...]):
        for command in commands:
            match command:
                case PageBound(page, block):
                    assert block not in self.page_of_block
                    assert page not in self.page_of_block.values(), "page owned twice"
                    self.page_of_block[block] = page
                case PageDropped(page, block):
                    assert self.page_of_block.pop(block) == page
                    for offset in range(self.page_tokens):
                        self.host.pop((page, offset), None)
                case UnitAdded(unit, state, blocks):
                    assert unit not in self.units, "unit number in use"
                    assert len(blocks) == self.num_groups
                    assert not self.unit_of_block.keys() & set(blocks), "block in two units"
                    self.units[unit], self.state[unit] = blocks, state
                    self.unit_of_block.update(dict.fromkeys(blocks, unit))
                case UnitMoved(unit, state):
                    assert self.state[unit] is not state
                    self.state[unit] = state
                case UnitLost(unit):
                    self.lose(unit)

    def lose(self, unit):
        for block in self.units.pop(unit):
            del self.unit_of_block[block]
        del self.state[unit]
        for offset in range(self.block_tokens):
            row = self.row_of_slot.pop((unit, offset), None)
            if row is not None and self.slot_of_row.get(row) == (unit, offset):
                del self.slot_of_row[row]

    def step(self, commands, works):
        """Run one step; return the new tokens of each request."""
        self.apply(commands)
        results = {}
        writes = []
        for work in works:
            if work.prompt is not None:
                self.sequences[work.request_id] = Sequence(*work.prompt)
            sequence = self.sequences[work.request_id]
            if work.is_prefill:
                end = sequence.start + work.num_tokens
                writes.append((work, sequence.contents[sequence.start : end]))
                is_last = end == len(sequence.tokens)
                results[work.request_id] = [self.random.randrange(50)] if is_last else []
            else:
                assert len(sequence.tokens) == sequence.start + 1
                drafts = [self.random.randrange(50) for _ in range(work.num_tokens - 1)]
                last = sequence.contents[-1]
                writes.append((work, [last, *chain(drafts, last)]))
                accepted = drafts[: self.random.randrange(work.num_tokens)]
                results[work.request_id] = [*accepted, self.random.randrange(50)]
        # All rows of a layer are written before any of them is selected.
        for work, contents in writes:
            self.write(work, contents)
        self.read(writes)
        for work, contents in writes:
            sequence = self.sequences[work.request_id]
            new = results[work.request_id]
            sequence.start += len(contents) if work.is_prefill else len(new)
            if new:
                sequence.extend(new)
        return results

    def host_row(self, work, position):
        block = work.address_table[position // self.page_tokens]
        return self.page_of_block[block], position % self.page_tokens

    def write(self, work, contents):
        start = self.sequences[work.request_id].start
        for position, content in enumerate(contents, start):
            index, offset = divmod(position, self.block_tokens)
            blocks = tuple(table[index] for table in work.tables)
            assert 0 not in blocks, "write into the null block"
            unit = self.unit_of_block[blocks[0]]
            assert self.units[unit] == blocks, "table and unit differ"
            assert self.state[unit] is UnitState.TAIL, "write outside the tail"
            for group, block in enumerate(blocks):
                self.device[group, block, offset] = content
            row = self.host_row(work, position)
            self.host[row] = content
            old_slot = self.slot_of_row.get(row)
            if old_slot is not None:
                self.row_of_slot.pop(old_slot, None)
            self.slot_of_row[row] = (unit, offset)
            self.row_of_slot[unit, offset] = row

    def read(self, writes):
        wanted = []
        for work, contents in writes:
            sequence = self.sequences[work.request_id]
            expected = sequence.contents[: sequence.start] + contents
            end = len(expected)
            positions = {0, end - 1, max(sequence.start - 1, 0)}
            positions.update(self.random.randrange(end) for _ in range(8))
            wanted += [(work, p, self.host_row(work, p), expected[p]) for p in sorted(positions)]
        union = {row for _, _, row, _ in wanted}
        for work, position, row, content in wanted:
            where = (work.request_id, position, row)
            slot = self.slot_of_row.get(row)
            if slot is not None:
                assert self.row_of_slot[slot] == row, ("map entry of another owner", where)
                unit, offset = slot
                for group, block in enumerate(self.units[unit]):
                    assert self.device[group, block, offset] == content, ("device row", where)
                self.num_hits += 1
            else:
                assert self.host.get(row) == content, ("host row", where)
                self.num_misses += 1
                self.insert(row, content, union)

    def insert(self, row, content, union):
        units = [unit for unit, state in self.state.items() if state is not UnitState.TAIL]
        if not units:
            return
        for _ in range(4):
            slot = unit, offset = (
                self.random.choice(units),
                self.random.randrange(self.block_tokens),
            )
            victim = self.row_of_slot.get(slot)
            if victim in union:
                continue
            if victim is not None:
                del self.slot_of_row[victim]
            self.slot_of_row[row] = slot
            self.row_of_slot[slot] = row
            for group, block in enumerate(self.units[unit]):
                self.device[group, block, offset] = content
            return
