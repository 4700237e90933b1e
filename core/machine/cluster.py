"""`ClusterSpec`: devices, nodes and links as numbers with sources."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any, Literal

from ..base.bounds import DEVICES, RATE, SECONDS, SHARE, Bound
from ..base.errors import ClusterError
from ..base.option import Bounded, FieldProblem, noun, option
from ..base.units import SIZE_RULE, size_of

MEASURED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "message", "message_work")
"""Operations that `collective_curve` may hold: collectives by the bytes of the whole tensor, and messages;
`message_work` is what a send and a receive cost the work of a rank that has one core."""
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")


@noun(kw_only=True)
class ClusterSpec(Bounded, section="cluster", problem_type=ClusterError):
    """`num_devices` devices in nodes of `devices_per_node`. Rates are per second and one direction, sizes in bytes.

    Efficiencies are shares of a peak that large kernels or transfers reach; `..._by_dtype` override a share for single
    dtypes. Curves are measured rates by size. `simulator.compute.compute` says what the numbers of a device mean. What
    a step costs on a host is in `busy_core_share` of a core's rate when all compute, in what ranks wait for the slower
    one (`rank_skew_root_s` times the root of the seconds they worked), and in `step_over_kernels`.

    Raises `ClusterError` with every rule that is broken.
    """

    name: str = option("what reports call the cluster", default_note="custom", read_by="simulator.step.step")
    num_devices: int = option(
        "devices of the run", minimum=1, bound=DEVICES, default_note="tp*cp*dp*pp", read_by="simulator.network.topology"
    )
    devices_per_node: int = option(
        "devices behind one node's links", minimum=1, bound=DEVICES, read_by="simulator.network.topology"
    )
    device_memory_bytes: float = option(
        "memory of one device, as its runtime reports it",
        above=0,
        more="`cudaMemGetInfo` gives it as the total.",
        read_by="simulator.memory.capacity",
    )
    headroom: str = option(
        "memory that stays free on every device",
        default="0",
        kind="size",
        more='It is a share such as "8%", or bytes such as "4GiB".',
        read_by="core.machine.cluster",
    )
    device_price_per_hour: float = option(
        "what a device costs for an hour, in any currency",
        default=0.0,
        minimum=0,
        bound=RATE,
        default_note="not known",
        read_by="simulator.search.question",
    )
    device_watts: float = option(
        "power of a device in training, its share of the node's included",
        default=0.0,
        minimum=0,
        bound=RATE,
        default_note="not known",
        read_by="simulator.search.question",
    )
    device_memory_bytes_per_s: float = option(
        "memory bandwidth of one device", above=0, read_by="simulator.compute.compute"
    )
    peak_flops_per_s: Mapping[str, float] = option(
        "dense peak per dtype: fp32 tf32 bf16 fp16 fp8", hash=False, read_by="simulator.compute.compute"
    )
    matmul_efficiency: float = option(
        "share of the peak that large products reach", above=0, maximum=1, read_by="simulator.compute.compute"
    )
    matmul_efficiency_by_dtype: Mapping[str, float] = option(
        "the same for single dtypes, where it differs",
        default_factory=dict,
        hash=False,
        bound=SHARE,
        read_by="simulator.compute.compute",
    )
    grouped_matmul_efficiency: float = option(
        "rate of grouped products as a share of plain ones",
        default=1.0,
        above=0,
        maximum=1,
        read_by="simulator.compute.compute",
    )
    attention_forward_efficiency: float = option(
        "share of the peak that fused attention reaches, forward",
        default=0.6,
        above=0,
        maximum=1,
        read_by="simulator.compute.compute",
    )
    attention_backward_efficiency: float = option(
        "share of the peak that fused attention reaches, backward",
        default=0.5,
        above=0,
        maximum=1,
        read_by="simulator.compute.compute",
    )
    memory_efficiency: float = option(
        "share of the memory bandwidth that large transfers reach",
        above=0,
        maximum=1,
        read_by="simulator.compute.compute",
    )
    kernel_launch_s: float = option(
        "launch and tail of one kernel, on top of its work", minimum=0, read_by="simulator.compute.compute"
    )
    kernel_floor_s: float = option(
        "least time of the work of one kernel", default=0.0, minimum=0, read_by="simulator.compute.compute"
    )
    host_dispatch_s: float = option(
        "time the host needs to dispatch one kernel", default=0.0, minimum=0, read_by="simulator.compute.compute"
    )
    num_compute_units: int = option(
        "processors of one device that share a product's tiles",
        default=1,
        minimum=1,
        bound=DEVICES,
        read_by="simulator.compute.compute",
    )
    sustained_share_by_dtype: Mapping[str, float] = option(
        "the same for single dtypes, where it differs",
        default_factory=dict,
        hash=False,
        bound=SHARE,
        read_by="simulator.compute.compute",
    )
    sustained_share: float = option(
        "share of the product rate that power and clocks leave under training load",
        default=1.0,
        above=0,
        maximum=1,
        read_by="simulator.compute.compute",
    )
    attention_half_head_dim: float = option(
        "head width at which fused attention reaches half the rate of endlessly wide heads",
        default=20.0,
        minimum=0,
        bound=DEVICES,
        read_by="simulator.compute.compute",
    )
    product_curve: Mapping[str, float] = option(
        "measured FLOP/s by FLOPs of one product, for devices without tiles",
        default_factory=dict,
        hash=False,
        bound=RATE,
        read_by="simulator.compute.compute",
    )
    memory_curve: Mapping[str, float] = option(
        "measured bytes/s by bytes of one transfer",
        default_factory=dict,
        hash=False,
        bound=RATE,
        read_by="simulator.compute.compute",
    )
    kernel_curve: Mapping[str, float] = option(
        "measured seconds of kernel-sizes, as calibrate writes them",
        default_factory=dict,
        hash=False,
        bound=SECONDS,
        read_by="simulator.compute.host_kernels",
    )
    step_over_kernels: float = option(
        "seconds of a training step over those of its kernels measured one by one",
        default=1.0,
        above=0,
        bound=Bound(1e3, "kernels measured one by one take about as long as in a step", least=1e-3),
        read_by="simulator.cost.host_blocks",
    )
    busy_core_share: float = option(
        "share of its rate that a core keeps while all compute",
        default=1.0,
        above=0,
        maximum=1,
        read_by="simulator.cost.host_blocks",
    )
    rank_skew_root_s: float = option(
        "seconds that ranks wait for the slower one when they meet, over the root of the seconds they worked since",
        default=0.0,
        minimum=0,
        bound=Bound(1e3, "a second's work would wait for a quarter of an hour", least=1e-9),
        read_by="simulator.cost.host_cores",
    )
    num_cores: int = option(
        "cores that devices share for computing; 0 is one each",
        default=0,
        minimum=0,
        bound=DEVICES,
        more="As many devices compute at once.",
        read_by="simulator.cost.host_cores",
    )
    flash_attention_2_share: float = option(
        "rate of FlashAttention-2 as a share of the best fused kernel",
        default=1.0,
        above=0,
        maximum=1,
        read_by="simulator.stack.profile",
    )
    overlap_compute_share: float = option(
        "share of its rate that compute keeps while a collective runs",
        default=1.0,
        above=0,
        maximum=1,
        read_by="simulator.compute.compute",
    )
    host_link_bytes_per_s: float = option(
        "copies between a device and memory of its host, one direction",
        default=25e9,
        above=0,
        more="It is what large copies of page-locked memory reach, the slower direction where they differ.",
        read_by="simulator.cost.host_link",
    )
    node_link_bytes_per_s: float = option(
        "links inside a node, per device and direction", above=0, read_by="simulator.network.topology"
    )
    node_link_latency_s: float = option("latency inside a node", minimum=0, read_by="simulator.network.network")
    node_network_bytes_per_s: float = option(
        "injection bandwidth of one node, one direction", above=0, read_by="simulator.network.topology"
    )
    network_latency_s: float = option("latency between nodes", minimum=0, read_by="simulator.network.network")
    link_efficiency: float = option(
        "share of a link's bandwidth that large messages reach",
        above=0,
        maximum=1,
        read_by="simulator.network.topology",
    )
    network_efficiency: float = option(
        "share of the injection bandwidth that large messages reach",
        default=0.92,
        above=0,
        maximum=1,
        read_by="simulator.network.topology",
    )
    nics_per_node: int = option(
        "network cards of a node; 0 is one per device",
        default=0,
        minimum=0,
        bound=DEVICES,
        read_by="simulator.network.topology",
    )
    nodes_per_leaf: int = option(
        "nodes behind the same leaf switches; 0 is all",
        default=0,
        minimum=0,
        bound=DEVICES,
        read_by="simulator.network.topology",
    )
    rails: bool = option(
        "card i of every node leads to leaf switch i", default=False, read_by="simulator.network.topology"
    )
    oversubscription: float = option(
        "what enters a leaf switch over what leaves it",
        default=1.0,
        minimum=1,
        bound=DEVICES,
        read_by="simulator.network.network",
    )
    leaf_latency_s: float = option(
        "what crossing leaf switches adds to the latency", default=0.0, minimum=0, read_by="simulator.network.network"
    )
    collective_library: Literal["nccl", "gloo", "shm"] = option(
        "who moves the bytes: NCCL between GPUs, gloo between processes, or memory that the ranks of a host share",
        default="nccl",
        more="`train` on CPUs takes `shm` unless this says `gloo`; between hosts it is gloo in both.",
        read_by="simulator.network.network",
    )
    collective_launch_s: float = option(
        "launch and tail of the smallest collective", default=6.6e-6, minimum=0, read_by="simulator.network.network"
    )
    collective_ramp_bytes: float = option(
        "bytes a device must have under way in a long collective",
        default=15e6,
        minimum=0,
        read_by="simulator.network.nccl",
    )
    ll128_ramp_share: float = option(
        "share of the ramp that LL128 pays", default=0.0, minimum=0, maximum=1, read_by="simulator.network.nccl"
    )
    channel_bytes_per_s: float = option(
        "rate of one channel of a message; 0 is no limit", default=0.0, minimum=0, read_by="simulator.network.nccl"
    )
    nvls_efficiency: float = option(
        "share of the link's rate of sums in the node's switch",
        default=0.0,
        minimum=0,
        maximum=1,
        read_by="simulator.network.nccl",
    )
    collective_curve: Mapping[str, float] = option(
        "measured seconds of operation-ranks-bytes in one node",
        default_factory=dict,
        hash=False,
        bound=SECONDS,
        read_by="simulator.network.measured",
    )
    sharp: bool = option("sums in the network's switches", default=False, read_by="simulator.network.nccl")
    sources: Mapping[str, str] = option(
        "where each number comes from",
        default_factory=dict,
        hash=False,
        more="It maps a key of this section to a text.",
        read_by="core.commands.presets",
    )

    def _problems(self, wrong: Collection[str]) -> Iterator[FieldProblem]:
        yield from self._curve_problems()
        if size_of(self.headroom, 1.0) is None:
            yield "headroom", f"headroom={self.headroom!r}: {SIZE_RULE}"
        elif "device_memory_bytes" not in wrong and self.headroom_bytes >= self.device_memory_bytes:
            all_bytes = f"device_memory_bytes={self.device_memory_bytes:.0f}"
            yield "headroom", f"headroom={self.headroom} leaves nothing of {all_bytes}."
        for dtype, rate in self.peak_flops_per_s.items():
            if dtype not in DTYPES or not rate > 0:
                setting = f"peak_flops_per_s={{{dtype} = {rate}}}"
                yield "peak_flops_per_s", f"{setting}: rates are above 0, for {', '.join(DTYPES)}."
        for name in ("matmul_efficiency_by_dtype", "sustained_share_by_dtype"):
            for dtype, share in getattr(self, name).items():
                if dtype not in DTYPES or not 0 < share <= 1:
                    setting = f"{name}={{{dtype} = {share}}}"
                    yield name, f"{setting}: shares are above 0 and at most 1, for {', '.join(DTYPES)}."
        for name in ("product_curve", "memory_curve"):
            for size, rate in getattr(self, name).items():
                if not _is_size(size) or not rate > 0:
                    setting = f"{name}={{{size!r} = {rate}}}"
                    yield name, f"{setting}: sizes are positive numbers as texts, rates are above 0."

    def _curve_problems(self) -> Iterator[FieldProblem]:
        for key, seconds in self.kernel_curve.items():
            if kernel_key(key) is None or not seconds > 0:
                setting = f"kernel_curve={{{key!r} = {seconds}}}"
                keys = "keys such as gelu-4096 or nt-64-64-64: a kernel and its sizes"
                yield "kernel_curve", f"{setting}: seconds are above 0, {keys}."
        for key, seconds in self.collective_curve.items():
            if curve_key(key) is None or not seconds > 0:
                setting = f"collective_curve={{{key!r} = {seconds}}}"
                keys = f"keys such as all_reduce-2-4096: {' '.join(MEASURED)}, ranks, bytes"
                yield "collective_curve", f"{setting}: seconds are above 0, {keys}."

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """Scratch space of this one object: what others derived from it, to derive it once. It is
        no part of its value."""
        return {}

    @property
    def headroom_bytes(self) -> int:
        """Bytes of every device that a plan is to leave free."""
        found = size_of(self.headroom, self.device_memory_bytes)
        assert found is not None, "checked when the cluster was made"
        return found

    @property
    def num_nodes(self) -> int:
        """Nodes, the last of which may be part-filled when there is only one."""
        return -(-self.num_devices // self.devices_per_node)


def _is_size(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


def kernel_key(key: str) -> tuple[str, tuple[int, ...]] | None:
    """Kernel and sizes of a key of `kernel_curve`, such as `gelu-4096`, or `nt-64-128-256` (m, n, k of a
    product); None if it is none."""
    name, *numbers = key.split("-")
    if (
        not name.isidentifier()
        or len(numbers) not in (1, 3)
        or not all(number.isdecimal() and int(number) > 0 for number in numbers)
    ):
        return None
    return name, tuple(int(number) for number in numbers)


def curve_key(key: str) -> tuple[str, int, int] | None:
    """Operation, ranks and bytes of a key of `collective_curve`, such as `all_reduce-2-4096`; None if it is none."""
    op, *numbers = key.split("-")
    if op not in MEASURED or len(numbers) != 2 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
        return None
    return op, int(numbers[0]), int(numbers[1])
