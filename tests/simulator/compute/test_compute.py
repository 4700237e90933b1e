"""Kernel seconds: tiles and waves by hand, published kernels, roofline bounds, and what may never get worse."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.program import Product
from shardproof.simulator.compute.compute import (
    TILE_RAMP,
    TILES,
    AttentionShape,
    aligned_share,
    attention_kernels,
    attention_s,
    curve_rate,
    elementwise_s,
    full_clock_rate,
    grouped_product_s,
    host_s,
    product_kernels,
    product_s,
    slowed_s,
    sustained_rate,
    throttled_s,
    traffic_s,
)

A100, H100, B200 = (cluster_preset(name, 8) for name in ("dgx-a100-80g", "dgx-h100", "dgx-b200"))
HOST = cluster_preset("this-host", 1)


def full_clock(cluster):
    return replace(cluster, sustained_share=1.0, sustained_share_by_dtype={})


def bare(cluster):
    """Without launches, floors and output traffic: tiles and waves only."""
    return replace(
        full_clock(cluster),
        kernel_launch_s=0.0,
        kernel_floor_s=0.0,
        device_memory_bytes_per_s=1e30,
        matmul_efficiency=1.0,
    )


def core(heads, tokens, head_dim=128, *, causal=True, batch=1):
    return AttentionShape(batch, heads, heads, tokens, tokens, head_dim, head_dim, causal)


def test_132_large_tiles_take_one_wave_of_an_h100_and_133_take_two():
    """One tile of 128 x 256 x 4096 on one of 132 processors, and its ramp."""
    tile_s = 2 * 128 * 256 * (4096 + TILE_RAMP) / (989.4e12 / 132)
    one = product_s(bare(H100), "bf16", Product("", 128, 132 * 256, 4096))
    assert one == pytest.approx(tile_s)
    assert product_s(bare(H100), "bf16", Product("", 128, 133 * 256, 4096)) == pytest.approx(2 * tile_s)


def test_waves_of_a_product_agree_with_a_search_written_out():
    """The oracle hands out tiles one by one to the processor that is free first."""
    product = Product("", 960, 3008, 2048, count=3)
    best = float("inf")
    for rows, columns, share in TILES:
        free = [0.0] * 108
        tile_s = 2 * rows * columns * (2048 + TILE_RAMP) / (312e12 / 108 * share)
        for _ in range(3 * -(-960 // rows) * -(-3008 // columns)):
            first = free.index(min(free))
            free[first] += tile_s
        best = min(best, max(free))
    assert product_s(bare(A100), "bf16", product) == pytest.approx(best)


@pytest.mark.parametrize(
    ("width", "share"),
    [(14336, 1.0), (14400, 1.0), (14400 // 8, 0.71), (50257, 0.4), (144, 0.807), (96, 0.903), (108, 0.607)],
)
def test_rows_that_begin_off_128_bytes_cost_products_their_rate(width, share):
    """64 elements of 16 bits are 128 bytes: 1800 is a multiple of 8 elements only, 50,257 of one."""
    assert aligned_share(4096, 1024, width) == pytest.approx(share, abs=1e-3)
    at_rate, odd = (
        product_s(bare(A100), "bf16", Product("", 16384, 16384, k)) / (k + TILE_RAMP) for k in (16384, width)
    )
    assert odd / at_rate == pytest.approx(1 / share, rel=0.01)


def test_a_product_of_few_tiles_splits_its_sum():
    """256 x 128 outputs are four tiles of 128 x 64, of which four pieces of k each keep 16 of 108 processors busy."""
    tile_s = 2 * 128 * 64 * (16384 / 4 + TILE_RAMP) / (312e12 / 108 * 0.53)
    assert product_s(bare(A100), "bf16", Product("", 256, 128, 16384)) == pytest.approx(tile_s)


def test_a_product_on_slow_memory_is_bound_by_its_traffic():
    """16 rows of 8,192 x 8,192 weights at 85% of 0.5 TB/s."""
    seconds = product_s(replace(A100, device_memory_bytes_per_s=0.5e12), "bf16", Product("", 16, 8192, 8192))
    assert seconds == pytest.approx((8192 * 8192 + 2 * 16 * 8192) * 2 / (0.5e12 * 0.85) + 2e-6, rel=1e-6)


@pytest.mark.parametrize(
    ("cluster", "dtype", "shape", "flops_per_s"),
    [
        (A100, "bf16", (1024, 10240, 5120), 271.2e12),
        (H100, "bf16", (2048, 2048, 13312), 794.5e12),
        (B200, "bf16", (1792, 16128, 3072), 1745e12),
    ],
)
def test_the_best_published_products_are_met_within_1_percent_at_full_clock(cluster, dtype, shape, flops_per_s):
    """stas00/ml-engineering, maximum achievable matmul FLOPS. The efficiencies come from these rows, so
    this holds them in place."""
    product = Product("", *shape)
    assert product.flops / product_s(full_clock(cluster), dtype, product) == pytest.approx(flops_per_s, rel=0.01)


def test_random_numbers_slow_an_a100_to_257_tflops():
    """thonking.ai: 8192 cubed, 257 TFLOP/s with random and 288 to 295 with constant numbers;
    257 is what power leaves."""
    product = Product("", 8192, 8192, 8192)
    assert sustained_rate(A100, "bf16") == pytest.approx(257e12, rel=0.01)
    assert product.flops / product_s(full_clock(A100), "bf16", product) == pytest.approx(288e12, rel=0.06)


def test_fp8_products_are_faster_than_bf16_by_their_peak_and_share():
    product = Product("", 8192, 8192, 8192)
    ratio = product_s(H100, "bf16", product) / product_s(H100, "fp8", product)
    assert 1.7 < ratio < 2.0
    assert full_clock_rate(H100, "fp8") == pytest.approx(1978.9e12 * 0.815)
    assert sustained_rate(H100, "fp8") == pytest.approx(1978.9e12 * 0.815 * 0.778)


def test_adding_to_an_fp32_buffer_costs_time_and_never_saves_any():
    weight = Product("", 8192, 8192, 4096)
    assert 1.0 < product_s(A100, "bf16", weight, output_bytes=8) / product_s(A100, "bf16", weight) < 1.1


def test_a_grouped_product_of_one_expert_is_a_plain_product_over_its_efficiency():
    product = Product("", 4096, 4096, 4096, count=1)
    plain = product_s(bare(H100), "bf16", product)
    assert grouped_product_s(bare(H100), "bf16", product) == pytest.approx(plain / H100.grouped_matmul_efficiency)


def test_experts_with_few_tokens_are_slower_than_one_product_of_all_tokens():
    together = product_s(H100, "bf16", Product("", 32 * 128, 4096, 7168))
    assert grouped_product_s(H100, "bf16", Product("", 128, 4096, 7168, count=32)) > 2 * together
    assert product_kernels(Product("", 128, 4096, 7168, count=32), grouped=True) == 32
    assert product_kernels(Product("", 128, 4096, 7168, count=32)) == 1


def test_attention_flops_are_two_products_forward_and_five_backward_over_half_the_square():
    shape = core(16, 4096)
    assert shape.flops(backward=False) == 4 * 16 * 4096**2 * 128 / 2
    assert shape.flops(backward=True) == 5 * 2 * 16 * 4096**2 * 128 / 2
    assert core(16, 4096, causal=False).flops(backward=False) == 4 * 16 * 4096**2 * 128


def test_latent_attention_pads_its_values_backward_only():
    shape = AttentionShape(1, 1, 1, 2, 2, qk_head_dim=192, v_head_dim=128)
    assert shape.flops(backward=False) == 2 * 4 * (192 + 128) / 2
    assert shape.flops(backward=True) == 2 * 4 * 5 * 192 / 2


def test_context_parallel_halves_of_an_attention_core_are_half_of_its_work():
    whole, half = AttentionShape(1, 8, 8, 8192, 8192, 128, 128), AttentionShape(1, 8, 8, 4096, 8192, 128, 128)
    assert half.flops(backward=False) == whole.flops(backward=False) / 2


@pytest.mark.parametrize(
    ("tokens", "tflops"), [(512, 315), (1024, 410), (2048, 484), (4096, 518), (8192, 529), (16384, 539)]
)
def test_causal_attention_of_an_h100_follows_cudnn_within_12_percent(tokens, tflops):
    """FlashAttention-3, figure 5: head dim 128, causal, 16,384 tokens in all, 16 heads."""
    shape = core(16, tokens, batch=16384 // tokens)
    reached = shape.flops(backward=False) / attention_s(full_clock(H100), "bf16", shape)
    assert reached == pytest.approx(tflops * 1e12, rel=0.12)


@pytest.mark.parametrize(("tokens", "tflops"), [(1024, 288), (2048, 334), (4096, 363), (8192, 379), (16384, 388)])
def test_narrow_heads_of_an_h100_follow_cudnn_within_15_percent(tokens, tflops):
    """FlashAttention-3, figure 5: head dim 64, causal, 16,384 tokens in all, 32 heads."""
    shape = core(32, tokens, head_dim=64, batch=16384 // tokens)
    reached = shape.flops(backward=False) / attention_s(full_clock(H100), "bf16", shape)
    assert reached == pytest.approx(tflops * 1e12, rel=0.15)


def test_few_heads_leave_most_of_an_a100_waiting_for_the_last_blocks():
    """SimuMax, A100-PCIe: 4 heads of 4,096 tokens reach 80 TFLOP/s, 64 heads 185."""
    few, many = core(4, 4096), core(64, 4096)
    rates = [shape.flops(backward=False) / attention_s(full_clock(A100), "bf16", shape) / 1e12 for shape in (few, many)]
    assert rates == pytest.approx([80, 185], rel=0.08)


@pytest.mark.parametrize(("dropout", "forward_bytes", "backward_bytes"), [(True, 9, 11), (False, 4, 6)])
def test_unfused_attention_moves_every_score_through_softmax_and_dropout(dropout, forward_bytes, backward_bytes):
    shape, quiet = core(12, 2048), replace(A100, kernel_launch_s=0.0, kernel_floor_s=0.0)
    scores = 12 * 2048**2
    products = [product_s(quiet, "bf16", Product("", 2048, n, k, 12)) for n, k in ((2048, 128), (128, 2048))]
    forward = attention_s(quiet, "bf16", shape, fused=False, dropout=dropout)
    assert forward == pytest.approx(sum(products) + traffic_s(A100, forward_bytes * scores))
    backward = attention_s(quiet, "bf16", shape, backward=True, fused=False, dropout=dropout)
    assert backward == pytest.approx(2 * sum(products) + traffic_s(A100, backward_bytes * scores))


def test_fusing_attention_always_pays_on_long_sequences():
    for cluster in (A100, H100, B200):
        for backward in (False, True):
            shape = core(16, 8192)
            fused = attention_s(cluster, "bf16", shape, backward=backward)
            assert fused < attention_s(cluster, "bf16", shape, backward=backward, fused=False)


def test_attention_stays_in_16_bits_with_fp8():
    assert attention_s(H100, "fp8", core(16, 4096)) == attention_s(H100, "bf16", core(16, 4096))


def test_attention_kernels_are_one_and_three_fused_four_and_six_unfused():
    assert [
        attention_kernels(backward=backward, fused=fused) for fused in (True, False) for backward in (False, True)
    ] == [1, 3, 4, 6]


def test_a_memory_bound_kernel_takes_its_traffic_or_its_floor_and_a_launch():
    assert elementwise_s(H100, 3.35e9, 1) == pytest.approx(1e-3 / 0.85 + 2e-6)
    assert elementwise_s(H100, 1000, 5) == pytest.approx(5 * (2e-6 + 2e-6))


def test_the_host_needs_its_time_for_every_kernel():
    assert host_s(A100, 100) == pytest.approx(100 * A100.host_dispatch_s)


def test_compute_slows_down_only_while_a_collective_runs():
    """At 80% of its rate for 10 s it does the work of 8 s, and the other 2 s at full rate."""
    cluster = replace(A100, overlap_compute_share=0.8)
    assert slowed_s(cluster, 10.0, 10.0) == pytest.approx(12.0)
    assert slowed_s(cluster, 4.0, 10.0) == pytest.approx(5.0)
    assert slowed_s(cluster, 10.0, 0.0) == 10.0
    assert slowed_s(replace(A100, overlap_compute_share=1.0), 10.0, 5.0) == 10.0


def test_a_curve_is_straight_on_logarithmic_scales_and_constant_beyond_its_ends():
    curve = {"1e6": 1e9, "1e8": 4e9}
    assert [curve_rate(curve, size) for size in (1, 1e6, 1e7, 1e8, 1e12)] == pytest.approx([1e9, 1e9, 2e9, 4e9, 4e9])


def test_a_thread_follows_its_measured_product_curve_and_has_no_tiles():
    product = Product("", 100, 100, 100, count=2)
    assert product_s(HOST, "fp32", product) > product.flops / (HOST.peak_flops_per_s["fp32"] * HOST.matmul_efficiency)
    measured = replace(HOST, product_curve={"2e6": 5e9}, memory_curve={"1e3": 1e9})
    assert product_s(measured, "fp32", product) == pytest.approx(2 * 2e6 / 5e9 + HOST.kernel_launch_s)
    assert elementwise_s(measured, 1e6, 1) == pytest.approx(1e-3 + HOST.kernel_launch_s)


sizes = st.integers(1, 20000)
devices = st.sampled_from([A100, H100, B200, HOST])
dtypes = st.sampled_from(["bf16", "fp16", "fp32"])


@given(devices, dtypes, sizes, sizes, sizes, st.integers(1, 300))
def test_no_product_beats_its_arithmetic_or_its_traffic(cluster, dtype, m, n, k, count):
    product = Product("", m, n, k, count)
    seconds = product_s(cluster, dtype, product)
    least_bytes = count * (m * k + k * n + m * n) * (4 if dtype == "fp32" else 2)
    assert seconds >= product.flops / cluster.peak_flops_per_s[dtype]
    assert seconds >= least_bytes / cluster.device_memory_bytes_per_s


@given(
    devices, sizes, sizes, sizes, st.integers(1, 64), st.sampled_from(["m", "n", "k", "count"]), st.integers(1, 3000)
)
def test_a_larger_product_of_whole_lines_is_never_faster(cluster, m, n, k, count, name, more):
    """In sizes of 64: a product whose rows begin anywhere can be slower than a padded one."""
    product = Product("", 64 * m, 64 * n, 64 * k, count)
    larger = replace(product, **{name: getattr(product, name) + (more if name == "count" else 64 * more)})
    assert product_s(cluster, "bf16", product) <= product_s(cluster, "bf16", larger) * (1 + 1e-12)


BETTER = (
    "device_memory_bytes_per_s",
    "matmul_efficiency",
    "sustained_share",
    "attention_forward_efficiency",
    "memory_efficiency",
)


@given(
    st.sampled_from([A100, H100, B200]), st.sampled_from(BETTER), st.floats(0.1, 1.0), sizes, sizes, st.integers(1, 64)
)
def test_a_better_device_is_never_slower(cluster, name, share, m, n, heads):
    worse = replace(cluster, **{name: getattr(cluster, name) * share})
    product, shape = Product("", m, n, 1024), core(heads, m)
    assert product_s(cluster, "bf16", product) <= product_s(worse, "bf16", product) * (1 + 1e-12)
    assert attention_s(cluster, "bf16", shape) <= attention_s(worse, "bf16", shape) * (1 + 1e-12)
    assert elementwise_s(cluster, m * n, 2) <= elementwise_s(worse, m * n, 2) * (1 + 1e-12)


@given(
    devices,
    st.integers(1, 4),
    st.integers(1, 64),
    st.integers(1, 16384),
    st.sampled_from([64, 96, 128, 192, 256]),
    st.booleans(),
)
def test_no_attention_core_beats_its_arithmetic(cluster, batch, heads, tokens, head_dim, backward):
    shape = core(heads, tokens, head_dim, batch=batch)
    assert (
        attention_s(cluster, "bf16", shape, backward=backward)
        >= shape.flops(backward=backward) / cluster.peak_flops_per_s["bf16"]
    )


def test_a_window_leaves_its_band_of_the_causal_half():
    whole, band = (AttentionShape(1, 8, 8, 8192, 8192, 128, 128, window=window) for window in (0, 1024))
    seen = sum(min(query + 1, 1024) for query in range(8192)) / sum(query + 1 for query in range(8192))
    assert band.flops(backward=False) / whole.flops(backward=False) == pytest.approx(seen, rel=1e-3)
    assert band.seen_share < whole.seen_share == replace(whole, window=8192).seen_share == 0.5


@given(st.integers(6, 12), st.integers(6, 12))
def test_a_wider_window_is_never_faster(one, other):
    narrow, wide = sorted((2**one, 2**other))
    seconds = [
        attention_s(H100, "bf16", AttentionShape(2, 8, 8, 4096, 4096, 128, 128, window=window))
        for window in (narrow, wide)
    ]
    assert seconds[0] <= seconds[1] * (1 + 1e-12)


def test_unfused_scores_in_fp32_cost_more_than_twice_those_in_16_bits():
    # No kernel of Megatron's masks and normalises fp32 scores at once: 26 bytes a score instead of twice 9; products
    # move twice as much. Without a dropout it is 17 instead of twice 4.
    endless = dict.fromkeys(("fp16", "fp32"), 1e30)
    cluster = replace(bare(H100), peak_flops_per_s=endless, device_memory_bytes_per_s=3e12)
    shape = AttentionShape(8, 4, 4, 2048, 2048, 64, 64)
    scores_s = shape.scores / (cluster.memory_efficiency * 3e12)
    for dropout, more in ((True, 26 - 2 * 9), (False, 17 - 2 * 4)):
        half, full = (attention_s(cluster, dtype, shape, fused=False, dropout=dropout) for dtype in ("fp16", "fp32"))
        assert full - 2 * half == pytest.approx(more * scores_s, rel=0.01)


@pytest.mark.parametrize("backward", [False, True])
def test_a_slower_attention_kernel_loses_no_more_to_power(backward):
    shape = core(16, 8192)
    losses = []
    for share in (1.0, 0.5):
        hot, cold = (
            attention_s(cluster, "bf16", shape, backward=backward, share=share) for cluster in (H100, full_clock(H100))
        )
        losses.append(hot - cold)
    assert (
        losses[0]
        == pytest.approx(losses[1])
        == pytest.approx(throttled_s(H100, "bf16", shape.flops(backward=backward)))
    )
