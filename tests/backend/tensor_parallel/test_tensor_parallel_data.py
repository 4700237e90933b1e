"""Data inside a tensor-parallel group: one member opens them, all have them; and the zig-zag part of a
context-parallel rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.plans import product_plan
from shardproof.backend.data.corpus import Corpus
from shardproof.backend.ranks.training_rank import TrainingRank
from shardproof.backend.tensor_parallel.data import (
    TensorSpec,
    broadcast,
    context_part,
    context_positions,
    context_whole,
)
from shardproof.backend.trainer import Trainer
from shardproof.backend.transport.memory import MemoryWorld, run_threads
from shardproof.core.base.errors import PlanError, RankFailure
from shardproof.core.model.model_presets import model_preset
from shardproof.core.plan.plan import Plan
from shardproof.core.plan.train import Train
from shardproof.core.program import Collective, load_batch

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
)


def mixed() -> dict[str, torch.Tensor]:
    """Every dtype; a scalar, empty tensors of 1 to 3 dimensions, odd byte counts before wide
    dtypes, a transposed one."""
    tensors = {f"{dtype} {i}": (torch.arange(5 + i) % 2).to(dtype) for i, dtype in enumerate(DTYPES)}
    return {
        **tensors,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, dtype=torch.int64),
        "zero in the middle": torch.empty(3, 0, 2, dtype=torch.bfloat16),
        "zero at the end": torch.empty(4, 0),
        "transposed": torch.arange(6).view(2, 3).t(),
        "five dimensions": torch.arange(12.0).view(1, 2, 1, 3, 2),
    }


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, tuple]:
    """What the tensors are, as plain Python: fp8 does not pickle."""
    return {
        name: (str(each.dtype), tuple(each.shape), each.contiguous().reshape(-1).view(torch.uint8).tolist())
        for name, each in tensors.items()
    }


def broadcast_job(transport, payload):
    """What arrives over a group of the world's ranks in reverse, with and without specs."""
    source, known = payload
    group = transport.group("g", "tp", range(transport.world_size)[::-1])
    tensors = mixed()
    specs = {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} if known else None
    arrived = broadcast(tensors if group.rank == source else None, group, source=source, specs=specs)
    found = bits(arrived)
    arrived["scalar"].add_(1)  # in a member's own copy
    group.barrier()
    return found, float(arrived["scalar"]) - float(tensors["scalar"])


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("size", "source"), [(1, 0), (2, 0), (3, 2), (5, 1)])
def test_any_dtypes_and_shapes_arrive_from_any_member(size, source, known):
    assert run_threads(MemoryWorld(size, timeout_s=60), broadcast_job, (source, known)) == [(bits(mixed()), 1.0)] * size


@pytest.mark.parametrize("known", [True, False])
def test_gloo_brings_them_too(known, workers):
    assert workers(3, "gloo").run(broadcast_job, (1, known)) == [(bits(mixed()), 1.0)] * 3


def nothing_job(transport, _):
    group = transport.group("g", "tp", range(transport.world_size))
    return broadcast({} if group.rank == 0 else None, group)


def test_nothing_at_all_is_a_batch_too():
    assert run_threads(MemoryWorld(2, timeout_s=60), nothing_job, None) == [{}, {}]


def refused_job(transport, case):
    group = transport.group("g", "tp", range(transport.world_size))
    x = torch.zeros(2, 3)
    tensors = {"both": {"x": x}, "none": None, "other": {"x": x} if group.rank == 0 else None}[case]
    broadcast(tensors, group, specs={"x": TensorSpec((2, 4 if case == "other" else 3), torch.float32)})


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("both", "this one was given some, but member 0 is the source"),
        ("none", "this one was given none, but it is the source"),
        ("other", r"broadcast expects x \[2, 4\] float32, but the source has x \[2, 3\] float32"),
    ],
)
def test_the_wrong_member_and_other_tensors_are_refused(case, message):
    with pytest.raises(RankFailure, match=message):
        run_threads(MemoryWorld(2, timeout_s=60), refused_job, case)


