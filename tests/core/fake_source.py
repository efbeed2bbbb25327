"""A pool of integer blocks with the free-queue behaviour of vLLM's BlockPool."""


class FakeSource:
    def __init__(self, num_blocks):
        self.num_blocks = num_blocks
        self.queue = list(range(num_blocks))
        self.references = [0] * num_blocks
        self.cached = set()
        self.watched = set()
        self.listeners = []

    @property
    def num_free(self):
        return len(self.queue)

    def add_reuse_listener(self, listener):
        self.listeners.append(listener)

    def take(self, count):
        if count > len(self.queue):
            raise ValueError(f"{count} blocks wanted, {len(self.queue)} are free")
        taken, self.queue = self.queue[:count], self.queue[count:]
        for block in taken:
            self._reuse(block)
        return taken

    def claim(self, blocks):
        for block in blocks:
            self.queue.remove(block)
            self.watched.add(block)
            self._reuse(block)

    def _reuse(self, block):
        assert self.references[block] == 0
        if block in self.watched:
            self.watched.remove(block)
            for listener in self.listeners:
                listener(block)
        self.cached.discard(block)
        self.references[block] = 1

    def pin(self, blocks):
        for block in blocks:
            if not self.references[block]:
                self.queue.remove(block)
            self.references[block] += 1

    def release(self, blocks):
        free = [block for block in blocks if self._drop(block)]
        plain = [block for block in free if block not in self.cached]
        self.queue[:0] = plain
        self.queue += [block for block in free if block in self.cached]

    def release_readable(self, blocks):
        self.watched.update(blocks)
        self.queue += [block for block in blocks if self._drop(block)]

    def _drop(self, block):
        assert self.references[block] > 0
        self.references[block] -= 1
        return not self.references[block]

    def watch(self, blocks):
        assert all(self.references[block] for block in blocks)
        self.watched.update(blocks)

    def evict_prefix(self, blocks):
        self.cached.difference_update(blocks)

    def is_cached(self, block):
        return block in self.cached

    def is_referenced(self, block):
        return self.references[block] > 0

    def first_free(self, count):
        blocks = self.queue[:count]
        return blocks, [place for place, block in enumerate(blocks) if block in self.cached]
