"""A wrong sum is explained by its parts: every rank, sequence or leaf that is missing, doubled or scaled is named."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.plans import plan
from shardproof.core.model.model_presets import model_preset
from shardproof.core.model.parameters import parameters
from shardproof.core.plan.plan import Plan
from shardproof.verify.causes.norms import Squares, Suspects, explained_by_squares
from shardproof.verify.causes.sums import explained_by_columns, explained_by_moved_use, explained_by_parts
from shardproof.verify.run.contributions import Contributions, Part

SHAPE = (12, 9)
SEQUENCE = 24


def plan_of(samples: int = 6, micro: int = 1, **degrees: int) -> Plan:
    return plan(
        model=model_preset("tiny-gpt-6h"),
        samples=samples,
        micro=micro,
        sequence=SEQUENCE,
        gradient_token_block=4,
        reduction_token_block=2,
        **degrees,
    )


def summands(parts: list[Part], seed: int = 0) -> Contributions:
    values = np.random.default_rng(seed).normal(size=(len(parts), *SHAPE))
    return Contributions(tuple(parts), values)


def reported(plan: Plan, own: Contributions, factors: list[float], rank: int = 0, scale: float = 0.25):
    """What is said of the sum of parts times factors, rounded as a run rounds it."""
    total = [scale * np.tensordot(each, own.values, 1) for each in (np.ones(len(factors)), factors)]
    expected, found = (each.astype(np.float32) for each in total)
    return explained_by_parts(plan, rank, expected, found, own, scale=scale)


SAMPLES = [Part(sample, (lo, lo + 4)) for sample in range(6) for lo in range(0, SEQUENCE, 4)]
LEAVES = [Part(leaf=leaf, num_leaves=6) for leaf in range(6)]


@pytest.mark.parametrize(
    ("degrees", "factor", "kind", "words"),
    [
        ({"dp": 3}, lambda part: part.sample in (2, 3), "missing", "only the part of dp rank 1 (samples 2-3)"),
        ({"dp": 3}, lambda part: part.sample not in (2, 3), "missing", "without the part of dp rank 1 (samples 2-3)"),
        (
            {"dp": 3},
            lambda part: 1 + (part.sample >= 4),
            "doubled",
            ("the right sum with the part of dp rank 2 (samples 4-5) twice"),
        ),
        (
            {"dp": 2},
            lambda part: 1 if part.sample < 3 else 0.5,
            "scaled",
            ("the part of dp rank 1 (samples 3-5) times 1/2"),
        ),
        (
            {"dp": 6},
            lambda part: {0: 2, 5: 0}.get(part.sample, 1),
            "permuted",
            ("sample 0) twice, and without the part of dp rank 5"),
        ),
        (
            {"dp": 2},
            lambda part: 2 * (part.sample < 3),
            "missing",
            "without the part of dp rank 1 (samples 3-5), and the part of dp rank 0",
        ),
        ({"cp": 3}, lambda part: 8 <= part.tokens[0] < 16, "missing", "only the part of cp rank 2"),
        (
            {"dp": 2, "cp": 3},
            lambda part: part.sample < 3 and part.tokens[0] in (4, 16),
            "missing",
            ("(samples 0-2), cp rank 1"),
        ),
        ({"dp": 2}, lambda part: part.sample != 4, "missing", "without the part of microbatch 1 of dp rank 1"),
        (
            {"dp": 2},
            lambda part: (part.sample, part.tokens) != (4, (8, 12)),
            "missing",
            ("without the part of sample 4, the tokens from 8"),
        ),
    ],
)
def test_gradients_name_ranks_samples_and_tokens(degrees: dict[str, int], factor, kind: str, words: str) -> None:
    found = reported(plan_of(**degrees), summands(SAMPLES), [float(factor(part)) for part in SAMPLES])
    assert found is not None and found[0] == kind and words in found[1]


@pytest.mark.parametrize(
    ("tp", "lost", "words"),
    [(2, {3, 4, 5}, "without the part of tp rank 1"), (3, {4, 5}, ("without the part of tp rank 2"))],
)
def test_leaves_of_products_name_tensor_parallel_ranks(tp: int, lost: set[int], words: str) -> None:
    assert reported(plan_of(tp=tp), summands(LEAVES), [float(part.leaf not in lost) for part in LEAVES]) == (
        "missing",
        words,
    )


def test_a_bias_that_every_rank_adds_is_what_is_added_to_the_product() -> None:
    own = summands([*LEAVES, Part(rest=True)])
    found = reported(plan_of(tp=3), own, [1.0] * 6 + [3.0])
    assert found == ("scaled", "the right sum with the part of what is added to the product times 3")


@settings(max_examples=25)
@given(st.data(), st.sampled_from([2, 3, 5, 6]), st.integers(0, 2**32 - 1))
def test_any_whole_multiples_of_ranks_are_found_and_never_called_otherwise(
    data: st.DataObject, dp: int, seed: int
) -> None:
    plan = plan_of(samples=2 * dp, dp=dp)
    own = summands([Part(sample) for sample in range(2 * dp)], seed)
    by_rank = data.draw(
        st.lists(st.sampled_from([0, 1, 2]), min_size=dp, max_size=dp).filter(lambda each: each != [1] * dp)
    )
    found = reported(
        plan,
        own,
        [float(by_rank[sample // 2]) for sample in range(2 * dp)],
        rank=next((r for r, n in enumerate(by_rank) if n), 0),
    )
    assert found is not None
    if not any(by_rank):
        assert found == ("missing", "without any of its parts")
    elif len(set(by_rank)) == 1:
        assert found[0] == ("doubled" if by_rank[0] == 2 else "scaled")
    elif 0 not in by_rank:
        assert found[0] == "doubled"
    else:
        assert found[0] in (("missing",) if 2 not in by_rank else ("missing", "permuted"))
        assert (
            all(f"dp rank {rank} " in found[1] for rank, factor in enumerate(by_rank) if factor == 0)
            or "more" in found[1]
            or "only" in found[1]
        )


def test_what_no_multiple_explains_is_not_explained() -> None:
    own, plan = summands(SAMPLES), plan_of(dp=3)
    right = own.values.sum(0).astype(np.float32)
    noise = right + np.random.default_rng(7).normal(size=SHAPE).astype(np.float32)
    assert explained_by_parts(plan, 0, right, noise, own, scale=1.0) is None
    rounding = np.nextafter(right, np.float32(9))
    assert explained_by_parts(plan, 0, right, rounding, own, scale=1.0) is None


def test_parts_that_were_rounded_to_bf16_before_they_were_added() -> None:
    own, plan = summands([Part(sample) for sample in range(6)]), plan_of(dp=3)
    ranks = own.values.reshape(3, 2, *SHAPE).sum(1).astype(np.float32)
    narrow = ((ranks.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32)
    found = explained_by_parts(plan, 0, own.values.sum(0).astype(np.float32) / 3, narrow.sum(0) / 3, own, scale=1 / 3)
    assert found is not None and found[0] == "order only" and "bf16" in found[1]


def test_one_number_names_the_rank_that_is_missing_in_a_loss() -> None:
    losses = np.random.default_rng(3).uniform(5, 6, size=(6, 1))
    own, plan = Contributions(tuple(Part(sample) for sample in range(6)), losses), plan_of(dp=3)
    right = losses.sum() / 6
    for found, kind, words in [
        (losses[:4].sum() / 6, "missing", "without the part of dp rank 2 (samples 4-5)"),
        (losses[2:4].sum() / 2, "missing", "dp rank 1 (samples 2-3) times 3"),
        ((losses.sum() + losses[5, 0]) / 6, "doubled", "microbatch 1 of dp rank 2 twice"),
    ]:
        reported = explained_by_parts(plan, 1, np.array([right]), np.array([found]), own, scale=1 / 6)
        assert reported is not None and reported[0] == kind and words in reported[1]


def test_uses_of_a_table_are_missing_or_in_other_places() -> None:
    own = summands([Part(sample, use=use) for sample in range(3) for use in ("embedding", "output")])
    lost = reported(plan_of(pp=2), own, [1.0, 0.0] * 3)
    assert lost == ("missing", "without the part of its use as output")
    uses = own.values.reshape(3, 2, *SHAPE).sum(0)
    right, crossed = uses.sum(0).astype(np.float32), (uses[0] + np.roll(uses[1], 3, 0)).astype(np.float32)
    box = (slice(0, 12), slice(0, 9))
    assert explained_by_moved_use(right, crossed, own, box, 1.0) == (
        "permuted",
        "with its use as output in other places",
    )
    assert explained_by_moved_use(right, np.float32(2) * crossed, own, box, 1.0) is None


def test_columns_name_the_update_that_is_scaled_and_values_that_were_added() -> None:
    rng = np.random.default_rng(0)
    old, update = (rng.normal(size=SHAPE).astype(np.float32) for _ in range(2))
    columns, extra = {"the decay": -0.01 * old, "the update": update}, {"those of the step before": ("stale", old)}
    right = 0.99 * old + update
    for wrong, kind, words in [
        (0.99 * old + 3 * update, "scaled", "the update times 3"),
        (old + update, "missing", "without the decay"),
        (right + old, "stale", "with those of the step before added"),
    ]:
        found = explained_by_columns(
            right,
            wrong.astype(np.float32),
            columns if kind != "stale" else {},
            extra if kind == "stale" else {},
            dtype="fp32",
        )
        assert found == (kind, words)


def test_an_update_is_named_before_a_thousandfold_decay_that_comes_to_the_same() -> None:
    """Of a norm's weights, which are all ones, and whose first update of AdamW may have one sign."""
    old, update = np.ones(24, np.float32), np.full(24, -5e-3, np.float32)
    right, extra = old + update, {"a weight decay that it does not have": ("scaled", -1e-5 * old)}
    columns = {"the weight decay": np.zeros(24), "the update": update.astype(np.float64)}
    found = explained_by_columns(right, old + 2 * update, columns, extra, dtype="fp32")
    assert found == ("doubled", "the update twice")
    decayed = explained_by_columns(right, right - np.float32(1e-5) * old, columns, extra, dtype="fp32")
    assert decayed is not None and decayed[0] == "scaled"


