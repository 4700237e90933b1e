"""Blends: every sample comes from the source that is furthest behind its share, and any sample is found at once."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardproof.backend.data.blend import MOST_SHARES, Blend, choices, shares_of
from shardproof.backend.data.corpus import Corpus
from shardproof.backend.data.order import keyed, shuffled
from shardproof.backend.data.splits import bounds
from shardproof.core.base.errors import PlanError
from shardproof.core.plan.data_names import data_from, named_data, split_of
from shardproof.core.plan.plan import Plan

WEIGHTS = st.lists(st.integers(1, 60), min_size=1, max_size=5)


def brute_force(shares, num_samples):
    """Megatron's definition in exact numbers: `(source, number)` of every sample."""
    total, taken, found = sum(shares), [0] * len(shares), []
    for sample in range(num_samples):
        errors = [Fraction(share * max(sample, 1), total) - have for share, have in zip(shares, taken, strict=True)]
        source = errors.index(max(errors))
        found.append((source, taken[source]))
        taken[source] += 1
    return found


@given(WEIGHTS)
def test_any_sample_of_a_blend_is_that_of_counting_from_the_first(weights):
    shares = shares_of([Fraction(weight) for weight in weights])
    num_samples = 5 * sum(shares) + 3
    sources, numbers = Blend((), shares).chosen(np.arange(num_samples))
    assert list(zip(sources.tolist(), numbers.tolist(), strict=True)) == brute_force(shares, num_samples)


def test_three_to_seven_is_what_megatron_core_chooses():
    """Written down from `helpers.build_blending_indices` of megatron-core 0.16.1."""
    sources, numbers = Blend((), (3, 7)).chosen(np.arange(20))
    assert sources.tolist() == MEGATRON_3_7
    assert numbers.tolist() == [MEGATRON_3_7[:i].count(source) for i, source in enumerate(MEGATRON_3_7)]


MEGATRON_3_7 = [1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1]


def test_shares_are_whole_and_a_long_period_is_rounded():
    assert shares_of([Fraction("0.3"), Fraction("0.7")]) == (3, 7)
    assert shares_of([Fraction(2), Fraction(4)]) == (1, 2)
    rounded = shares_of([Fraction(1, 3), Fraction("0.123456789"), Fraction(1, 10**9)])
    assert abs(sum(rounded) - MOST_SHARES) <= 2 and rounded[2] == 1


def test_a_sample_a_trillion_samples_on_is_found_from_the_same_table():
    far, size = 10**12 + 7, len(choices((3, 7))[0])
    sources, numbers = Blend((), (3, 7)).chosen(np.array([far]))
    assert sources.tolist() == [MEGATRON_3_7[17]] and size == 20
    assert numbers.tolist() == [3 * 10**11 + 2 if MEGATRON_3_7[17] == 0 else 7 * 10**11 + 5]


# order


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_the_keyed_order_is_a_permutation(num_items, seed, epoch):
    assert sorted(keyed(np.arange(num_items), num_items, seed, epoch).tolist()) == list(range(num_items))


def test_the_keyed_order_stays_as_it_is_and_differs_by_seed_and_pass():
    """Recorded when it was made: checkpoints of runs on token files depend on it."""
    assert keyed(np.arange(8), 10**12, 1234, 0).tolist() == RECORDED
    orders = [keyed(np.arange(100), 100, seed, epoch).tolist() for seed, epoch in ((1, 0), (2, 0), (1, 1))]
    assert orders[0] != orders[1] != orders[2] != orders[0] and orders[0] != sorted(orders[0])


RECORDED = [
    *(438689840761, 600390096194, 805915695077, 540114822011, 260116031932, 449003475827),
    *(117849891409, 874564950603),
]


def test_places_of_the_keyed_order_are_not_related():
    """Of 10,000 neighbours some two are neighbours again in a random order, and half of them go upwards."""
    order = keyed(np.arange(10_000), 10_000, 5, 0)
    steps = np.diff(order)
    assert (np.abs(steps) == 1).sum() < 12 and abs((steps > 0).mean() - 0.5) < 0.02
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.04


