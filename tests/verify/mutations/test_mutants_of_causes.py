"""Mutants of the backend whose first cause is easily misnamed: each is placed, classed, and
named in the words that help."""

from __future__ import annotations

from helpers.gates import sampled
from shardproof.verify.mutations import mutants_causes, mutants_mistaken
from shardproof.verify.mutations.catalog import chosen
from shardproof.verify.mutations.run import judge_mutants

MUTANTS = (
    *mutants_causes.MUTANTS,
    *mutants_mistaken.MUTANTS,
    *chosen("XX95,XX96,XX97"),
)
WORDS = {
    "XX60": "bit flip: one bit of 1 element flipped (bit 9 of fp32, at [0, 7]).",
    "XX61": "other values: off by 1.0e+00 of their norm; the right and the wrong ones are whole multiples of 0.001",
    "XX62": "stale: those of step 1, in the shard of rank 1, in 2,072 of 6,216 elements: [86:173, 0:24].",
    "XX63": (
        "local mean: the whole sum is divided by the 26 tokens of the part of dp rank 0 (samples 0-1), and not "
        "by all 51."
    ),
    "XX63-b": "local mean: the mean of 2 means, each over its own number of tokens, 26 of the part of dp rank 0",
    "XX64": "scaled: the right values times 1/2, as tp is.",
    "XX64-c": "scaled: the right values times 1/2, as tp is.",
    "XX65": (
        "1UNSHARD, gathered weight layers.1.mlp.up.weight: stale: those of step 1, in the shard of rank 4, in "
        "640 of 2,304"
    ),
    "XX66": "0B0, recomputed activation layers.1.attention.core of sample 0: scaled: the right values times 7/10.",
    "XX66-b": "0B0, recomputed activation layers.1.mlp of sample 0: doubled: the right values times 2",
    "XX66-c": (
        "0B0, recomputed activation layers.1.attention.norm of sample 0: permuted: the right values in other places."
    ),
    "XX90": "0B1, activation gradient layers.0.output of sample 1: permuted: the values of sample 0.",
    "XX91": "permuted: the right ones of other places, 1 further on in memory.",
    "XX92": "permuted: the values of layers.0.",
    "XX93": "permuted: the values of layers.1.attention.query_norm.weight.",
    "XX94": "0F0, head.losses of sample 0: other values: ",
    "XX95": "0B0, activation gradient layers.1.mlp.norm of sample 0: missing: without the part of the shared experts.",
    "XX96": "0STEP, weight layers.0.attention.norm.weight: doubled: the update twice.",
    "XX97": "0STEP, scalar grad_norm: order only: the norm of gradients that were rounded to bf16.",
}


def test_every_bug_has_its_words() -> None:
    """A few of its variants are left to the mutation command, which judges all."""
    assert {name[:4] for name in WORDS} == {mutant.id[:4] for mutant in MUTANTS}


@sampled("mutant", [each for each in MUTANTS if each.id in WORDS], ids=lambda mutant: mutant.id, on_push=3)
def test_a_first_cause_is_named_where_and_what_it_is(mutant) -> None:
    score = judge_mutants([mutant])
    (verdict,) = score.verdicts
    assert not score.false_alarms and verdict.located and WORDS[mutant.id] in verdict.words