@given(cp=st.integers(1, 8), chunks=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_context_parts_cover_every_document_once_and_balance_the_causal_work(cp, chunks):
    documents = [2 * cp * chunk for chunk in chunks]
    sequence = sum(documents)
    x = torch.arange(2 * sequence * 3).view(2, sequence, 3)
    parts = [context_part(x, cp, rank, documents=documents) for rank in range(cp)]
    assert torch.equal(context_whole(parts, documents=documents), x)
    within = torch.cat([torch.arange(length) for length in documents])  # a token attends to that many before it
    work = {int(within[context_positions(sequence, cp, rank, documents=documents)].sum()) for rank in range(cp)}
    assert len(work) == 1 and {part.shape[1] for part in parts} == {sequence // cp}


def test_a_sequence_that_cannot_be_cut_says_how_long_it_must_be():
    with pytest.raises(ValueError, match=r"cp=3 cuts into 6 equal chunks, but 20 tokens do not divide\. Pad to 24"):
        context_positions(20, 3, 0)
    with pytest.raises(ValueError, match=r"documents of \[4, 8\] tokens are 12 together, but the sequence has 16"):
        context_positions(16, 2, 0, documents=[4, 8])
    whole = torch.zeros(1, 5)
    assert context_part(whole, 1, 0) is whole


def plan_of(tp=1, dp=1, data=__file__) -> Plan:
    return product_plan(
        model=model_preset("tiny-gpt"), samples=4, sequence=16, dtype="fp32", steps=0, data=data, tp=tp, dp=dp
    )


def batches_job(transport, plan):
    """Tokens of the first step of this rank, whether it opened the data, and what it sent for them."""
    transport.recorder.enabled = True
    rank = TrainingRank(transport, plan)
    batch = rank.batches.training(0, 1.0)
    return torch.cat([part.tokens for part in batch]), rank.batches.corpus is not None, transport.recorder.events


@pytest.mark.parametrize("ignore_token", [None, 32])
def test_only_the_first_rank_of_a_group_opens_the_data_and_all_train_on_it(ignore_token):
    plan = plan_of(tp=2, dp=2)
    if ignore_token is not None:
        plan = replace(plan, train=replace(plan.train, ignore_token=ignore_token))
    tokens, _ = Corpus.load(__file__).batch(0, 4, 16, plan.train.seed)
    for global_rank, (own, opened, events) in enumerate(run_threads(MemoryWorld(4, timeout_s=60), batches_job, plan)):
        here = plan.layout.coordinates(global_rank)
        assert torch.equal(own, tokens[slice(*plan.samples_of(here["dp"]))])
        assert opened == (here["tp"] == 0)
        assert tuple(operation for _, operation in events) == load_batch(plan, here["tp"])


def test_a_batch_is_16_bytes_a_token_to_every_other_member():
    assert load_batch(plan_of(tp=4, dp=1)) == (Collective("data", "all_to_all", "tp", 4, 3 * 4 * 16 * 16),)
    assert load_batch(plan_of(tp=4), tp_rank=2) == (Collective("data", "all_to_all", "tp", 4, 0),)
    assert load_batch(plan_of(dp=2)) == ()
    counting = replace(plan_of(tp=4), train=Train(steps=0, ignore_token=32))
    assert load_batch(counting) == (Collective("data", "all_to_all", "tp", 4, 3 * (4 * 16 * 16 + 8)),)


@pytest.mark.parametrize("transport", ["memory", "gloo"])
def test_missing_data_is_the_users_problem_on_every_transport(transport):
    with pytest.raises(PlanError, match=r"train\.data='no/such' is no file and no folder"):
        Trainer(plan_of(tp=2, data="no/such"), transport=transport).fit()
