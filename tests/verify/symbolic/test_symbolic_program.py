"""Broken programs: every product and every collective of layers, reductions and step counts, and
the proof says which."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from helpers.gates import sampled
from helpers.plans import plan
from shardproof.core.layout.layout import Layout
from shardproof.core.layout.stage_parameters import stage_parameters
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.runtime import Recompute
from shardproof.core.plan.schedule_of import schedule_for
from shardproof.core.program import Collective, Product, operations, reduce_microbatch, stage_ops
from shardproof.core.schedule import lower
from shardproof.core.schedule.action import Kind
from shardproof.verify.symbolic.layers import Program
from shardproof.verify.symbolic.symbolic import ORDER_RULE, VALUE_RULE, SymbolicProof, prove


def plan_of(
    model="tiny-gpt",
    mode="exact",
    *,
    recompute="none",
    micro=1,
    per_copy=4,
    layers=None,
    schedule=None,
    shard=None,
    **degrees,
) -> Plan:
    layout = Layout(**degrees)
    return plan(
        layout,
        model=model,
        num_layers=layers or -(-model_preset(model).num_layers // layout.num_stages) * layout.num_stages,
        samples=per_copy * micro * layout.dp,
        micro=micro,
        recompute=Recompute("full", distribute=True) if recompute == "distributed" else Recompute(recompute),
        schedule=schedule,
        mode=mode,
        reduction_token_block=None,
        shard=shard,
    )


def proof_of(plan: Plan, program: Program | None = None) -> SymbolicProof:
    return prove(plan, lower(schedule_for(plan)), program)


def changed(ops: tuple, index: int, how: str) -> tuple:
    """`ops` with one operation dropped, doubled, over another axis, or of another size."""
    ops = list(ops)
    match how:
        case "drop":
            del ops[index]
        case "double":
            ops.insert(index, ops[index])
        case "axis":
            ops[index] = replace(ops[index], axis="dp" if ops[index].axis == "tp" else "tp")
        case "size":
            ops[index] = replace(ops[index], k=ops[index].k + 1)
    return tuple(ops)


def layer_mutants(plan: Plan, layers: tuple[str, ...], only_rank: int | None = None):
    """(layer, phase, how, program) for every operation of some blocks."""
    for work in stage_ops(plan, 0):
        if not work.layer.startswith(layers):
            continue
        for phase in ("forward", "input_gradient", "weight_gradient", "recomputed"):
            for index, operation in enumerate(getattr(work, phase)):
                for how in (
                    ("drop", "double", "axis") if isinstance(operation, Collective) else ("drop", "double", "size")
                ):

                    def works(plan, stage, tp_rank, layer=work.layer, phase=phase, index=index, how=how):
                        return [
                            replace(each, **{phase: changed(getattr(each, phase), index, how)})
                            if each.layer == layer and only_rank in (None, tp_rank)
                            else each
                            for each in stage_ops(plan, stage, tp_rank)
                        ]

                    yield work.layer, phase, how, Program(works=works)


@sampled(
    "choices",
    [
        pytest.param({"mode": "exact", "tp": 2, "dp": 2}, id="exact"),
        pytest.param({"mode": "fast", "tp": 4, "dp": 2, "recompute": "full"}, id="fast-full-recompute"),
        pytest.param({"mode": "exact", "tp": 4, "recompute": "distributed"}, id="distributed-recompute"),
        pytest.param(
            {
                "mode": "fast",
                "model": "tiny-gpt-6h",
                "tp": 3,
                "dp": 2,
                "sequence_parallel": True,
                "recompute": "selective",
            },
            id="fast-sp",
        ),
        pytest.param({"mode": "exact", "tp": 4, "sequence_parallel": True}, id="exact-sp"),
    ],
    on_push=3,
)
def test_every_product_and_collective_of_every_layer_counts(choices):
    """A dropped one, a doubled one, a collective over dp instead of tp, a product of another size:
    found as other mathematics."""
    plan = plan_of(layers=1, **choices)
    num_mutants = 0
    for layer, phase, how, program in layer_mutants(plan, ("embedding", "layers.0", "head")):
        wrong = [finding for finding in proof_of(plan, program).findings if finding.rule == VALUE_RULE]
        assert wrong, (layer, phase, how)
        place = wrong[0].where
        # where it shows up
        also = {"embedding.tokens": "REDUCE_GRAD, embedding", "head.output": "embedding.tokens.weight@output"}
        assert layer in place or also.get(layer, layer) in place, (layer, phase, how, place)
        num_mutants += 1
    assert num_mutants > 80


def test_a_collective_that_one_rank_leaves_out_names_both_sides():
    plan = plan_of(mode="fast", tp=4)
    texts = [
        finding.what
        for layer, phase, how, program in layer_mutants(plan, ("layers.2.mlp.down",), only_rank=3)
        if how == "drop" and phase == "forward"
        for finding in proof_of(plan, program).findings
        if finding.rule == VALUE_RULE
    ]
    assert "tp rank 0 calls all_reduce over tp where tp rank 3 does nothing." in texts


def test_a_dropped_all_reduce_says_which_leaves_are_there():
    plan = plan_of(mode="fast", tp=2, layers=2)
    program = next(
        program
        for layer, phase, how, program in layer_mutants(plan, ("layers.0.mlp.down",))
        if phase == "forward" and how == "drop"
    )  # the first operation is the product
    assert proof_of(plan, program).findings[0].what == "the layer has 1 product, and the program lists 0."
    dropped = without_collectives(plan, "layers.0.mlp.down", "forward")
    (finding,) = [finding for finding in proof_of(plan, dropped).findings if finding.rule == VALUE_RULE]
    num_leaves = plan.leaf_sizes.ffn.num_leaves
    assert finding.where == "pipeline rank 0, tp rank 0, 0F, layers.0.mlp.down (forward)"
    assert (finding.rank, finding.tensor) == (0, "layers.0.mlp.down")
    assert finding.what == (
        f"it is the sum over leaves [0, {num_leaves // 2}) of {num_leaves} only: nothing has added the other ranks' "
        "parts."
    )


def without_collectives(plan: Plan, layer: str, phase: str) -> Program:
    def works(plan, stage, tp_rank):
        return [
            replace(work, **{phase: tuple(each for each in getattr(work, phase) if isinstance(each, Product))})
            if work.layer == layer
            else work
            for work in stage_ops(plan, stage, tp_rank)
        ]

    return Program(works=works)


def test_a_doubled_all_reduce_counts_everything_3_times_on_3_ranks():
    plan = plan_of("tiny-gpt-6h", "fast", tp=3)
    programs = layer_mutants(plan, ("layers.1.attention.output",))
    (program,) = [
        p
        for _, phase, how, p in programs
        if phase == "forward" and how == "double" and len(p.works(plan, 0, 0)) and doubles(plan, p)
    ]
    (finding,) = [finding for finding in proof_of(plan, program).findings if finding.rule == VALUE_RULE]
    assert finding.what == "it is 3 times the value on one device."


def doubles(plan: Plan, program: Program) -> bool:
    """True when a collective is doubled and not a product."""
    count = lambda works: sum(isinstance(each, Collective) for work in works for each in work.forward)  # noqa: E731
    return count(program.works(plan, 0, 0)) > count(stage_ops(plan, 0))


def step_program(change) -> Program:
    """`change(operations, kind, stage, tp_rank, dp_rank)` instead of the program's REDUCE_GRAD and STEP."""

    def actions(plan, kind, stage, tp_rank=0, dp_rank=0, *, replica=0):
        return change(operations(plan, kind, stage, tp_rank, dp_rank, replica=replica), kind, stage, tp_rank, dp_rank)

    return Program(actions=actions)


