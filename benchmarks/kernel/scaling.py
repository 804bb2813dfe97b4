"""Model of the traffic, memory and time of decode attention over sharded KV: Tree Attention,
section 6, with grouped-query attention and requests that share a prefix.

Nothing is measured here; ``benchmarks.kernel.scale`` measures.
"""

import math
from dataclasses import dataclass, replace

from vllm_prefixshare.core import PrefixShareError

LSE_BYTES = 4  # float32


@dataclass(frozen=True, slots=True)
class Link:
    """A link. latency_us: time of a small message. bytes_per_us: rate of a GPU in one direction."""

    latency_us: float
    bytes_per_us: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """GPUs in nodes.

    memory_bytes_per_us, flops_per_us: rates at which one GPU's attention reads KV and multiplies.
    launch_us: fixed time of one layer's attention on one GPU.
    gpus_per_node: GPUs that ``inside`` connects; ``between`` connects nodes.
    """

    memory_bytes_per_us: float
    flops_per_us: float
    launch_us: float
    gpus_per_node: int
    inside: Link
    between: Link

    def nodes(self, gpus: int) -> int:
        """Nodes that ``gpus`` GPUs fill."""
        return -(-gpus // self.gpus_per_node)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer in one decode step of requests that share a prefix.

    num_reqs: requests, a query each. shared, private: KV tokens of the prefix, and of each
    request behind it. item_bytes: size of an element of queries, KV and outputs.

    Raises:
        PrefixShareError: a size below its minimum.
    """

    num_reqs: int
    shared: int
    private: int = 0
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    item_bytes: int = 2

    def __post_init__(self) -> None:
        if min(self.num_reqs, self.num_kv_heads, self.head_dim) < 1 or self.num_qo_heads < 1:
            raise PrefixShareError("requests, heads and head_dim must be at least 1.")
        if min(self.shared, self.private) < 0:
            raise PrefixShareError("numbers of tokens must be at least 0.")

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V, each shared token once: eq. 11 with the batch's tokens for b t p."""
        tokens = self.shared + self.num_reqs * self.private
        return 2 * tokens * self.num_kv_heads * self.head_dim * self.item_bytes

    @property
    def flops(self) -> int:
        """Multiplications and additions: every query with each token it sees, for K and V."""
        tokens = self.num_reqs * (self.shared + self.private)
        return 4 * tokens * self.num_qo_heads * self.head_dim

    @property
    def out_bytes(self) -> int:
        """Bytes of an output, or of the queries: b d of the paper."""
        return self.num_reqs * self.num_qo_heads * self.head_dim * self.item_bytes

    @property
    def lse_bytes(self) -> int:
        """Bytes of a log-sum-exp, or of a maximum: b n_h of the paper, in float32."""
        return self.num_reqs * self.num_qo_heads * LSE_BYTES


def ring_bytes(layer: Layer, gpus: int) -> float:
    """Bytes that one GPU sends in ring attention: its shard, to each of the others in turn
    (eq. 10 also counts the last round, which is not needed).
    """
    return (gpus - 1) * layer.kv_bytes / gpus


def all_reduce_bytes(layer: Layer, gpus: int) -> float:
    """Bytes that one GPU sends in algorithm 3: eq. 14, the numerator in float32 as it is sent."""
    numerator = layer.out_bytes * 4 // layer.item_bytes
    return 2 * (gpus - 1) / gpus * (numerator + 2 * layer.lse_bytes)


def gather_bytes(layer: Layer, gpus: int) -> float:
    """Bytes that one GPU sends with a single collective: output and log-sum-exp."""
    return (gpus - 1) * (layer.out_bytes + layer.lse_bytes)


def ring_peak_bytes(layer: Layer, gpus: int) -> float:
    """Maximum bytes on a GPU in ring attention: eq. 8, two shards, the queries and the output."""
    return 2 * layer.kv_bytes / gpus + 2 * layer.out_bytes


def tree_peak_bytes(layer: Layer, gpus: int) -> float:
    """Maximum bytes on a GPU in tree reduction: eq. 9."""
    return layer.kv_bytes / gpus + 2 * layer.out_bytes + 2 * layer.lse_bytes


def attention_us(layer: Layer, cluster: Cluster, gpus: int = 1) -> float:
    """Microseconds in which a GPU attends to its part of the KV."""
    memory = layer.kv_bytes / gpus / cluster.memory_bytes_per_us
    return cluster.launch_us + max(memory, layer.flops / gpus / cluster.flops_per_us)


def collective_us(layer: Layer, cluster: Cluster, gpus: int) -> float:
    """Microseconds of an all-gather of partial results, inside the nodes, then between them; a
    level costs its latency once for each doubling of what it connects.
    """
    message = layer.out_bytes + layer.lse_bytes
    inside, nodes = min(gpus, cluster.gpus_per_node), cluster.nodes(gpus)
    time = math.ceil(math.log2(inside)) * cluster.inside.latency_us
    time += (inside - 1) * message / cluster.inside.bytes_per_us
    time += math.ceil(math.log2(nodes)) * cluster.between.latency_us
    return time + (nodes - 1) * message / cluster.between.bytes_per_us


def tree_us(layer: Layer, cluster: Cluster, gpus: int) -> float:
    """Microseconds of tree reduction: each GPU attends to its shard, then one collective."""
    if gpus == 1:
        return attention_us(layer, cluster)
    return attention_us(layer, cluster, gpus) + collective_us(layer, cluster, gpus)


def ring_us(layer: Layer, cluster: Cluster, gpus: int) -> float:
    """Microseconds of ring attention: every GPU attends to each shard in turn while the next
    one is sent, on the slowest link of the ring.
    """
    link = cluster.inside if gpus <= cluster.gpus_per_node else cluster.between
    shard = layer.kv_bytes / gpus
    compute = attention_us(layer, cluster, gpus)
    travel = link.latency_us + shard / link.bytes_per_us
    return (gpus - 1) * max(compute, travel) + compute


def replicas_us(layer: Layer, cluster: Cluster, gpus: int) -> float:
    """Microseconds where every GPU holds the whole prefix and an even part of the requests."""
    return attention_us(replace(layer, num_reqs=-(-layer.num_reqs // gpus)), cluster)
