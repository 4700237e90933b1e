"""The keys of `[cluster]` and `[runtime]`: the machines, and the software that is modelled."""

from __future__ import annotations

from typing import Any

from ...machine.cluster import COLLECTIVE_LIBRARIES
from ..sections import PROFILES
from .key import Key


def cluster_keys() -> tuple[Key, ...]:
    """Of `[cluster]`."""
    rate: dict[str, Any] = {"section": "cluster", "type": "float", "above": 0, "read_by": "simulator.network.topology"}
    share: dict[str, Any] = {"section": "cluster", "type": "float", "above": 0, "maximum": 1}
    delay: dict[str, Any] = {"section": "cluster", "type": "float", "minimum": 0}
    here, compute, network = "core.plan.build", "simulator.compute.compute", "simulator.network.network"
    topology, nccl = "simulator.network.topology", "simulator.network.nccl"
    return (
        Key(
            "cluster",
            "preset",
            "str",
            ("name of a known cluster (this-host if nothing else is said)"),
            here,
            attribute=None,
        ),
        Key("cluster", "file", "path", "a TOML file with a [cluster] section", here, attribute=None),
        Key("cluster", "name", "str", "what reports call the cluster", "simulator.step.step", default_note="custom"),
        Key("cluster", "num_devices", "int", "devices of the run", topology, minimum=1, default_note="tp*cp*dp*pp"),
        Key("cluster", "devices_per_node", "int", "devices behind one node's links", topology, minimum=1),
        Key(
            "cluster",
            "device_memory_bytes",
            "float",
            ("memory of one device, as its runtime reports it"),
            "simulator.memory.capacity",
            above=0,
        ),
        Key("cluster", "headroom", "size", "memory that stays free on every device", "core.machine.cluster"),
        Key("cluster", "device_memory_bytes_per_s", "float", "memory bandwidth of one device", compute, above=0),
        Key("cluster", "peak_flops_per_s", "table of rates", "dense peak per dtype: fp32 tf32 bf16 fp16 fp8", compute),
        Key(name="matmul_efficiency", doc="share of the peak that large products reach", read_by=compute, **share),
        Key(
            "cluster",
            "matmul_efficiency_by_dtype",
            "table of rates",
            ("the same for single dtypes, where it differs"),
            compute,
        ),
        Key(
            name="grouped_matmul_efficiency",
            doc=("rate of grouped products as a share of plain ones"),
            read_by=compute,
            **share,
        ),
        Key(
            name="attention_forward_efficiency",
            doc=("share of the peak that fused attention reaches, forward"),
            read_by=compute,
            **share,
        ),
        Key(
            name="attention_backward_efficiency",
            doc=("share of the peak that fused attention reaches, backward"),
            read_by=compute,
            **share,
        ),
        Key(
            name="memory_efficiency",
            doc=("share of the memory bandwidth that large transfers reach"),
            read_by=compute,
            **share,
        ),
        Key(name="kernel_launch_s", doc="launch and tail of one kernel, on top of its work", read_by=compute, **delay),
        Key(name="kernel_floor_s", doc="least time of the work of one kernel", read_by=compute, **delay),
        Key(name="host_dispatch_s", doc="time the host needs to dispatch one kernel", read_by=compute, **delay),
        Key(
            "cluster",
            "num_compute_units",
            "int",
            ("processors of one device that share a product's tiles"),
            compute,
            minimum=1,
        ),
        Key(
            "cluster",
            "sustained_share_by_dtype",
            "table of rates",
            ("the same for single dtypes, where it differs"),
            compute,
        ),
        Key(
            name="sustained_share",
            doc="share of the product rate that power and clocks leave under training load",
            read_by=compute,
            **share,
        ),
        Key(
            name="attention_half_head_dim",
            doc="head width at which fused attention reaches half the rate of endlessly wide heads",
            read_by=compute,
            **delay,
        ),
        Key(
            "cluster",
            "product_curve",
            "table of rates",
            ("measured FLOP/s by FLOPs of one product, for devices without tiles"),
            compute,
        ),
        Key("cluster", "memory_curve", "table of rates", "measured bytes/s by bytes of one transfer", compute),
        Key(
            "cluster",
            "kernel_curve",
            "table of rates",
            "measured seconds of kernel-sizes, as calibrate writes them",
            "simulator.compute.host_kernels",
        ),
        Key(
            "cluster",
            "step_over_kernels",
            "float",
            "seconds of a training step over those of its kernels measured one by one",
            "simulator.cost.host_blocks",
            above=0,
        ),
        Key(
            name="busy_core_share",
            doc=("share of its rate that a core keeps while all compute"),
            read_by="simulator.cost.host_blocks",
            **share,
        ),
        Key(
            "cluster",
            "rank_skew_root_s",
            "float",
            "seconds that ranks wait for the slower one when they meet, over the root of the seconds they worked since",
            "simulator.cost.host_cores",
            minimum=0,
        ),
        Key(
            "cluster",
            "num_cores",
            "int",
            ("cores that devices share for computing; 0 is one each"),
            "simulator.cost.host_cores",
            minimum=0,
        ),
        Key(
            name="flash_attention_2_share",
            doc="rate of FlashAttention-2 as a share of the best fused kernel",
            read_by="simulator.stack.profile",
            **share,
        ),
        Key(
            name="overlap_compute_share",
            doc=("share of its rate that compute keeps while a collective runs"),
            read_by=compute,
            **share,
        ),
        Key(name="node_link_bytes_per_s", doc="links inside a node, per device and direction", **rate),
        Key(name="node_link_latency_s", doc="latency inside a node", read_by=network, **delay),
        Key(name="node_network_bytes_per_s", doc="injection bandwidth of one node, one direction", **rate),
        Key(name="network_latency_s", doc="latency between nodes", read_by=network, **delay),
        Key(
            name="link_efficiency",
            doc=("share of a link's bandwidth that large messages reach"),
            read_by=topology,
            **share,
        ),
        Key(
            name="network_efficiency",
            doc=("share of the injection bandwidth that large messages reach"),
            read_by=topology,
            **share,
        ),
        Key("cluster", "nics_per_node", "int", "network cards of a node; 0 is one per device", topology, minimum=0),
        Key("cluster", "nodes_per_leaf", "int", "nodes behind the same leaf switches; 0 is all", topology, minimum=0),
        Key("cluster", "rails", "bool", "card i of every node leads to leaf switch i", topology),
        Key(
            "cluster",
            "oversubscription",
            "float",
            ("what enters a leaf switch over what leaves it"),
            network,
            minimum=1,
        ),
        Key(name="leaf_latency_s", doc="what crossing leaf switches adds to the latency", read_by=network, **delay),
        Key("cluster", "collective_library", "str", "who moves the bytes", network, choices=COLLECTIVE_LIBRARIES),
        Key(name="collective_launch_s", doc="launch and tail of the smallest collective", read_by=network, **delay),
        Key(
            name="collective_ramp_bytes",
            doc=("bytes a device must have under way in a long collective"),
            read_by=nccl,
            **delay,
        ),
        Key("cluster", "ll128_ramp_share", "float", "share of the ramp that LL128 pays", nccl, minimum=0, maximum=1),
        Key(name="channel_bytes_per_s", doc="rate of one channel of a message; 0 is no limit", read_by=nccl, **delay),
        Key(
            "cluster",
            "nvls_efficiency",
            "float",
            ("share of the link's rate of sums in the node's switch"),
            nccl,
            minimum=0,
            maximum=1,
        ),
        Key(
            "cluster",
            "collective_curve",
            "table of rates",
            ("measured seconds of operation-ranks-bytes in one node"),
            "simulator.network.measured",
        ),
        Key("cluster", "sharp", "bool", "sums in the network's switches", nccl),
        Key("cluster", "sources", "table of texts", "where each number comes from", "core.commands.presets"),
    )


