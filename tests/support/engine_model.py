"""A small model of vLLM around the planner: a pool of KV blocks with prefix caching, a scheduler
that pre-empts, and the block tables of the V1 and V2 model runners.

The KV memory holds, instead of keys and values, one number per token that stands for the token and
all tokens before it. So the blocks that a plan reads can be compared with what each request has
written.
"""

from collections import deque
from dataclasses import dataclass, field
from random import Random

import numpy as np

from vllm_prefixshare.vllm_plugin.step.host_tables import Slots, SlotTable

GARBAGE = -1  # a slot that was never written, or holds a rejected draft


class BlockPool:
    """Blocks 1 to ``num_blocks - 1``, given out oldest first. A free block can be found by its
    content until it is given out, as in ``vllm.v1.core.block_pool.BlockPool``. Block 0 is the null
    block.
    """

    def __init__(self, num_blocks: int) -> None:
        self.free = deque(range(1, num_blocks))
        self.users = [0] * num_blocks
        self.content: list[int | None] = [None] * num_blocks
        self.cached: dict[int, int] = {}

    def allocate(self) -> int:
        block = self.free.popleft()
        self._forget(block)
        self.users[block] = 1
        return block

    def take_cached(self, content: int) -> int | None:
        block = self.cached.get(content)
        if block is not None:
            if not self.users[block]:
                self.free.remove(block)
            self.users[block] += 1
        return block

    def keep(self, block: int, content: int) -> None:
        if self.content[block] is None and content not in self.cached:
            self.content[block] = content
            self.cached[content] = block

    def release(self, blocks: list[int]) -> None:
        """Give back blocks; the null block has no users."""
        for block in filter(None, reversed(blocks)):  # the end of a prefix is given out first
            self.users[block] -= 1
            if not self.users[block]:
                self.free.append(block)

    def reset_cache(self) -> None:
        for block in list(self.cached.values()):
            self._forget(block)

    def _forget(self, block: int) -> None:
        content = self.content[block]
        if content is not None:
            del self.cached[content]
            self.content[block] = None


@dataclass(eq=False)
class Request:
    """One request.

    tokens: the last one has no KV yet. chain: for each token, its number in memory.
    turn: which of the batches that take turns holds the request.
    """

    tokens: list[int]
    chain: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    turn: int = 0
    slot: int = -1


