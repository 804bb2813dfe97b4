"""Which requests wait for the load of another one; engines are in ``test_connectors.py``."""

from types import SimpleNamespace

import pytest
from vllm.v1.request import RequestStatus

from vllm_prefixshare.vllm_plugin.scheduling.external_prefixes import hold_followers

BLOCK = 16


def request(name: str, hashes: str) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=name,
        block_hashes=list(hashes),
        status=RequestStatus.WAITING,
        num_computed_tokens=0,
    )


@pytest.fixture
def connector() -> SimpleNamespace:
    """Holds all blocks of every prompt, and loads while other requests run."""
    found = SimpleNamespace(
        get_num_new_matched_tokens=lambda r, n: (len(r.block_hashes) * BLOCK - n, True)
    )
    hold_followers(found, BLOCK)
    return found


def start(connector: SimpleNamespace, first: SimpleNamespace) -> None:
    """Let the first request load."""
    tokens, is_async = connector.get_num_new_matched_tokens(first, 0)
    assert (tokens, is_async) == (len(first.block_hashes) * BLOCK, True)
    first.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    first.num_computed_tokens = tokens


@pytest.mark.parametrize(
    ("hashes", "computed", "waits"),
    [
        ("abcdef", 0, True),
        ("abcxyz", 0, True),  # half of it
        ("abwxyz", 0, False),
        ("uvwxyz", 0, False),
        ("abcdxy", 3 * BLOCK, False),  # a block of three
    ],
)
def test_a_request_waits_for_at_least_half_of_what_it_would_load(
    connector, hashes, computed, waits
):
    first, other = request("1", "abcdef"), request("2", hashes)
    start(connector, first)
    expected = (None, False) if waits else (6 * BLOCK - computed, True)
    assert connector.get_num_new_matched_tokens(other, computed) == expected


def test_no_request_waits_for_a_load_that_has_ended(connector):
    first, other = request("1", "abcdef"), request("2", "abcdef")
    start(connector, first)
    first.status = RequestStatus.FINISHED_ABORTED
    assert connector.get_num_new_matched_tokens(other, 0) == (6 * BLOCK, True)
