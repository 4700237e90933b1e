"""Which tokens meet at an expert, and the nested trees that its gradients are summed in, against brute force."""

from __future__ import annotations

import itertools
import random
from functools import partial

import pytest

from helpers.plans import plan
from shardproof.core.base.reduction import CarryTree, NestedTree
from shardproof.core.layout.routed_tokens import Piece
from shardproof.core.model.model import ModelSpec
from shardproof.core.model.parameters import parameters
from shardproof.core.program.expert_tokens import expert_nodes, num_token_blocks, routed_tokens

MODEL = ModelSpec(*("m", 2, 48, 64, 6, 6, 8, 256, 64), num_experts=6, experts_per_token=2, expert_ffn_hidden_size=24)


plan_of = partial(plan, model=MODEL, samples=6, sequence=96, schedule="1F1B")


LAYOUTS = [
    {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True},
    {"tp": 3, "cp": 2, "ep": 6, "etp": 1, "sequence_parallel": True},
    {"tp": 3, "cp": 2, "dp": 2, "ep": 3, "etp": 1},
    {"cp": 3, "dp": 2, "ep": 1},
    {"tp": 2, "cp": 3, "dp": 2, "ep": 2},
    {"dp": 6, "ep": 2, "etp": 3},
    {"tp": 2, "dp": 2, "ep": 2, "etp": 1, "order": "dp-tp-cp-ep-pp"},
]


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_every_token_is_sent_by_one_rank_and_seen_by_one_copy_of_the_experts(degrees, mode):
    plan = plan_of(mode=mode, **degrees)
    tokens, layout = routed_tokens(plan), plan.layout
    sent = [tokens.own(tp_rank) for tp_rank in range(layout.tp)]
    assert [lo for lo, _ in sent] == [0, *(hi for _, hi in sent[:-1])] and sent[-1][1] == 96 // layout.cp
    if mode == "fast":
        return
    copies = layout.expert_groups("tp-ep")
    assert sorted(rank for copy in copies for rank in copy) == list(range(layout.world_size))
    seen = [
        (dp_rank, token)
        for copy in copies
        for dp_rank, pieces in tokens.seen(layout, copy[0]).items()
        for piece in pieces
        for token in range(piece.first, piece.last)
    ]
    assert sorted(seen) == list(itertools.product(range(layout.dp), range(96)))
    assert all(piece.first // 8 == (piece.last - 1) // 8 == piece.block for piece in tokens.pieces(0, 0))
    assert tokens.split_piece(layout) is None


def test_pieces_of_a_context_parallel_rank_lie_in_its_early_and_its_late_chunk():
    tokens = routed_tokens(plan_of(cp=3, ep=3))
    assert tokens.pieces(0, 1) == (Piece(2, 16, 24), Piece(3, 24, 32), Piece(8, 64, 72), Piece(9, 72, 80))


@pytest.mark.parametrize("degrees", [*LAYOUTS, {"pp": 2, "dp": 2, "schedule": "DualPipe", "samples": 8}], ids=str)
def test_what_copies_hold_before_they_meet_are_the_nodes_of_whatever_they_saw(degrees):
    """Brute force: every (sample, block) that a copy sees goes into a tree one by one; all
    copies together finish it."""
    plan = plan_of(**degrees)
    num_samples, num_blocks = plan.batch.global_size, num_token_blocks(plan)
    for stage, pp_ranks in enumerate(plan.placement.ranks):
        joined: NestedTree[int] = NestedTree(num_samples, num_blocks, lambda left, right: left + right)
        firsts = [
            copy[0] for copy in plan.layout.expert_groups("tp-ep") if plan.layout.coordinates(copy[0])["pp"] in pp_ranks
        ]
        for rank in firsts:
            own: NestedTree[int] = NestedTree(num_samples, num_blocks, lambda left, right: left + right)
            for dp_rank, pieces in routed_tokens(plan).seen(plan.layout, rank).items():
                copy = plan.copy_of(stage, dp_rank=dp_rank, pp_rank=plan.layout.coordinates(rank)["pp"])
                for sample in range(*plan.copy_samples(stage, copy)):
                    for block in {piece.block for piece in pieces}:
                        own.insert(sample, (block, block + 1), 1)
            nodes = expert_nodes(plan, stage, rank)
            assert (
                nodes.whole == own.samples.nodes
                and nodes.parts == own.parts
                and len(nodes) == len(own.samples.nodes) + len(own.parts)
            )
            for node in nodes.whole:
                joined.samples.insert(node, own.samples.value(node))
            for part in nodes.parts:
                joined.insert(*part, own.part(*part))
        assert joined.root() == num_samples * num_blocks


def test_a_nested_tree_adds_blocks_of_samples_in_one_order_whatever_comes_first():
    def add(left: str, right: str) -> str:
        return f"({left}{right})"

    blocks: CarryTree[str] = CarryTree(3, add)
    for block in range(3):
        blocks.insert((block, block + 1), f"s{block}")
    expected: CarryTree[str] = CarryTree(5, add)
    for sample in range(5):
        expected.insert((sample, sample + 1), blocks.root().replace("s", f"{sample}."))
    leaves = list(itertools.product(range(5), range(3)))
    for seed in range(20):
        random.Random(seed).shuffle(leaves)
        tree: NestedTree[str] = NestedTree(5, 3, add)
        for number, (sample, block) in enumerate(leaves):
            tree.insert(sample, (block, block + 1), f"{sample}.{block}")
            if number < 14:
                with pytest.raises(ValueError, match="unfinished"):
                    tree.root()
        assert tree.root() == expected.root()


def test_experts_are_sliced_by_ep_and_their_width_by_etp():
    plan = plan_of(dp=6, ep=3, etp=2)
    shapes = {p.name: (p.shape, p) for p in parameters(plan.model) if p.expert and p.name.startswith("layers.1.")}
    for name, (shape, parameter) in shapes.items():
        found = {
            (ep, etp): plan.leaf_sizes.expert_slices(parameter, ep=3, ep_rank=ep, etp=2, etp_rank=etp)
            for ep, etp in itertools.product(range(3), range(2))
        }
        dim = {"up": 1, "down": 2}[name.split(".")[-2]]
        half = shape[dim] // 2
        for (ep, etp), slices in found.items():
            assert slices[0] == slice(2 * ep, 2 * ep + 2) and slices[dim] == slice(half * etp, half * (etp + 1)), name


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_places_on_the_expert_grid_are_those_of_its_groups(degrees):
    layout = plan_of(**degrees).layout
    for axes in ("tp", "ep", "dp", "tp-ep"):
        for rank in range(layout.world_size):
            group = layout.expert_group_of(rank, axes)
            here = layout.expert_coordinates(rank)
            if axes in here:
                assert [layout.expert_coordinates(member)[axes] for member in group] == list(range(len(group)))
                assert group.index(rank) == here[axes]
