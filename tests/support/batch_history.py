"""A small model of a server: which requests run, in which rows, with which blocks."""

from random import Random

import numpy as np

from tests.support.planning_cases import NULL_BLOCK, Batch

PROMPT_BLOCKS = 1000  # ids up to here hold prompts and stay cached


class Server:
    """Random events between two steps of an engine: requests join (some on blocks that other
    requests generated), leave, are pre-empted and resumed with other blocks, move between rows and
    take each other's rows.

    Args:
        query_len: most query tokens of a request in one step.
        reuse_blocks: give the block that was freed last to the next request that needs one.
    """

    def __init__(self, random: Random, block_size: int, query_len: int, reuse_blocks: bool) -> None:
        self.random = random
        self.block_size = block_size
        self.query_len = query_len
        self.reuse_blocks = reuse_blocks
        self.ids: dict[int, list[int]] = {}  # blocks of each request, in batch order
        self.lens: dict[int, int] = {}
        self.preempted: list[tuple[list[int], int]] = []
        self.free: list[int] = []
        self.next_block = PROMPT_BLOCKS
        self.next_request = 0

    EVENTS = (
        ("join", 6),
        ("join_on_blocks_of_another", 4),
        ("leave", 5),
        ("hand_over_the_row", 3),
        ("preempt", 2),
        ("resume", 3),
        ("move_rows", 2),
        ("drain", 0.3),
    )

    def event(self) -> None:
        """Any event except growth."""
        names, weights = zip(*self.EVENTS, strict=True)
        getattr(self, self.random.choices(names, weights)[0])()

    def join(self) -> None:
        words = self.random.sample(range(1, 5), self.random.randint(0, 4))
        self._admit([w * 2 + i for w in words for i in range(2)])

    def join_on_blocks_of_another(self) -> None:
        if self.ids:
            self._admit(self._some_prefix())

    def leave(self) -> None:
        if self.ids:
            self._release(self._pick())

    def hand_over_the_row(self) -> None:
        if self.ids:
            order = list(self.ids)
            row = self.random.randrange(len(order))
            prefix = self._some_prefix(of=self._pick_like(order[row]))
            self._release(order[row])
            self.free = [b for b in self.free if b not in prefix]
            self._admit(prefix)
            order[row] = self.next_request - 1
            self.ids = {request: self.ids[request] for request in order}

    def preempt(self) -> None:
        if self.ids:
            request = self._pick()
            self.preempted.append((self.ids[request], self.lens[request]))
            self._release(request)

    def resume(self) -> None:
        """Resume with the prompt's blocks, where they are cached, and new blocks for the rest."""
        if self.preempted:
            ids, length = self.preempted.pop()
            kept = [b for b in ids[: self.random.randint(0, 4)] if b <= PROMPT_BLOCKS]
            kept = kept[: self._filled(length)]
            self._admit(kept, length - len(kept) * self.block_size)

    def move_rows(self) -> None:
        order = self.random.sample(list(self.ids), len(self.ids))
        self.ids = {request: self.ids[request] for request in order}

    def drain(self) -> None:
        for request in list(self.ids):
            self._release(request)

    def decode(self) -> None:
        """Every request keeps between one token and all of its query tokens."""
        for request in self.ids:
            self.lens[request] += self.random.randint(1, self.query_len)
            while len(self.ids[request]) * self.block_size < self.lens[request]:
                self.ids[request].append(self._fresh())

    def propose_fewer_tokens(self) -> bool:
        """Reject all drafts of one request, and let it propose fewer tokens."""
        if not self.ids or self.query_len < 3:
            return False
        request = self._pick()
        kept = self.lens[request] - self.query_len + 1
        self.lens[request] = max(kept + 1, kept + self.random.randint(1, self.query_len - 2))
        return True

    def batch(self) -> Batch:
        width = 2 + max((len(ids) for ids in self.ids.values()), default=0)
        table = np.full((len(self.ids), width), NULL_BLOCK, np.int32)
        for row, ids in enumerate(self.ids.values()):
            table[row, : len(ids)] = ids
        lens = [self.lens[request] for request in self.ids]
        return Batch(table, np.array(lens, np.int32), self.block_size)

    def _pick(self) -> int:
        return self.random.choice(list(self.ids))

    def _filled(self, length: int) -> int:
        return max(0, length - self.query_len) // self.block_size

    def _pick_like(self, request: int) -> int:
        """A request with the same first block, where there is one."""
        alike = [r for r in self.ids if r != request and self.ids[r][0] == self.ids[request][0]]
        return self.random.choice(alike or list(self.ids))

    def _some_prefix(self, of: int | None = None) -> list[int]:
        other = self._pick() if of is None else of
        return self.ids[other][: self.random.randint(0, self._filled(self.lens[other]))]

    def _fresh(self) -> int:
        if self.free and self.reuse_blocks:
            return self.free.pop()
        self.next_block += 1
        return self.next_block

    def _admit(self, prefix: list[int], tail: int | None = None) -> None:
        if tail is None:
            tail = self.query_len + self.random.randint(0, 3 * self.block_size)
        length = len(prefix) * self.block_size + tail
        own = -(-length // self.block_size) - len(prefix)
        self.ids[self.next_request] = [*prefix, *(self._fresh() for _ in range(own))]
        self.lens[self.next_request] = length
        self.next_request += 1

    def _release(self, request: int) -> None:
        ids = self.ids.pop(request)
        del self.lens[request]
        used = {b for other in self.ids.values() for b in other}
        self.free += [b for b in ids if b not in used and b > PROMPT_BLOCKS]
