"""Properties of a plan, computed without the code that makes plans."""

import numpy as np

from tests.support.engine_model import Step
from vllm_prefixshare.core import OPEN_END, Forest
from vllm_prefixshare.planning.plan import DecodePlan

Node = tuple[frozenset[int], int, int]  # batch rows, first and last block


def shared_nodes(step: Step, query_len: int, slack: int, block_size: int) -> set[Node]:
    """The prefix tree by definition: maximal runs of filled blocks that the same two or more rows
    hold. A block counts as filled if no query of this step can write to it.
    """
    held = []
    for ids, length in zip(step.block_table.tolist(), step.host_lens.tolist(), strict=True):
        least = max(length - slack, 1)
        held.append(ids[: max(0, least - query_len) // block_size])

    def below(rows: list[int], depth: int) -> set[Node]:
        found: set[Node] = set()
        children: dict[int, list[int]] = {}
        for row in rows:
            if len(held[row]) > depth:
                children.setdefault(held[row][depth], []).append(row)
        for child in children.values():
            if len(child) < 2:
                continue
            end = depth + 1
            while len({tuple(held[row][: end + 1]) for row in child}) == 1 and all(
                len(held[row]) > end for row in child
            ):
                end += 1
            found.add((frozenset(child), depth, end))
            found |= below(child, end)
        return found

    return below(list(range(len(held))), 0)


def assert_tree(forest: Forest, expected: set[Node], block_size: int, may_drop: bool) -> None:
    """Assert that the forest given to a divider is the expected one; whole trees may be missing if
    sharing them does not pay.
    """
    found = set()
    for v in range(forest.num_nodes):
        rows = forest.request_rows[forest.node_reader_start[v] : forest.node_reader_end[v]].tolist()
        span = int(forest.node_start[v]), int(forest.node_end[v])
        assert span[0] % block_size == span[1] % block_size == 0
        found.add((frozenset(rows), span[0] // block_size, span[1] // block_size))
    assert len(found) == forest.num_nodes
    if may_drop:
        roots = [rows for rows, start, _ in found if start == 0]
        expected = {node for node in expected if any(node[0] <= root for root in roots)}
    assert found == expected, f"the tree has {found}, the block table {expected}"
    depth = dict.fromkeys(range(forest.num_reqs), 0)
    for rows, _, end in expected:
        for row in rows:
            depth[row] = max(depth[row], end)
    assert sorted(forest.request_rows.tolist()) == list(depth)
    for row, start in zip(forest.request_rows.tolist(), forest.private_start.tolist(), strict=True):
        assert start == depth[row] * block_size


def assert_reads_what_was_written(
    plan: DecodePlan,
    step: Step,
    memory: np.ndarray,
    block_size: int,
    window: int | None = None,
) -> int:
    """Assert that each request reads each of its tokens once, and finds there a value that it
    wrote, or that another request with the same text wrote. Blocks that this step writes to belong
    to one request only. With a ``window``, tokens that none of the request's queries sees may be
    read or not, from any block. Returns the tokens read.
    """
    assert plan.num_reqs == len(step.true_lens)
    first = np.zeros_like(step.true_lens)
    if window is not None:
        first = np.maximum(step.true_lens - step.queries + 1 - window, 0)
    reads = [np.zeros(n, np.int64) for n in step.true_lens.tolist()]
    total = 0
    for tile in range(plan.num_tiles):
        rows = plan.tile_req_indices[plan.tile_req_indptr[tile] : plan.tile_req_indptr[tile + 1]]
        for run in range(plan.tile_run_indptr[tile], plan.tile_run_indptr[tile + 1]):
            row, start, end = (
                int(x[run]) for x in (plan.run_row, plan.run_kv_start, plan.run_kv_end)
            )
            if end == OPEN_END:
                end = int(step.true_lens[row])
            readers = rows[plan.run_reader_start[run] : plan.run_reader_end[run]].tolist()
            assert readers, "a run has no reader"
            total += max(0, end - start)
            ids = step.block_table[row, start // block_size : -(-end // block_size)]
            content = memory[ids].ravel()[start % block_size :]
            for reader in readers:
                context = int(step.true_lens[reader] - step.queries[reader])
                assert end <= step.true_lens[reader], "a run passes the end of a request"
                if len(readers) > 1 or reader != row:
                    assert end <= context // block_size * block_size, "a shared block is written"
                known, seen = min(end, context), max(start, int(first[reader]))
                if known > seen:
                    wrong = content[seen - start : known - start] != step.chains[reader][seen:known]
                    assert not wrong.any(), (
                        f"row {reader} reads another's token at {seen + int(wrong.argmax())}"
                    )
                reads[reader][start:end] += 1
    for row, counts in enumerate(reads):
        counts = counts[first[row] :]
        assert (counts == 1).all(), f"row {row} reads its tokens {counts.tolist()} times"
    return total
