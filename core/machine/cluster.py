"""`ClusterSpec`: devices, nodes and links as numbers with sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..base.bounds import Bounded, FieldProblem
from ..base.errors import ClusterError
from ..base.units import SIZE_RULE, size_of

if TYPE_CHECKING:
    import networkx

_POSITIVE = (
    "step_over_kernels",
    "device_memory_bytes",
    "device_memory_bytes_per_s",
    "node_link_bytes_per_s",
    "node_network_bytes_per_s",
)
_SHARES = (
    "matmul_efficiency",
    "grouped_matmul_efficiency",
    "attention_forward_efficiency",
    "attention_backward_efficiency",
    "memory_efficiency",
    "sustained_share",
    "overlap_compute_share",
    "flash_attention_2_share",
    "busy_core_share",
    "link_efficiency",
    "network_efficiency",
)
_NOT_NEGATIVE = (
    "rank_skew_root_s",
    "attention_half_head_dim",
    "kernel_launch_s",
    "kernel_floor_s",
    "host_dispatch_s",
    "node_link_latency_s",
    "network_latency_s",
    "leaf_latency_s",
    "collective_launch_s",
    "collective_ramp_bytes",
    "channel_bytes_per_s",
)
COLLECTIVE_LIBRARIES = ("nccl", "gloo")
MEASURED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "message", "message_work")
"""Operations that `collective_curve` may hold: collectives by the bytes of the whole tensor, and messages;
`message_work` is what a send and a receive cost the work of a rank that has one core."""
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8")


@dataclass(frozen=True)
class ClusterSpec(Bounded, section="cluster", problem_type=ClusterError):
    """`num_devices` devices in nodes of `devices_per_node`. Rates are per second and one direction, sizes in bytes.

    `peak_flops_per_s` maps dtype (`fp32 tf32 bf16 fp16 fp8`) to the dense peak. Efficiencies are shares of a peak that
    large kernels or transfers reach; `..._by_dtype` override a share for single dtypes. `simulator.compute.compute`
    says what the other numbers of a device mean. Curves are measured rates by size: FLOPs of one product -> FLOP/s,
    bytes of one transfer -> bytes/s; `kernel_curve` holds measured seconds of single kernels. `num_cores` devices can
    compute at once where they share cores, 0 is all; `busy_core_share` of its rate is what one keeps when all cores
    compute, ranks that worked for t seconds wait `rank_skew_root_s` * sqrt(t) for the slower one, and a step takes
    `step_over_kernels` times what its kernels take one by one. `device_memory_bytes` is what the runtime reports as the
    device's total (`cudaMemGetInfo`); of it `headroom` stays free: a share such as "8%", or bytes such as "4GiB".
    `sources` maps a field name to where its number comes from. Raises `ClusterError` with every rule that is broken.
    """

    name: str
    num_devices: int
    devices_per_node: int
    device_memory_bytes: float
    device_memory_bytes_per_s: float
    peak_flops_per_s: Mapping[str, float] = field(hash=False)
    matmul_efficiency: float
    memory_efficiency: float
    kernel_launch_s: float
    node_link_bytes_per_s: float
    node_link_latency_s: float
    node_network_bytes_per_s: float
    network_latency_s: float
    link_efficiency: float
    num_compute_units: int = 1
    sustained_share: float = 1.0
    sustained_share_by_dtype: Mapping[str, float] = field(default_factory=dict, hash=False)
    matmul_efficiency_by_dtype: Mapping[str, float] = field(default_factory=dict, hash=False)
    grouped_matmul_efficiency: float = 1.0
    attention_forward_efficiency: float = 0.6
    attention_backward_efficiency: float = 0.5
    attention_half_head_dim: float = 20.0
    kernel_floor_s: float = 0.0
    host_dispatch_s: float = 0.0
    overlap_compute_share: float = 1.0
    flash_attention_2_share: float = 1.0
    product_curve: Mapping[str, float] = field(default_factory=dict, hash=False)
    memory_curve: Mapping[str, float] = field(default_factory=dict, hash=False)
    kernel_curve: Mapping[str, float] = field(default_factory=dict, hash=False)
    num_cores: int = 0
    busy_core_share: float = 1.0
    rank_skew_root_s: float = 0.0
    step_over_kernels: float = 1.0
    network_efficiency: float = 0.92
    collective_library: str = "nccl"
    collective_launch_s: float = 6.6e-6
    collective_ramp_bytes: float = 15e6
    ll128_ramp_share: float = 0.0
    channel_bytes_per_s: float = 0.0
    nvls_efficiency: float = 0.0
    sharp: bool = False
    nics_per_node: int = 0
    nodes_per_leaf: int = 0
    rails: bool = False
    oversubscription: float = 1.0
    leaf_latency_s: float = 0.0
    collective_curve: Mapping[str, float] = field(default_factory=dict, hash=False)
    headroom: str = "0"
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse(self._problems())

    def _problems(self) -> Iterator[FieldProblem]:
        for name in ("num_devices", "devices_per_node", "num_compute_units"):
            if (value := getattr(self, name)) < 1:
                yield name, f"{name}={value} must be at least 1."
        for name in _POSITIVE:
            if not (value := getattr(self, name)) > 0:
                yield name, f"{name}={value} must be above 0."
        for name in _SHARES:
            if not 0 < (value := getattr(self, name)) <= 1:
                yield name, f"{name}={value} is a share: above 0, at most 1."
        for name in _NOT_NEGATIVE:
            if (value := getattr(self, name)) < 0:
                yield name, f"{name}={value} must not be negative."
        yield from self._network_problems()
        if size_of(self.headroom, 1.0) is None:
            yield "headroom", f"headroom={self.headroom!r}: {SIZE_RULE}"
        elif self.device_memory_bytes > 0 and self.headroom_bytes >= self.device_memory_bytes:
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

    def _network_problems(self) -> Iterator[FieldProblem]:
        for name in ("nics_per_node", "nodes_per_leaf"):
            if (value := getattr(self, name)) < 0:
                yield name, f"{name}={value} must not be negative."
        if not 0 <= self.ll128_ramp_share <= 1:
            yield "ll128_ramp_share", f"ll128_ramp_share={self.ll128_ramp_share} is a share: 0 to 1."
        if not 0 <= self.nvls_efficiency <= 1:
            setting = f"nvls_efficiency={self.nvls_efficiency}"
            yield "nvls_efficiency", f"{setting} is a share of the link's rate: at most 1, and 0 where no switch adds."
        if self.oversubscription < 1:
            setting = f"oversubscription={self.oversubscription}"
            sentence = f"{setting} says how many times more enters a leaf switch than leaves it: at least 1."
            yield "oversubscription", sentence
        if self.collective_library not in COLLECTIVE_LIBRARIES:
            setting = f"collective_library={self.collective_library!r}"
            yield "collective_library", f"{setting} is not one of {', '.join(COLLECTIVE_LIBRARIES)}."
        if self.num_cores < 0:
            sentence = f"num_cores={self.num_cores} must not be negative; 0 says that every device computes on its own."
            yield "num_cores", sentence
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

    def graph(self) -> networkx.DiGraph:
        """The hierarchy as a graph of levels, `cluster -> node -> device`, not of single devices.

        A level knows `count`, how many of it the level above holds; an edge knows `bytes_per_s` and `latency_s` of the
        link that one lower-level member has into the level above, in one direction.
        """
        import networkx

        graph: networkx.DiGraph = networkx.DiGraph(name=self.name)
        graph.add_node("cluster", count=1)
        graph.add_node("node", count=self.num_nodes)
        graph.add_node(
            "device", count=min(self.devices_per_node, self.num_devices), memory_bytes=self.device_memory_bytes
        )
        graph.add_edge("cluster", "node", bytes_per_s=self.node_network_bytes_per_s, latency_s=self.network_latency_s)
        graph.add_edge("node", "device", bytes_per_s=self.node_link_bytes_per_s, latency_s=self.node_link_latency_s)
        return graph


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