def test_samples_of_several_passes_are_those_of_each():
    numbers = np.array([3, 12, 25, 4])
    expected = [int(keyed(np.array([n % 10]), 10, 9, n // 10)[0]) for n in numbers.tolist()]
    assert shuffled(numbers, 10, 9, in_memory=False).tolist() == expected


# names


def test_names_of_data():
    assert [(float(weight), name) for weight, name in named_data("30 a 70 'b c'")] == [(30, "a"), (70, "b c")]
    for one in ("a b", "3 little pigs.txt", "don't", "python-stdlib", "1/2 a", "nan a"):
        assert named_data(one) == ((1, one),)


def test_a_plan_names_files_from_its_own_folder(tmp_path):
    text = (
        'model = { preset = "tiny-gpt" }\nbatch = { global = 1, micro = 1, sequence = 8 }\n'
        '[train]\ndata = "0.3 a 0.7 python-stdlib"\nvalidation_data = "held out"\n'
    )
    plan = Plan.from_toml(text, str(tmp_path / "plan.toml"))
    assert plan.train.data == f"0.3 {tmp_path}/a 0.7 python-stdlib"
    assert plan.train.validation_data == f"{tmp_path}/held out"
    assert Plan.from_toml(plan.to_toml()) == plan
    assert data_from(tmp_path / "x y", "0.3 a 0.7 python-stdlib") == f"0.3 '{tmp_path}/x y/a' 0.7 python-stdlib"
    assert data_from(tmp_path, "held out") == f"{tmp_path}/held out"


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ('split = "90,10"\nvalidation_data = "v"', "Leave one of the two out"),
        ('split = "90;10"', "one to three numbers with commas"),
        ('split = "100"', "none for validation"),
        ('split = "0,0,0"', "add up to 0"),
        ('data = "0 a 1 b"', "data has a with weight 0"),
        ('validation_data = "1 a -1 b"', "validation_data has b with weight -1"),
    ],
)
def test_shares_that_mean_nothing_are_refused(train, message):
    text = 'model = {{ preset = "tiny-gpt" }}\nbatch = {{ global = 1, micro = 1, sequence = 8 }}\n[train]\n{}\n'
    with pytest.raises(PlanError, match=message):
        Plan.from_toml(text.format(train))


def test_split_is_megatrons():
    assert split_of("949,50,1") == (0.949, 0.05, 0.001)
    assert split_of("9, 1") == (0.9, 0.1, 0)


@pytest.mark.parametrize(
    "text, count, expected", [("70,20,10", 15, (10, 13)), ("70,20,10", 95, (66, 85)), ("1,1", 7, (4, 7))]
)
def test_documents_are_cut_where_megatrons_sums_of_floats_are(text, count, expected):
    """Its `normalize` and `convert_split_vector_to_split_matrix` as in v0.15: 0.9 of 15 would be 14."""
    assert bounds(split_of(text), count) == expected


# a corpus of several


def test_samples_of_a_blend_are_those_of_its_parts_in_turn(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(65, 91)) * 20)
    np.arange(1000, 1600, dtype="<u2").tofile(tmp_path / "b.bin")
    blend = Corpus.load(f"1 {tmp_path}/a.txt 2 {tmp_path}/b.bin")
    parts = [Corpus.load(str(tmp_path / name)) for name in ("a.txt", "b.bin")]
    tokens, targets = blend.batch(0, 150, 8, 3)
    counts = [0, 0]
    for row, ahead in zip(tokens, targets, strict=True):
        source = int(row[0] >= 1000)
        own, own_ahead = parts[source].batch(counts[source], counts[source] + 1, 8, 3)
        assert torch.equal(row, own[0]) and torch.equal(ahead, own_ahead[0])
        counts[source] += 1
    assert counts == [50, 100]
    assert torch.equal(blend.batch(70, 80, 8, 3)[0], tokens[70:80])
    assert blend.fingerprint not in {part.fingerprint for part in parts}
    assert Corpus.load(f"2 {tmp_path}/a.txt 1 {tmp_path}/b.bin").fingerprint != blend.fingerprint
    assert Corpus.load(f"0.5 {tmp_path}/a.txt 1 {tmp_path}/b.bin").fingerprint == blend.fingerprint
    held_out = blend.validation_batch(0, 3, 8)[0]
    assert (held_out[:, 0] >= 1000).tolist() == [True, False, True]


def test_validation_may_be_files_of_their_own_and_a_split_counts_documents(tmp_path):
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_text(chr(97 + i) * 9)
    (tmp_path / "held").write_text("0123456789" * 3)
    own = Corpus.load(str(tmp_path / "held"), validation_data=str(tmp_path / "00.txt"))
    assert bytes(own.train.ids) == b"0123456789" * 3 and bytes(own.validation.ids) == b"a" * 9
    (tmp_path / "held").unlink()
    corpus = Corpus.load(str(tmp_path), split="10,5,5")
    assert bytes(corpus.train.ids).startswith(b"aaaaaaaaa\nb") and bytes(corpus.train.ids).endswith(b"j" * 9)
    assert bytes(corpus.validation.ids).startswith(b"k") and bytes(corpus.validation.ids).endswith(b"o" * 9)
