"""Compute seconds of single kernels: matrix products by shape, fused and unfused attention,
memory-bound kernels, host dispatch.

A product is cut into output tiles that go round over the device's compute units in waves; its rate follows from the
part-filled last wave, the ramp along k, and the part of the output's traffic that no other tile hides; memory traffic
bounds it from below (roofline, Williams, Waterman & Patterson 2009). A device brings its peak rates, the share of them
that an endlessly large product reaches at full clock (`matmul_efficiency`), and the share of that rate which power
leaves such a product in training (`sustained_share`; what less dense kernels lose is `throttled_s`). Everything else
here is a constant of the algorithms, the same for all devices. `benchmarks/published/validation/kernels.py` holds them
to the 598 published measurements of kernels.

A device with one compute unit (a CPU thread) has no waves: its products follow the roofline, or its
measured `product_curve`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import exp, log

from ...core.machine.cluster import ClusterSpec
from ...core.program import Product

ELEMENT_BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 2}
"""Bytes of one activation element. With fp8 only the inputs of products are cast; activations are sent and held in 16
bits (Micikevicius et al. 2022, section 4)."""

OPERAND_BYTES = {**ELEMENT_BYTES, "fp8": 1}
"""Bytes of one element that a product reads."""

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.68), (128, 64, 0.53), (64, 128, 0.53))
"""Rows and columns of the output tiles that cuBLAS chooses from, and the rate of each against the largest: smaller
tiles reuse less of what they read. Fitted, the same for both devices, to the 440 plain products that SimuMax measured
on an A100-PCIe and a B200, with the efficiency of each device held to its best published product."""

SPLITS = (1, 2, 4)
"""Pieces of k that may be computed apart when there are too few tiles, each piece adding to the output in fp32."""

TILE_RAMP = 150
"""Columns of k that a tile's start and end cost. Fitted with `TILES`; the rows allow 60 to 180."""

EXPOSED_OUTPUT = 0.5
"""Share of the time to write a tile's output that no other tile's arithmetic hides. Fitted with `TILES`; the rows allow
0.4 to 1.3, as it trades against `TILE_RAMP` and `matmul_efficiency`."""

GROUPED_STREAMS = 4
"""Products of a grouped product that run side by side: the streams of Transformer Engine's grouped
GEMM (cublas_gemm.cu)."""

GROUPED_EXPOSED_OUTPUT = 0.33
"""`EXPOSED_OUTPUT` where products of other streams fill the gaps. Fitted to the 88 grouped products of SimuMax."""

ATTENTION_BLOCK = 128
"""Query rows of one block of a fused attention kernel (Dao 2023, section 3.3)."""

ATTENTION_TAIL = {False: 1.97, True: 0.54}
"""Blocks' time that the compute units wait for the last ones of a causal kernel, whose lengths differ: forward and
backward. Fitted to the 59 attention kernels of SimuMax (A100-PCIe and B200)."""

ATTENTION_RAMP_TOKENS = 300
"""Keys that a block's start, end and half-masked diagonal cost. From FlashAttention-3 (Shah et al. 2024, figures 5 and
6): cuDNN's causal kernels reach 315 TFLOP/s at 512 tokens and 539 at 16,384, on as many tokens in total."""

CAUSAL_SHARE = 0.5
"""Share of the score square that a causal kernel computes."""

UNFUSED_BYTES = {(2, False): 4, (2, True): 6, (4, False): 17, (4, True): 21}
"""Bytes per score that unfused attention moves between its two products, by the bytes of a number, forward and
backward. In 16 bits masked softmax reads and writes (4), backward reads the gradient and its own output and writes (6).
In 32 bits, for which Megatron has no masked softmax in one kernel (megatron/model/fused_softmax.py,
is_kernel_available), the mask is a kernel of its own (9, 9) next to softmax (8, 12)."""