class V1Rows:
    """The persistent batch of the V1 runner: requests keep their rows, and the last requests move
    to the rows of requests that left. A row that a request leaves for another is zeroed.
    """

    blocks_per_id = 1

    def __init__(self, max_num_reqs: int, max_blocks: int) -> None:
        self.table = np.zeros((max_num_reqs, max_blocks), np.int32)
        self.used = [0] * max_num_reqs
        self.rows: list[Request] = []
        self.left: set[Request] = set()

    def prepare(self, batch: list[Request], new_blocks: dict[Request, list[int]]) -> None:
        """Set the rows of this step's batch; all other requests leave."""
        stay = [r in batch and r not in self.left for r in self.rows]
        self.left.clear()
        rows: list[Request | None] = [
            r if s else None for r, s in zip(self.rows, stay, strict=True)
        ]
        empty = [i for i, stays in enumerate(stay) if not stays]
        for request in batch:
            if request in rows:
                self._append(rows.index(request), new_blocks.get(request, []))
                continue
            if empty:
                row = empty.pop(0)
            else:
                row = len(rows)
                rows.append(None)
            rows[row] = request
            self.used[row] = 0
            self._append(row, request.blocks)
        for row in empty:
            while rows and rows[-1] is None:
                rows.pop()
            if row < len(rows):
                self._move(len(rows) - 1, row)
                rows[row] = rows.pop()
        self.rows = [r for r in rows if r is not None]

    def swap(self, a: int, b: int) -> None:
        self.rows[a], self.rows[b] = self.rows[b], self.rows[a]
        self.used[a], self.used[b] = self.used[b], self.used[a]
        self.table[[a, b]] = self.table[[b, a]]

    def reorder(self, random: Random) -> None:
        if len(self.rows) > 1:
            self.swap(*random.sample(range(len(self.rows)), 2))

    def leave(self, request: Request) -> None:
        """The request's row is empty when the next batch is prepared, even if the request is back
        by then.
        """
        self.left.add(request)

    def order(self) -> list[Request]:
        return self.rows

    def arguments(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """``block_table`` and keyword arguments for the planner."""
        return self.table[: len(self.rows)], {}

    def batch_table(self) -> np.ndarray:
        """``[num_reqs, max_blocks]``: the table that the GPU reads."""
        return self.table[: len(self.rows)]

    def _append(self, row: int, ids: list[int]) -> None:
        self.table[row, self.used[row] : self.used[row] + len(ids)] = ids
        self.used[row] += len(ids)

    def _move(self, source: int, target: int) -> None:
        count = self.used[target] = self.used[source]
        self.table[target, :count] = self.table[source, :count]
        self.table[source, :count] = 0
        self.used[source] = 0


class V2Slots:
    """The V2 runner: a request keeps its slot from its first step to its last, and each batch is an
    order of slots. The host's copy is that of ``vllm_plugin.step.host_tables``.

    Args:
        blocks_per_id: kernel blocks in a block of the pool.
    """

    def __init__(self, max_num_reqs: int, max_blocks: int, blocks_per_id: int) -> None:
        self.blocks_per_id = blocks_per_id
        self.slots = Slots(max_num_reqs)
        self.copy = SlotTable(self.slots, (max_num_reqs, max_blocks), blocks_per_id)
        self.free = list(range(max_num_reqs))
        self.batch: list[Request] = []
        self.queries: dict[Request, int] = {}

    def prepare(self, batch: list[Request], new_blocks: dict[Request, list[int]]) -> None:
        for request in batch:
            if request.slot < 0:
                request.slot = self.free.pop()
                self.slots.take(request.slot)
                self.copy.append(request.slot, request.blocks, overwrite=True)
            elif request in new_blocks:
                self.copy.append(request.slot, new_blocks[request], overwrite=False)
        kept = [r for r in self.batch if r in batch]
        self.batch = kept + [r for r in batch if r not in kept]
        self.slots.batch = np.array([r.slot for r in self.batch], np.int32)

    def reorder(self, random: Random) -> None:
        random.shuffle(self.batch)
        self.slots.batch = np.array([r.slot for r in self.batch], np.int32)

    def leave(self, request: Request) -> None:
        if request.slot >= 0:
            self.free.append(request.slot)
            request.slot = -1
            self.batch = [r for r in self.batch if r is not request]

    def order(self) -> list[Request]:
        return self.batch

    def arguments(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        table_rows, row_ids = self.copy.rows(len(self.batch))
        return self.copy.block_table, {"table_rows": table_rows, "row_ids": row_ids}

    def batch_table(self) -> np.ndarray:
        return self.copy.block_table[[r.slot for r in self.batch]]


@dataclass(frozen=True)
class Step:
    """A batch of decode rows as the planner and the kernels see it.

    block_table: ``[num_reqs, max_blocks]``. host_lens: lengths on the host, which count drafts as
        accepted.
    true_lens: lengths on the GPU. queries: ``[num_reqs]`` query tokens of each request.
    chains: ``Request.chain`` of each request.
    """

    block_table: np.ndarray
    host_lens: np.ndarray
    true_lens: np.ndarray
    queries: np.ndarray
    chains: list[np.ndarray]


class Engine:
    """Scheduler, block pool and memory.

    Args:
        runner: V1Rows or V2Slots.
        block_size: block size of the kernels.
        query_len: most query tokens of a request in a step: 1 and its drafts.
        slack: how much too long a length on the host may be.
        turns: batches in flight, as in a pipeline; each step runs the next batch.
        window: tokens that each query sees, its own included; None for all. Blocks before the
            window of a request's next query are given back, as by vLLM's ``SlidingWindowManager``:
            the null block takes their place in the request, and the runner's row keeps their ids.
    """

    MAX_REQS = 12

    def __init__(
        self,
        runner: V1Rows | V2Slots,
        block_size: int,
        num_blocks: int,
        max_len: int,
        query_len: int,
        slack: int,
        turns: int,
        window: int | None = None,
    ) -> None:
        self.runner = runner
        self.block_size, self.max_len = block_size, max_len
        self.query_len, self.slack, self.turns = query_len, slack, turns
        self.window = window
        self.pool = BlockPool(num_blocks)
        self.memory = np.full((num_blocks * runner.blocks_per_id, block_size), GARBAGE)
        self.pool_block = block_size * runner.blocks_per_id
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.turn = 0
        self._numbers: dict[tuple[int, int], int] = {}

    def arrive(self, tokens: list[int]) -> None:
        self.waiting.append(Request(tokens[: self.max_len]))

    def admit(self) -> None:
        """Admit the first waiting request: it gets cached blocks first, new blocks for the rest,
        and a prefill that fills them.
        """
        if not self.waiting or len(self.running) == self.MAX_REQS:
            return
        request = self.waiting[0]
        self._extend_chain(request)
        computed = len(request.tokens) - 1
        hits = self._take_hits(request, computed // self.pool_block)
        needed = -(-max(computed, 1) // self.pool_block) - len(hits)
        if needed > len(self.pool.free):
            self.pool.release(hits)
            return
        self.waiting.pop(0)
        request.blocks = hits + [self.pool.allocate() for _ in range(needed)]
        self._write(request, len(hits) * self.pool_block, computed)
        load = [sum(r.turn == t for r in self.running) for t in range(self.turns)]
        request.turn = load.index(min(load))
        self.running.append(request)

    def _take_hits(self, request: Request, most: int) -> list[int]:
        """The cached blocks of a request, at most its first ``most``. With a window only the last
        of them need be cached, those that the next query sees.
        """
        contents = [request.chain[(n + 1) * self.pool_block - 1] for n in range(most)]
        cached = [content in self.pool.cached for content in contents]
        seen = most
        if self.window is None:
            count = next((n for n, hit in enumerate(cached) if not hit), most)
        else:
            seen = -(-(self.window - 1) // self.pool_block)
            ends = range(most, 0, -1)
            count = next((n for n in ends if all(cached[max(0, n - seen) : n])), 0)
        first = max(0, count - seen)
        return [
            self.pool.take_cached(content) if n >= first else 0
            for n, content in enumerate(contents[:count])
        ]

    def _leave_behind(self, request: Request) -> None:
        """Give back the blocks before the window of the request's next query."""
        if self.window is not None:
            passed = max(0, len(request.tokens) - self.window) // self.pool_block
            self.pool.release(request.blocks[:passed])
            request.blocks[:passed] = [0] * passed

    def finish(self, request: Request) -> None:
        self.running.remove(request)
        self.runner.leave(request)
        self.pool.release(request.blocks)
        request.blocks = []

    def preempt(self, request: Request) -> None:
        """Release all blocks; the request waits to start again with its tokens so far."""
        self.finish(request)
        self.waiting.insert(0, request)

    def schedule(self, random: Random, reorder: bool) -> Step:
        """The next batch, with room for its tokens; the newest requests are pre-empted to make
        room.
        """
        batch, drafts, host_lens = [], {}, {}
        new_blocks: dict[Request, list[int]] = {}
        for request in [r for r in self.running if r.turn == self.turn]:
            if request not in self.running:
                continue
            self._leave_behind(request)
            drafts[request] = random.randint(0, self.query_len - 1)
            length = len(request.tokens) + drafts[request]
            host_lens[request] = length + random.choice((0, random.randint(0, self.slack)))
            needed = -(-host_lens[request] // self.pool_block) - len(request.blocks)
            while needed > len(self.pool.free) and request in self.running:
                self.preempt(self.running[-1])
            if request not in self.running:
                break
            if needed > 0:
                fresh = [self.pool.allocate() for _ in range(needed)]
                request.blocks += fresh
                new_blocks[request] = fresh
            batch.append(request)
        batch = [r for r in batch if r in self.running]
        self.turn = (self.turn + 1) % self.turns
        self.runner.prepare(batch, new_blocks)
        if reorder:
            self.runner.reorder(random)
        order = self.runner.order()
        queries = np.array([1 + drafts[r] for r in order], np.int32)
        lengths = np.array([len(r.tokens) for r in order], np.int32)
        return Step(
            self.runner.batch_table(),
            np.array([host_lens[r] for r in order], np.int32),
            lengths + queries - 1,
            queries,
            [np.array(r.chain) for r in order],
        )

    def accept(self, step: Step, random: Random) -> None:
        """Accept some drafts of each request. A request that reaches the greatest length leaves."""
        for request, queries in zip(list(self.runner.order()), step.queries.tolist(), strict=True):
            computed = len(request.tokens) - 1
            kept = random.randint(1, queries)
            for _ in range(kept):  # as in greedy decoding, equal texts continue equally
                request.tokens.append(request.chain[-1] % 3)
                self._extend_chain(request)
            self._write(request, computed, computed + kept)
            for t in range(computed + kept, computed + queries):
                self.memory[self._place(request, t)] = GARBAGE
            if len(request.tokens) + self.query_len + self.slack >= self.max_len:
                self.finish(request)

    def _extend_chain(self, request: Request) -> None:
        for t in range(len(request.chain), len(request.tokens)):
            key = (request.chain[t - 1] if t else 0, request.tokens[t])
            request.chain.append(self._numbers.setdefault(key, len(self._numbers) + 1))

    def _write(self, request: Request, start: int, end: int) -> None:
        for t in range(start, end):
            self.memory[self._place(request, t)] = request.chain[t]
        for n in range(start // self.pool_block, end // self.pool_block):
            self.pool.keep(request.blocks[n], request.chain[(n + 1) * self.pool_block - 1])

    def _place(self, request: Request, token: int) -> tuple[int, int]:
        block = request.blocks[token // self.pool_block] * self.runner.blocks_per_id
        within = token % self.pool_block
        return block + within // self.block_size, within % self.block_size