@pytest.mark.parametrize("model", ["tiny-gpt", "tiny-moe"])
@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_copies_that_are_not_asked_do_what_the_first_does(model, mode, zero):
    plan = plan_of(model, mode, tp=2, pp=2, dp=3, zero=zero)
    asked = step_program(lambda own, *_: own)
    for kind in (Kind.B, Kind.REDUCE_GRAD, Kind.UNSHARD, Kind.STEP):
        for stage, tp_rank in product(range(2), range(2)):
            ours, theirs = (dict(each.of_copies(plan, kind, stage, tp_rank)) for each in (Program(), asked))
            assert set(ours.values()) == set(theirs.values())
            assert all(ours[dp_rank] == own for dp_rank, own in theirs.items() if dp_rank in ours)


@pytest.mark.parametrize("how", ["drop", "double", "axis"])
@pytest.mark.parametrize(
    "choices",
    [
        pytest.param({"mode": "exact", "tp": 2, "pp": 2, "dp": 3}, id="exact"),
        pytest.param({"mode": "fast", "tp": 2, "pp": 2, "dp": 3, "sequence_parallel": True}, id="fast-sp"),
        pytest.param({"mode": "exact", "tp": 2, "pp": 2, "dp": 3, "sequence_parallel": True}, id="exact-sp"),
        pytest.param({"mode": "fast", "tp": 2, "pp": 2, "dp": 3, "zero": 1}, id="fast-zero1"),
        pytest.param({"mode": "exact", "tp": 2, "pp": 2, "dp": 3, "zero": 2, "model": "tiny-llama"}, id="exact-zero2"),
        pytest.param({"mode": "fast", "pp": 2, "dp": 2, "schedule": "DualPipe", "per_copy": 8}, id="fast-dualpipe"),
        pytest.param({"mode": "exact", "pp": 2, "dp": 6, "zero": 1, "shard": 3}, id="exact-hybrid"),
        pytest.param(
            {"mode": "fast", "tp": 2, "pp": 2, "dp": 4, "zero": 2, "shard": 2, "sequence_parallel": True},
            id="fast-zero2-hybrid",
        ),
    ],
)
def test_every_collective_of_the_reduction_and_the_step_counts(choices, how):
    plan = plan_of(**choices)
    for kind in (Kind.REDUCE_GRAD, Kind.STEP):
        for index, operation in enumerate(operations(plan, kind, 1 if kind is Kind.REDUCE_GRAD else 0)):
            wanted = 1 if kind is Kind.REDUCE_GRAD else 0

            def change(ops, each_kind, stage, tp_rank, dp_rank, kind=kind, index=index, wanted=wanted):
                return changed(ops, index, how) if each_kind is kind and stage == wanted else ops

            proof = proof_of(plan, step_program(change))
            wrong = [finding.where for finding in proof.findings if finding.rule == VALUE_RULE]
            assert wrong and not proof.ok, (kind, operation, how)
            expected = "1REDUCE_GRAD" if kind is Kind.REDUCE_GRAD else "STEP"
            assert all(expected in where for where in wrong), (kind, operation, how, wrong)