DROPOUT_BYTES = {2: 5, 4: 9}
"""Bytes per score of a dropout, by the bytes of a number: read, write and the mask, forward
stored and backward read."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One attention core on one rank: `batch` sequences, `heads` query heads that share `kv_heads`,
    `queries` x `keys` scores per head.

    With context parallelism `queries` is the rank's share of the sequence and `keys` the whole; zig-zag chunks keep the
    causal half. With a `window` a query sees so many keys, its own the last; 0 is all before it.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    qk_head_dim: int
    v_head_dim: int
    causal: bool = True
    window: int = 0

    @property
    def scores(self) -> int:
        """Entries of all score matrices, masked ones included."""
        return self.batch * self.heads * self.queries * self.keys

    @property
    def seen_share(self) -> float:
        """Share of the score square that a fused kernel computes: all, the causal half, or a window's
        band below the diagonal."""
        if not self.causal:
            return 1.0
        width = min(1.0, self.window / self.keys) if self.window else 1.0
        return width * (2 - width) * CAUSAL_SHARE

    def flops(self, *, backward: bool) -> float:
        """FLOPs that a fused kernel runs on the scores it does not skip: forward scores and values; backward the scores
        again and the gradients of values, scores, queries and keys (Dao et al. 2022, algorithm 4), with values padded
        to the width of keys."""
        widths = 5 * max(self.qk_head_dim, self.v_head_dim) if backward else self.qk_head_dim + self.v_head_dim
        return 2 * self.scores * widths * self.seen_share

    def operand_bytes(self, dtype: str, *, backward: bool) -> float:
        """Bytes of queries, keys, values and output (and their gradients) read or written once."""
        queries = self.batch * self.heads * self.queries * (self.qk_head_dim + self.v_head_dim)
        keys = self.batch * self.kv_heads * self.keys * (self.qk_head_dim + self.v_head_dim)
        return (queries + keys) * ELEMENT_BYTES[dtype] * (2 if backward else 1)


def product_s(cluster: ClusterSpec, dtype: str, product: Product, *, output_bytes: int | None = None) -> float:
    """Seconds of `product.count` matrix products run as one batched kernel, in training.

    `output_bytes` are what each output element moves, where that is not one write in `dtype`: a weight gradient that is
    added to an fp32 buffer reads and writes 4 bytes.
    """
    rate = full_clock_rate(cluster, dtype)
    if cluster.num_compute_units > 1:
        rate *= aligned_share(product.m, product.n, product.k)
    held_s = 0.0 if cluster.product_curve else throttled_s(cluster, dtype, product.flops)
    work_s = _product_work_s(cluster, dtype, product, rate, output_bytes=output_bytes, held_s=held_s)
    return max(work_s, cluster.kernel_floor_s) + cluster.kernel_launch_s


def grouped_product_s(cluster: ClusterSpec, dtype: str, product: Product, *, output_bytes: int | None = None) -> float:
    """Seconds of `product.count` products of one shape, one per local expert, issued together: side by side in a few
    streams, whose tiles fill each other's waves."""
    rate, exposed = full_clock_rate(cluster, dtype), GROUPED_EXPOSED_OUTPUT
    rounds, rest = divmod(product.count, GROUPED_STREAMS)
    work_s = 0.0
    for count, times in ((GROUPED_STREAMS, rounds), (rest, 1 if rest else 0)):
        if times:
            some = Product(product.layer, product.m, product.n, product.k, count)
            work_s += times * _product_work_s(cluster, dtype, some, rate, output_bytes=output_bytes, exposed=exposed)
    work_s /= cluster.grouped_matmul_efficiency
    if not cluster.product_curve:
        work_s += throttled_s(cluster, dtype, product.flops)
    return max(work_s, cluster.kernel_floor_s) + cluster.kernel_launch_s


def product_kernels(product: Product, *, grouped: bool = False) -> int:
    """Kernels that the host dispatches for a product; a grouped one is a product per expert (Transformer
    Engine's multi-stream GEMM)."""
    return product.count if grouped else 1


def full_clock_rate(cluster: ClusterSpec, dtype: str) -> float:
    """FLOP/s that endlessly large products reach while the clock is at its highest."""
    return cluster.peak_flops_per_s[dtype] * cluster.matmul_efficiency_by_dtype.get(dtype, cluster.matmul_efficiency)


def sustained_rate(cluster: ClusterSpec, dtype: str) -> float:
    """FLOP/s that endlessly large products reach in training."""
    return full_clock_rate(cluster, dtype) * clock_share(cluster, dtype)


def clock_share(cluster: ClusterSpec, dtype: str) -> float:
    """Share of the highest clock that power leaves in training in `dtype`."""
    return cluster.sustained_share_by_dtype.get(dtype, cluster.sustained_share)


def throttled_s(cluster: ClusterSpec, dtype: str, flops: float) -> float:
    """Seconds by which power stretches a kernel of so many FLOPs in training. A FLOP costs energy whichever kernel
    runs it, so a kernel that leaves the matrix units idle for part of its time (tails, softmax, part-filled waves)
    is slowed less than one that does not: endlessly large products fall to `sustained_rate`, others lose as many
    seconds per FLOP as these do."""
    return flops * (1 / sustained_rate(cluster, dtype) - 1 / full_clock_rate(cluster, dtype))