def test_parts_of_a_layer_with_experts_name_the_shared_ones() -> None:
    """Single experts and leaves are too many here for a fit."""
    routed = [Part(leaf=leaf, num_leaves=24, expert=expert) for leaf in range(24) for expert in range(4)]
    own = summands([*LEAVES, *routed, Part(use="the layer that no rank cuts"), Part(rest=True)])
    for lost, words in ((LEAVES, "the shared experts"), (routed, "the routed experts")):
        factors = [0.0 if part in lost else 1.0 for part in own.parts]
        assert reported(plan_of(dp=2), own, factors) == ("missing", f"without the part of {words}")


@pytest.mark.parametrize(
    ("counts", "kind", "words"),
    [
        (
            lambda each: 3 if each.cut is None else 1,
            "scaled",
            ("the parameters that tensor parallelism does not cut are counted 3 times"),
        ),
        (lambda each: 2 if each.name.startswith("layers.1.") else 1, "doubled", "layers.1 are counted twice"),
        (lambda each: 0 if each.name == "head.norm.weight" else 1, "missing", "head.norm.weight are not counted"),
        (lambda each: Fraction(1, 3) if each.cut else 1, "scaled", "cuts are counted 1/3 times"),
    ],
)
def test_a_norm_names_the_parameters_that_are_counted_wrongly(counts, kind: str, words: str) -> None:
    plan, rng = plan_of(tp=3), np.random.default_rng(1)
    squares = {each.name: rng.normal(size=each.shape) ** 2 for each in parameters(plan.model)}
    total = {each.name: float(squares[each.name].sum()) for each in parameters(plan.model)}
    wrong = sum(float(counts(each)) * total[each.name] for each in parameters(plan.model))
    known, right = Squares.of_values(squares, {}), sum(total.values()) ** 0.5
    found = explained_by_squares(right, wrong**0.5, known, Suspects.of_plan(plan, known))
    assert found is not None and found[0] == kind and words in found[1]
    assert explained_by_squares(right, right * 1.2345, known, Suspects.of_plan(plan, known)) is None