@pytest.mark.parametrize("how", ["drop", "double", "axis"])
@pytest.mark.parametrize("kinds", [(Kind.B, Kind.W), (Kind.B,)], ids=["both", "only-after-b"])
def test_every_collective_after_a_microbatch_counts(kinds, how):
    plan = plan_of(mode="fast", dp=3, zero=2)
    assert proof_of(plan).ok
    for index, _ in enumerate(reduce_microbatch(plan, 0)):

        def change(ops, kind, stage, tp_rank, dp_rank, index=index):
            num_each = len(list(reduce_microbatch(plan, stage)))
            return changed(ops, len(ops) - num_each + index, how) if kind in kinds else ops

        wrong = [
            finding.where for finding in proof_of(plan, step_program(change)).findings if finding.rule == VALUE_RULE
        ]
        assert wrong and all(where.startswith(("0B", "0REDUCE_GRAD", "0W")) for where in wrong), wrong


def test_a_reduction_over_tp_instead_of_dp_says_what_is_called():
    plan = plan_of(mode="fast", tp=2, dp=2)

    def change(ops, kind, stage, tp_rank, dp_rank):
        return tuple(replace(each, axis="tp") for each in ops) if kind is Kind.REDUCE_GRAD else ops

    wrong = [finding for finding in proof_of(plan, step_program(change)).findings if finding.rule == VALUE_RULE]
    assert wrong[0].where.startswith("0REDUCE_GRAD, embedding.tokens.weight@embedding")
    assert "REDUCE_GRAD calls all_reduce over tp" in wrong[0].what


def test_one_data_parallel_rank_that_reduces_otherwise_is_found():
    plan = plan_of(mode="fast", dp=5)

    def change(ops, kind, stage, tp_rank, dp_rank):
        return () if kind is Kind.REDUCE_GRAD and dp_rank == 4 else ops

    wrong = [finding.what for finding in proof_of(plan, step_program(change)).findings if finding.rule == VALUE_RULE]
    assert "ranks call different collectives: all_reduce over dp and none." in wrong


def test_without_the_tied_tables_sum_first_and_last_stage_differ():
    plan = plan_of(pp=3)

    def change(ops, kind, stage, tp_rank, dp_rank):
        return tuple(each for each in ops if not (kind is Kind.STEP and each.axis == "embedding"))

    (finding,) = proof_of(plan, step_program(change)).findings
    assert finding.rule == VALUE_RULE and "embedding.tokens.weight on pipeline rank 0" in finding.where
    assert "without the other end's use" in finding.what