def _product_work_s(
    cluster: ClusterSpec,
    dtype: str,
    product: Product,
    rate: float,
    *,
    output_bytes: int | None,
    exposed: float = EXPOSED_OUTPUT,
    held_s: float = 0.0,
) -> float:
    """Seconds of a product without launch, at `rate` FLOP/s of endlessly large ones: the longer of its tiles, with the
    seconds that power adds to them, and its traffic."""
    output_bytes = output_bytes or ELEMENT_BYTES[dtype]
    m, n, k, count = product.m, product.n, product.k, product.count
    num_bytes = count * ((m * k + k * n) * OPERAND_BYTES[dtype] + m * n * output_bytes)
    if cluster.product_curve:
        arithmetic_s = product.flops / curve_rate(cluster.product_curve, product.flops / count)
    elif cluster.num_compute_units == 1:
        arithmetic_s = product.flops / rate
    else:
        bytes_per_s = cluster.device_memory_bytes_per_s * cluster.memory_efficiency
        arithmetic_s = _tiled_s(m, n, k, count, cluster.num_compute_units, rate, exposed * output_bytes / bytes_per_s)
    return max(arithmetic_s + held_s, traffic_s(cluster, num_bytes))


def aligned_shares(single: float, eight: float) -> tuple[float, ...]:
    """Shares of the rate for rows that begin at multiples of 1, 2, 4, ... 64 elements, from those for 1 and
    for 8: straight between."""
    return (
        *(single + (eight - single) * step / 3 for step in range(3)),
        *(eight + (1 - eight) * step / 3 for step in range(4)),
    )


ALIGNED_AT_2_BYTES, ALIGNED_AT_16_BYTES = 0.4, 0.71
"""Share of its rate that a product of 16-bit operands keeps when its rows begin at any element, and at multiples of 8.
NVIDIA's order (Matrix Multiplication Background User's Guide: 16 bytes wanted, 128 bytes on an A100). The first from
the output head of vTrain's single-node rows on one device, 50,257 wide (three heads of the calibration half, 0.37 to
0.44); the second fitted to the calibration half of the BLOOM chronicles (14,400 against 13,824 and 14,336 wide; +- 0.1,
`--refit`). A refit of whole vTrain steps wants 0.33 at 2 bytes: layers are predicted short there."""

ALIGNED_SHARES = aligned_shares(ALIGNED_AT_2_BYTES, ALIGNED_AT_16_BYTES)


def aligned_share(m: int, n: int, k: int) -> float:
    """Share of its rate that a product keeps for the largest power of two that divides all its sizes. (The tokens of
    grouped products are any number, and the rows of no operand: those keep their rate.)"""
    sizes = m | n | k
    return ALIGNED_SHARES[min((sizes & -sizes).bit_length(), len(ALIGNED_SHARES)) - 1]


