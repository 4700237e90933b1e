"""The mesh of a torchtitan configuration as a layout (distributed/parallel_dims.py and
models/llama3/infra/parallelize.py at v0.2.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..base.bounds import DEVICES
from .table import Sheet

REPLICATE = "parallelism.data_parallel_replicate_degree"
SHARD = "parallelism.data_parallel_shard_degree"
TP = "parallelism.tensor_parallel_degree"
CP = "parallelism.context_parallel_degree"
PP = "parallelism.pipeline_parallel_degree"
EP = "parallelism.expert_parallel_degree"
ETP = "parallelism.expert_tensor_parallel_degree"

MOST = int(DEVICES.most)
"""The largest degree."""


@dataclass(frozen=True)
class Degrees:
    """torchtitan's mesh; `shard` ranks share the parameters of a replica, as do those of `cp`."""

    replicate: int
    shard: int
    tp: int
    cp: int
    pp: int
    ep: int

    @property
    def dp(self) -> int:
        """Ranks that see other sequences."""
        return self.replicate * self.shard

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP is applied."""
        return self.shard > 1 or self.cp > 1


def put_degrees(sheet: Sheet, num_devices: int | None) -> Degrees | None:
    """Puts devices and layout. None where they cannot be said, which is refused."""
    given = {flag: sheet.value(flag) for flag in (REPLICATE, SHARD, TP, CP, PP, EP)}
    bad = [flag for flag, value in given.items() if not 1 <= value <= MOST and not (flag == SHARD and value == -1)]
    for flag in bad:
        least = "a degree is at least 1" + (", or -1 for what is left." if flag == SHARD else ".")
        sheet.refuse(flag, least if given[flag] < 1 else f"a degree is at most {MOST:,}.")
    if bad:
        return None
    if sheet.value("training.data_parallel_type") == "ddp":
        given[REPLICATE], given[SHARD] = given[SHARD], 1
    infer = next((flag for flag in (SHARD, REPLICATE) if given[flag] == -1), None)
    others = math.prod(given[flag] for flag in (REPLICATE, SHARD, TP, CP, PP) if flag != infer)
    if infer is not None and num_devices is None:
        sheet.refuse(
            SHARD, f"-1 means the devices that are left: say how many there are, --devices N, a multiple of {others}."
        )
        return None
    if infer is not None and num_devices is not None:
        if num_devices % others or num_devices < others:
            sheet.refuse(
                SHARD, f"the other degrees take {others} devices, of which --devices {num_devices} is no multiple."
            )
            return None
        given[infer] = num_devices // others
    elif num_devices not in (None, others):
        sheet.refuse(SHARD, f"the degrees of the file take {others} devices, and --devices says {num_devices}.")
        return None
    degrees = Degrees(given[REPLICATE], given[SHARD], given[TP], given[CP], given[PP], given[EP])
    _put_layout(sheet, degrees)
    return degrees


def _put_layout(sheet: Sheet, degrees: Degrees) -> None:
    sheet.put("cluster.num_devices", degrees.dp * degrees.tp * degrees.cp * degrees.pp, SHARD)
    sheet.put("layout.dp", degrees.dp, SHARD, REPLICATE)
    sheet.put("layout.zero", _zero(sheet, degrees), SHARD, "parallelism.fsdp_reshard_after_forward")
    for key, flag, value in (("tp", TP, degrees.tp), ("cp", CP, degrees.cp), ("pp", PP, degrees.pp)):
        sheet.put(f"layout.{key}", value, flag)
    if degrees.replicate > 1 and degrees.is_sharded:
        sheet.put("data_parallel.shard", degrees.shard * degrees.cp, REPLICATE, SHARD)
    elif degrees.replicate > 1 and degrees.tp * degrees.pp > 1:
        sheet.refuse(
            REPLICATE, "torchtitan replicates without sharding (DDP) only where tensor and pipeline degree are 1."
        )
    if degrees.tp > 1:
        sheet.put("layout.sequence_parallel", sheet.value("parallelism.enable_sequence_parallel"), TP)
    if degrees.cp > 1:
        rotates = "parallelism.context_parallel_rotate_method"
        if sheet.is_written(rotates):
            how = {"allgather": "all_gather", "alltoall": "ring"}[sheet.value(rotates)]
            sheet.put("runtime.context_parallel", how, rotates)
        balancer = "parallelism.context_parallel_load_balancer"
        if sheet.value(balancer) != "headtail" or sheet.is_null(balancer):
            sheet.say(
                "parallelism.context_parallel_load_balancer",
                "not-modelled",
                "the chunks of a sequence are dealt head and tail in a plan, which evens out causal attention",
            )


def _zero(sheet: Sheet, degrees: Degrees) -> int:
    """The ZeRO stage that FSDP2 amounts to: 3 where weights are given back after a forward, else 2; with a pipeline
    they are not, unless the file says so (apply_fsdp)."""
    if not degrees.is_sharded:
        return 0
    policy = sheet.value("parallelism.fsdp_reshard_after_forward")
    return 3 if policy == "always" or (policy == "default" and degrees.pp == 1) else 2


def put_experts(sheet: Sheet, degrees: Degrees, *, has_experts: bool) -> None:
    """Puts how experts are spread: with expert parallelism etp is 1 unless said, without it that of the others."""
    if not has_experts:
        for flag in (EP, ETP, "parallelism.expert_parallel_comm_backend"):
            sheet.say(flag, "no-effect", "the model has no experts")
        return
    sheet.put("layout.ep", degrees.ep, EP)
    ranks = degrees.shard * degrees.cp * degrees.tp
    if degrees.ep > 1:
        sheet.put("layout.etp", sheet.value(ETP), ETP)
        if sheet.value(ETP) not in (1, degrees.tp):
            sheet.refuse(ETP, f"torchtitan cuts experts as the rest, {degrees.tp}, or not at all, 1.")
        elif ranks % (degrees.ep * sheet.value(ETP)):
            sheet.refuse(
                EP,
                f"experts are spread over the {ranks} ranks of shard, cp and tp, which "
                f"ep*etp={degrees.ep * sheet.value(ETP)} does not divide.",
            )
    else:
        sheet.say(ETP, "no-effect", "it counts with expert parallelism only")
    if sheet.value("parallelism.expert_parallel_comm_backend") in ("deepep", "hybridep"):
        sheet.put("runtime.dispatch_once", True, "parallelism.expert_parallel_comm_backend")
