"""The first tensor of a run that is not right, and what happened to it: both programs run again and keep
the values that explain it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ...backend.launching.launch import scratch_folder
from ...core.base.digest import bit_words
from ...core.plan.plan import Plan
from ..ledger.compare import Difference, Values, compare, ranks_of
from ..ledger.duplicates import as_two_runs, is_of_all, sources_of
from ..ledger.ledger import ACTIVATION, RECOMPUTED, Key, Piece, RunLedger
from ..run.proof_run import PARTS_FILE, ProofJob, TransportName, one_device, run_ledger
from .captured import Captured, context_of, part_of

CAPTURE_BYTES = 2**28
"""Values of differing tensors that a second run keeps, over all ranks: the first ones in dataflow order."""

Progress = Callable[[str], None]


def run_against(
    reference: RunLedger, job: ProofJob, transport: TransportName, *, progress: Progress = lambda line: None
) -> tuple[RunLedger, list[Difference]]:
    """What the ranks of a job's plan computed, and every tensor of it that is not that of the reference,
    `one_device` of the same plan.

    The reference is finite, so a run that is not has a first tensor that differs, as any other wrong run.
    """
    job = replace(job, skips_not_finite=True)
    run = run_ledger(job, transport)
    differences = compare(reference, run, job.plan.named_shapes)
    if differences:
        progress(f"{len(differences)} tensors differ: both run again and keep the values of the first of them")
        one = replace(job, plan=one_device(job.plan), fault=None, wraps_rank=None, skips_not_finite=False)
        differences = _with_values(differences, reference, run, one, job, transport)
    return run, differences


def _with_values(
    differences: Sequence[Difference],
    reference: RunLedger,
    run: RunLedger,
    one: ProofJob,
    many: ProofJob,
    transport: TransportName,
) -> list[Difference]:
    """The differences with their values, as far as the capture budget reaches, and the relation of the first. The
    folder of values is removed in any case."""
    chosen = _within_budget(differences, reference, run, many.plan.world_size)
    with scratch_folder("proof-") as parent:
        folders = parent / "one", parent / "many"
        for folder in folders:
            folder.mkdir()
        parts_of = _summed(differences[0].key, reference, run) if isinstance(one.plan, Plan) else None
        parts_of = parts_of if parts_of in chosen else None
        right = run_ledger(replace(one, capture=chosen, folder=folders[0], parts_of=parts_of), "memory")
        wrong = run_ledger(replace(many, capture=chosen, folder=folders[1]), transport)
        if first_ranks := differences[0].global_ranks:
            dtype = many.plan.part_of(first_ranks[0]).precision.dtype
            right, wrong = as_two_runs(differences[0].key, right, wrong, first_ranks[0], dtype=dtype, folder=folders[0])
        explained = {each.key for each in differences if each.key in chosen and each.key in right.pieces}
        first, *rest = [explain(each, right, wrong) if each.key in explained else each for each in differences]
        if first.values is not None:
            captured = Captured(
                many.plan, right, wrong, run, frozenset(each.key for each in differences), folders[0] / PARTS_FILE
            )
            first = replace(first, relation=captured.relation(first))
        return [first, *rest]


def _summed(key: Key, reference: RunLedger, run: RunLedger) -> Key | None:
    """The tensor that one device records as a sum; what was computed again is the sum that it was forward,
    if the device shows it."""
    if key.phase != RECOMPUTED:
        return key
    forward = key._replace(phase=ACTIVATION)
    return forward if is_of_all(reference.pieces.get(forward, ()), run.pieces[key]) else None


def _within_budget(
    differences: Sequence[Difference], reference: RunLedger, run: RunLedger, world_size: int
) -> frozenset[Key]:
    """The tensors to keep: the first that differs, what explains it, and as many of the others
    as there is room for."""
    first = differences[0].key
    sources = [*sources_of(first), *context_of(_summed(first, reference, run) or first, reference)]
    wanted = [first, *sources] if differences[0].problem == "differs" else []
    wanted += [difference.key for difference in differences if difference.problem == "differs"]
    chosen: set[Key] = set()
    used = 0
    for key in dict.fromkeys(wanted):
        if (pieces := reference.pieces.get(key) or run.pieces.get(key)) is None:
            continue
        used += 4 * math.prod(pieces[0].shape) * (world_size + 1)
        if chosen and used > CAPTURE_BYTES:
            break
        chosen.add(key)
    return frozenset(chosen)


def explain(difference: Difference, reference: RunLedger, run: RunLedger) -> Difference:
    """The same difference with the ranks that really hold other bits and where values differ. Both
    ledgers captured this tensor.

    Ranks are left empty when the second run has the right bits: then the result depends on the run.
    """
    expected = reference.pieces[difference.key][0].load()
    wrong: list[tuple[Piece, np.ndarray, np.ndarray]] = []
    for piece in run.pieces[difference.key]:
        part, found = part_of(expected, piece.region), piece.load()
        if not np.array_equal(bit_words(part), bit_words(found)):
            wrong.append((piece, np.atleast_1d(part), np.atleast_1d(found)))
    if not wrong:
        return replace(difference, global_ranks=())
    different = [bit_words(part) ^ bit_words(found) for _, part, found in wrong]
    piece, part, found = wrong[0]
    first = tuple(int(i) for i in np.argwhere(different[0])[0])
    values = Values(
        elements_different=sum(int(np.count_nonzero(words)) for words in different),
        num_elements=sum(words.size for words in different),
        bits_different=sum(_popcount(words) for words in different),
        index=tuple(i + lo for i, (lo, _) in zip(first, piece.region, strict=True)) if piece.region else (),
        expected=float(part[first]),
        found=float(found[first]),
    )
    return replace(difference, global_ranks=ranks_of([piece for piece, _, _ in wrong]), values=values)


def _popcount(words: np.ndarray) -> int:
    return int(np.unpackbits(np.ascontiguousarray(words).view(np.uint8)).sum())