@lru_cache(maxsize=1 << 16)
def _tiled_s(m: int, n: int, k: int, count: int, num_units: int, rate: float, element_s: float) -> float:
    """Seconds of `count` products on `num_units` compute units of together `rate` FLOP/s, by the
    best tile and split of k.

    `element_s` is the exposed time of one output element at the device's full memory bandwidth.
    """
    best_s = float("inf")
    for rows, columns, share in TILES:
        tiles = count * -(-m // rows) * -(-n // columns)
        for split in SPLITS:
            if split > 1 and tiles > num_units:
                break
            waves = -(-tiles * split // num_units)
            partial = element_s * (2 if split > 1 else 1)
            tile_s = rows * columns * num_units * (2 * (k / split + TILE_RAMP) / (rate * share) + partial)
            best_s = min(best_s, waves * tile_s)
    return best_s


def attention_s(
    cluster: ClusterSpec,
    dtype: str,
    shape: AttentionShape,
    *,
    backward: bool = False,
    fused: bool = True,
    share: float = 1.0,
    dropout: bool = False,
) -> float:
    """Seconds of an attention core, forward or backward. Fused: one kernel that computes the unmasked scores block
    by block, at `share` of the rate of the best at full clock (what power costs it is by the FLOP, `throttled_s`).
    Unfused: two batched products (backward four) with masked softmax, and a dropout if there is one, between them,
    all scores in memory."""
    dtype = "bf16" if dtype == "fp8" else dtype  # fp8 recipes keep attention in 16 bits
    if not fused:
        return _unfused_attention_s(cluster, dtype, shape, backward=backward, dropout=dropout)
    rate = share * cluster.peak_flops_per_s[dtype] * _attention_efficiency(cluster, shape, backward=backward)
    flops = shape.flops(backward=backward)
    work_s = max(
        flops / rate + throttled_s(cluster, dtype, flops),
        traffic_s(cluster, shape.operand_bytes(dtype, backward=backward)),
    )
    num_kernels = attention_kernels(backward=backward, fused=True)
    return max(work_s, num_kernels * cluster.kernel_floor_s) + num_kernels * cluster.kernel_launch_s


def _attention_efficiency(cluster: ClusterSpec, shape: AttentionShape, *, backward: bool) -> float:
    """Share of the peak that a fused kernel reaches: the device's, at head dim 128 on endlessly many long sequences,
    less for narrower heads (as many exponentials for fewer products), for short sequences or windows, and for few
    blocks on many compute units."""
    efficiency = cluster.attention_backward_efficiency if backward else cluster.attention_forward_efficiency
    if cluster.num_compute_units == 1:
        return efficiency
    half, width = cluster.attention_half_head_dim, max(shape.qk_head_dim, shape.v_head_dim)
    narrow = min(1.0, width * (128 + half) / (128 * (width + half)))
    blocks = shape.batch * shape.heads * shape.queries / ATTENTION_BLOCK
    tail = 1 + ATTENTION_TAIL[backward] * cluster.num_compute_units / blocks
    # of a causal square with as many scores a query
    keys = shape.keys * (shape.seen_share / CAUSAL_SHARE if shape.window else 1.0)
    return efficiency * narrow / (tail * (1 + ATTENTION_RAMP_TOKENS / keys))


def _unfused_attention_s(
    cluster: ClusterSpec, dtype: str, shape: AttentionShape, *, backward: bool, dropout: bool
) -> float:
    """Two products forward, four backward, with softmax and perhaps dropout; Megatron-LM's kernels mask inside
    the softmax, write all."""
    count = shape.batch * shape.heads
    scores = product_s(cluster, dtype, Product("", shape.queries, shape.keys, shape.qk_head_dim, count))
    values = product_s(cluster, dtype, Product("", shape.queries, shape.v_head_dim, shape.keys, count))
    width = ELEMENT_BYTES[dtype]
    score_bytes = UNFUSED_BYTES[width, backward] + (DROPOUT_BYTES[width] if dropout else 0)
    return (scores + values) * (2 if backward else 1) + elementwise_s(cluster, shape.scores * score_bytes, 2)


def attention_kernels(*, backward: bool, fused: bool) -> int:
    """Kernels of an attention core: a fused backward has one before (row sums of output times gradient) and one after
    (the cast of the query gradient); an unfused core has its products, softmax and dropout."""
    if fused:
        return 3 if backward else 1
    return 6 if backward else 4


def elementwise_s(cluster: ClusterSpec, num_bytes: float, num_kernels: int) -> float:
    """Seconds of memory-bound kernels that move `num_bytes` together."""
    if cluster.memory_curve and num_kernels:
        moved_s = num_bytes / curve_rate(cluster.memory_curve, num_bytes / num_kernels)
    else:
        moved_s = traffic_s(cluster, num_bytes)
    return max(moved_s, num_kernels * cluster.kernel_floor_s) + num_kernels * cluster.kernel_launch_s


def traffic_s(cluster: ClusterSpec, num_bytes: float) -> float:
    """Seconds to move bytes between the device and its memory, in one large transfer."""
    return num_bytes / (cluster.device_memory_bytes_per_s * cluster.memory_efficiency)


def host_s(cluster: ClusterSpec, num_kernels: float) -> float:
    """Seconds that the host needs to dispatch kernels: an action takes the longer of its kernels and this,
    unless a graph replays it."""
    return num_kernels * cluster.host_dispatch_s


def slowed_s(cluster: ClusterSpec, compute_s: float, communication_s: float, *, share: float | None = None) -> float:
    """Seconds of compute while a collective overlaps with it for `communication_s`: until that ends, compute keeps a
    share of its rate, the cluster's `overlap_compute_share` unless another is given."""
    share = cluster.overlap_compute_share if share is None else share
    return compute_s / share if compute_s <= communication_s * share else compute_s + communication_s * (1 - share)


def curve_rate(curve: Mapping[str, float], size: float) -> float:
    """Rate at a size by a measured curve (size -> rate), straight between its points on logarithmic scales,
    constant beyond them."""
    points = _points(tuple(curve.items()))
    if size <= points[0][0]:
        return points[0][1]
    for (low, low_rate), (high, high_rate) in pairwise(points):
        if size <= high:
            weight = log(size / low) / log(high / low)
            return exp(log(low_rate) * (1 - weight) + log(high_rate) * weight)
    return points[-1][1]


@lru_cache(maxsize=64)
def _points(items: tuple[tuple[str, float], ...]) -> tuple[tuple[float, float], ...]:
    return tuple(sorted((float(size), rate) for size, rate in items))