def runtime_keys() -> tuple[Key, ...]:
    """Of `[runtime]`."""
    switch: dict[str, Any] = {
        "section": "runtime",
        "type": "bool",
        "read_by": "simulator.stack.profiles",
        "default_note": "as the profile",
    }
    doc = "one kernel, or products with scores in memory"
    return (
        Key(
            "runtime",
            "profile",
            "str",
            "whose memory and overlap behaviour is modelled",
            "simulator.stack.profiles",
            choices=PROFILES,
            listed="profiles",
        ),
        Key(
            name="attention",
            doc=doc,
            choices=("fused", "flash-1", "flash-2", "triton", "unfused"),
            **{**switch, "type": "str"},
        ),
        Key(name="compile", doc="a compiler fuses elementwise kernels", **switch),
        Key(name="tp_comm_overlap", doc="tensor-parallel collectives overlap with products", **switch),
        Key(name="p2p_overlap", doc="messages between stages overlap with products", **switch),
        Key(
            name="p2p_batched",
            doc="without p2p_overlap: neighbouring messages of a rank's list begin together, not one by one",
            **{**switch, "read_by": "backend.pipeline.row_messages", "default_note": "true"},
        ),
        Key(name="cuda_graphs", doc="the kernels of an action are launched as one", **switch),
        Key(
            name="ep_comm_overlap",
            doc="tokens are exchanged between experts during another microbatch's products",
            **switch,
        ),
        Key(
            name="context_parallel",
            doc="how keys and values reach the ranks that have other parts of a sequence",
            choices=("all_gather", "ring"),
            **{**switch, "type": "str", "read_by": "core.program.attention"},
        ),
        Key(
            name="dispatch_once",
            doc=("a token goes once to each node (or device of a node), not to each of its experts"),
            **switch,
        ),
        Key(
            name="amax_reduction",
            doc=(
                "fp8: ranks that agree on the largest magnitudes after every pass, of one replica or of all (delayed "
                "scaling)"
            ),
            choices=("none", "model", "replicas"),
            **{**switch, "type": "str"},
        ),
        Key(name="scatter_gather", doc="messages that all tp ranks hold cross nodes in tp parts", **switch),
        Key(
            "runtime",
            "trim_padding",
            "bool",
            ("microbatches of padded documents end with their longest one"),
            "backend.ranks.batches",
        ),
        Key(name="launch_blocking", doc="the host waits for every kernel (CUDA_LAUNCH_BLOCKING=1)", **switch),
        Key(
            name="dropout",
            doc=("residuals and attention probabilities pass a dropout, whose share the model need not name"),
            **switch,
        ),
        Key(
            name="fused_loss",
            doc="the loss keeps no fp32 softmax",
            **{**switch, "read_by": "simulator.memory.profiles"},
        ),
    )