def test_the_norm_of_gradients_in_parts_needs_the_sum_over_dp():
    """Found by this proof in `core.program` itself: with ZeRO every copy holds a part of the gradient, and a norm over
    tp and pp alone would be that of one part."""
    plan = plan_of(mode="fast", dp=3, zero=1)

    def change(ops, kind, stage, tp_rank, dp_rank):
        return tuple(
            each for each in ops if not (kind is Kind.STEP and each.layer == "grad_norm" and each.axis == "dp")
        )

    (finding,) = [finding for finding in proof_of(plan, step_program(change)).findings if finding.rule == VALUE_RULE]
    assert (finding.where, finding.tensor, finding.action) == ("STEP, grad_norm", "grad_norm", None)


@pytest.mark.parametrize(("forget", "where"), [(True, "head.norm.weight"), (False, "position")])
def test_the_sum_over_tp_must_be_for_exactly_the_gradients_of_own_tokens(forget, where):
    plan = plan_of(mode="fast", tp=2, sequence_parallel=True)
    right = Program().own_tokens

    def own_tokens(plan, stage):
        if forget:
            return [parameter for parameter in right(plan, stage) if parameter.name != "head.norm.weight"]
        return [each for each in stage_parameters(plan.model, plan.stages[stage]) if each.cut is None]

    wrong = [
        finding for finding in proof_of(plan, Program(own_tokens=own_tokens)).findings if finding.rule == VALUE_RULE
    ]
    assert len(wrong) == 1 and where in wrong[0].where
    if not forget:
        assert "2 times the sum over the global batch" in wrong[0].what


def test_exact_numerics_with_a_library_all_reduce_are_another_order_and_nothing_else():
    plan = plan_of(mode="exact", tp=4, dp=2)

    def works(plan, stage, tp_rank):
        return [
            replace(work, forward=tuple(library_sum(work.forward))) if work.layer == "layers.1.mlp.down" else work
            for work in stage_ops(plan, stage, tp_rank)
        ]

    def library_sum(ops):
        for operation in ops:
            if isinstance(operation, Product):
                yield operation
            elif operation.op == "all_to_all":
                yield replace(operation, op="all_reduce")

    proof = proof_of(plan, Program(works=works))
    (finding,) = proof.findings
    assert finding.rule == ORDER_RULE and finding.severity == "error" and proof.same_mathematics and not proof.ok
    assert finding.where == "layers.1" and "mlp.down (forward)" in finding.what


def test_exact_numerics_with_sequence_parallelism_keep_every_order_and_say_where_a_cut_would_not(monkeypatch):
    plan = plan_of(mode="exact", tp=2, dp=3, pp=2, sequence_parallel=True)
    assert proof_of(plan).findings == ()
    monkeypatch.setattr(
        Plan, "tokens_of", lambda plan, tp_rank: (0, 24) if plan.layout.tp == 1 else ((0, 13), (13, 24))[tp_rank]
    )
    wrong = [finding for finding in proof_of(plan).findings if "REDUCE_GRAD" in finding.where]
    assert {finding.what for finding in wrong} == {
        ("sums over tokens are cut at token 13, inside a block of reduction_token_block=3.")
    }
    assert {finding.severity for finding in wrong} == {"error"}


def test_unshard_must_gather_over_all_copies():
    """ZeRO-3 by stages: UNSHARD brings the parts of both copies together, over dp and nothing else."""
    plan = plan_of(mode="fast", tp=2, pp=2, dp=2, zero=3)
    schedule = lower(schedule_for(plan), max_active_stages=1)
    assert prove(plan, schedule).ok
    for axis in ("tp", None):

        def change(ops, kind, stage, tp_rank, dp_rank, axis=axis):
            if kind is not Kind.UNSHARD or stage != 1:
                return ops
            return () if axis is None else tuple(replace(each, axis=axis) for each in ops)

        wrong = [
            finding for finding in prove(plan, schedule, step_program(change)).findings if finding.rule == VALUE_RULE
        ]
        assert [(finding.where, finding.action, finding.key) for finding in wrong] == [
            ("1UNSHARD", "1UNSHARD", "layout.dp")
        ]
