"""Pipelines at the edge of what schedules are made for: fewer microbatches than ranks, stages without a layer,
vees of two ranks; with messages during the products, together, and one by one in the row's order. No bit
differs from one device."""

from __future__ import annotations

from dataclasses import dataclass

from helpers.gates import sampled
from helpers.plans import training_plan
from shardproof.core.layout.layout import Layout
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Runtime
from shardproof.core.schedule import CATALOG
from shardproof.verify.matrix.matrix import prove_plan
from shardproof.verify.run.references import References

REFERENCES = References(most=8)
OVERLAPPED, TOGETHER, IN_ORDER = Runtime(), Runtime(p2p_overlap=False), Runtime(p2p_overlap=False, p2p_batched=False)


@dataclass(frozen=True)
class Edge:
    """A schedule over stages written as Megatron does; `samples` are those of every data-parallel
    rank, one a microbatch."""

    schedule: str
    pp: int
    samples: int
    stages: str
    runtime: Runtime = OVERLAPPED
    dp: int = 1
    zero: int = 0
    tied: bool = False

    @property
    def plan(self) -> Plan:
        vpp = len(self.stages.split("|")) // self.pp
        sizes = {
            "num_layers": 2,
            "hidden_size": 16,
            "ffn_hidden_size": 24,
            "num_heads": 2,
            "num_kv_heads": 2,
            "head_dim": 8,
        }
        return training_plan(
            Layout(pp=self.pp, vpp=vpp, dp=self.dp, zero=self.zero, stages=self.stages),
            model="tiny-llama",
            **sizes,
            tied_embeddings=self.tied,
            microbatches=self.samples,
            sequence=8,
            schedule=self.schedule,
            gradient_token_block=4,
            clip_grad_norm=0.05,
            runtime=self.runtime,
            steps=1,
        )

    def __str__(self) -> str:
        way = {OVERLAPPED: "overlapped", TOGETHER: "together", IN_ORDER: "in-order"}[self.runtime]
        more = f" dp{self.dp} zero{self.zero}" if self.dp > 1 else ""
        return f"{self.schedule} p{self.pp} m{self.samples} {self.stages} {way}{more}{' tied' if self.tied else ''}"


EDGES = (
    Edge("1F1B", 5, 2, "Et|t|||L", IN_ORDER, tied=True),
    Edge("1F1B", 3, 2, "E||ttL", TOGETHER, dp=2, zero=1),
    Edge("GPipe", 3, 2, "Et||tL", TOGETHER, dp=2),
    Edge("Interleaved1F1B", 3, 2, "E|t||t||L", OVERLAPPED),
    Edge("LoopedBFS", 2, 1, "E|t|t|L", TOGETHER),
    Edge("InterleavedZeroBubble", 3, 2, "E|t||t||L", OVERLAPPED),
    Edge("ZBH1", 4, 1, "Et|||tL", IN_ORDER),
    Edge("ZBH2", 3, 2, "Et||tL", OVERLAPPED, dp=2, zero=1),
    Edge("ZBAuto", 4, 2, "E|t|t|L", TOGETHER),
    Edge("ZBVZeroBubble", 2, 1, "E|tt||L", IN_ORDER, tied=True),
    Edge("ZBVZeroBubble", 2, 3, "Et|||tL", OVERLAPPED),
    Edge("VHalf", 3, 2, "E||t|t||L", IN_ORDER),
    Edge("VMin", 2, 3, "Et||t|L", IN_ORDER),
    Edge("DualPipe", 2, 4, "Ett|L", IN_ORDER),
    Edge("DualPipe", 4, 8, "E|t||tL", TOGETHER),
    Edge("DualPipeV", 2, 4, "E|tt||L", TOGETHER, tied=True),
    Edge("Combined1F1B", 3, 1, "Et||tL", IN_ORDER),
)


def test_every_schedule_of_the_catalog_is_here() -> None:
    assert {edge.schedule for edge in EDGES} == set(CATALOG)
    assert all(sum(edge.runtime == way for edge in EDGES) >= 4 for way in (OVERLAPPED, TOGETHER, IN_ORDER))


@sampled("edge", EDGES, ids=str, on_push=4)
def test_no_bit_differs_from_one_device(edge: Edge) -> None:
    plan = edge.plan
    outcome = prove_plan(plan, {}, REFERENCES, steps=1)
    assert outcome.ok and outcome.tensors_compared > 60, outcome.line
