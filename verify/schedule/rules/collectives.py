"""Rules about collectives: every member of a communicator calls the same ones in the same order, and no
circle of ranks waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest

from ....core.layout.layout import Layout
from ....core.schedule.action import Kind
from ....core.schedule.placement import Placement
from ..calls import REDUCING, Call, Calls, Communicators, calls_from_csv, communicators
from ..facts import Facts
from .rule import Rule, Violation
from .view import View


def collective_order(view: View) -> Iterator[Violation]:
    """Per communicator and member, the first call that differs from those of the other members."""
    calls = _calls(view)
    for key, groups in calls.members.items():
        sequences = [tuple(call for call in each if communicators(call) == key) for each in calls.lists]
        identities = [tuple(call.identity for call in sequence) for sequence in sequences]
        for group in _distinct(groups):
            if len({calls.list_of[rank] for rank in group}) == 1:
                continue
            # What most members call is right; between two of one opinion each, the list that
            # more ranks of the world run.
            members = Counter(identities[calls.list_of[rank]] for rank in group)
            if len(members) == 1:
                continue
            usual = max(members, key=lambda identity: (members[identity], _num_ranks(calls, identities, identity)))
            reference = sequences[identities.index(usual)]
            for rank in group:
                number = calls.list_of[rank]
                if identities[number] != usual:
                    yield _difference(view, rank, group, sequences[number], reference)


def collective_cycle(view: View) -> Iterator[Violation]:
    """The first circle of ranks, each in a collective that another has not reached; asked when orders
    agree per communicator."""
    calls = _calls(view)
    if next(collective_order(view), None) is not None:
        return
    stuck = _run(_waits(calls))
    if stuck:
        steps = [f"rank {rank} in {call}" for rank, call in stuck]
        rank, call = stuck[0]
        yield _violation(view, rank, call, call.axis, f"{' waits for '.join([*steps, steps[0]])}.")


def gradient_axes(view: View) -> Iterator[Violation]:
    """Stages whose REDUCE_GRAD on a rank sums over an axis twice, not at all, or over one that it should not."""
    calls = _calls(view)
    if calls.gradient_axes is None:
        return
    reported: set[int] = set()
    for rank, number in enumerate(calls.list_of):
        if number in reported:
            continue
        reported.add(number)
        reducing = [
            call for call in calls.lists[number] if call.action.kind is Kind.REDUCE_GRAD and call.op in REDUCING
        ]
        counts = _reductions(reducing)
        for stage in calls.placement.stages_of(calls.layout.coordinates(rank)["pp"]):
            expected = calls.gradient_axes[stage]
            for axis in sorted(expected | {call.axis for call in reducing if call.action.stage == stage}):
                if counts[stage, axis] != (axis in expected):
                    named = next((call for call in reducing if (call.action.stage, call.axis) == (stage, axis)), None)
                    times = f"{counts[stage, axis]} times instead of {'once' if axis in expected else 'never'}"
                    what = f"rank {rank} reduces the gradients of stage {stage} over {axis} {times}."
                    yield _violation(view, rank, named, axis, what)


def _reductions(calls: Iterable[Call]) -> Counter[tuple[int, str]]:
    """How often gradients of a stage are added over an axis, those that a call names by its layer (a bucket, the
    norms of heads) apart."""
    times = Counter((call.action.stage, call.axis, call.layer) for call in calls)
    found: Counter[tuple[int, str]] = Counter()
    for (stage, axis, _), count in times.items():
        found[stage, axis] = max(found[stage, axis], count)
    return found


def _calls(view: View) -> Calls:
    assert view.facts.collectives is not None, "the rule needs calls"
    return view.facts.collectives


def _distinct(groups: Mapping[int, tuple[int, ...]]) -> Iterable[tuple[int, ...]]:
    """Every group once. Its members share one tuple; as keys, groups of 10^5 ranks would be read whole for
    each of their members."""
    return {id(group): group for group in groups.values()}.values()


def _num_ranks(calls: Calls, identities: list[tuple], identity: tuple) -> int:
    """Ranks of the world that make these calls."""
    return sum(identities[number] == identity for number in calls.list_of)


def _waits(calls: Calls) -> dict[int, list[tuple[Call, tuple[int, ...]]]]:
    """Rank -> its calls with those they wait for. Where all ranks of a list wait for the same lists, they run in step,
    and one rank stands for each list."""
    classes = list(calls.list_of)
    lists_of: dict[tuple[Communicators, int], tuple[int, ...]] = {}
    called = ((key, group) for key, groups in calls.members.items() for group in _distinct(groups))
    members = ((key, tuple(sorted({classes[rank] for rank in group}))) for key, group in called)
    if any(lists_of.setdefault((key, number), lists) != lists for key, lists in members for number in lists):
        everyone = enumerate(calls.list_of)
        return {
            rank: [(call, calls.members[communicators(call)][rank]) for call in calls.lists[number]]
            for rank, number in everyone
        }
    stands = {number: rank for rank, number in reversed(list(enumerate(classes)))}
    return {
        rank: [
            (call, tuple(stands[other] for other in lists_of[communicators(call), number]))
            for call in calls.lists[number]
        ]
        for number, rank in stands.items()
    }


def _difference(
    view: View, rank: int, group: tuple[int, ...], own: tuple[Call, ...], usual: tuple[Call, ...]
) -> Violation:
    pairs = list(zip_longest(own, usual))
    number = next(
        i
        for i, (mine, theirs) in enumerate(pairs)
        if mine is None or theirs is None or mine.identity != theirs.identity
    )
    mine, theirs = pairs[number]
    axis = (own or usual)[0].axis
    members = ", ".join(map(str, group[:8])) + (", ..." if len(group) > 8 else "")
    other = "nothing more" if theirs is None else str(theirs)
    what = (
        f"call {number} of rank {rank} on {axis} (ranks {members}) is {mine or 'missing'}, where the other "
        f"members call {other}."
    )
    return _violation(view, rank, mine or (own[-1] if own else None), axis, what)


def _violation(view: View, global_rank: int, call: Call | None, axis: str, what: str) -> Violation:
    """A violation at the action of a call, where the schedule has it."""
    pp_rank = _calls(view).layout.coordinates(global_rank)["pp"]
    found = None if call is None else view.find(pp_rank, call.action)
    return Violation(found, pp_rank, what, axis=axis if axis[0].isalpha() else None)  # else it lists ranks


def _run(waits: dict[int, list[tuple[Call, tuple[int, ...]]]]) -> list[tuple[int, Call]]:
    """Runs all ranks as far as they go; [] at the end, else ranks of which each waits, in its call, for the next."""
    cursor = dict.fromkeys(waits, 0)

    def at(rank: int) -> tuple[Communicators, tuple[int, ...]] | None:
        if cursor[rank] == len(waits[rank]):
            return None
        call, members = waits[rank][cursor[rank]]
        return communicators(call), members

    queue = list(waits)
    while queue:
        rank = queue.pop()
        while (here := at(rank)) is not None and all(at(other) == here for other in here[1]):
            for other in here[1]:
                cursor[other] += 1
            queue += [other for other in here[1] if other != rank]
    stuck = next((rank for rank in waits if at(rank) is not None), None)
    path: list[int] = []
    while stuck is not None and stuck not in path:
        path.append(stuck)
        here = at(stuck)
        assert here is not None, "orders agree, so a rank at its end keeps nobody waiting"
        stuck = next(other for other in here[1] if at(other) != here)
    return [] if stuck is None else [(each, waits[each][cursor[each]][0]) for each in path[path.index(stuck) :]]


_ONE_STAGE = "0F0,0B0,0REDUCE_GRAD,0STEP\n"
_TWO_STAGES = "0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0STEP\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1STEP\n"


def _facts(text: str, axes: frozenset[str], num_stages: int = 1, *, tp: int = 1, dp: int = 1) -> Facts:
    layout, placement = Layout(tp=tp, pp=num_stages, dp=dp), Placement.loop(num_stages, num_stages, 1)
    return Facts(collectives=calls_from_csv(text, layout, placement, gradient_axes=[axes] * num_stages))


COLLECTIVE_RULES = (
    Rule(
        "collective-order",
        "All members of a communicator call the same collectives in the same order.",
        "Give all members one order: a communicator matches calls by their number alone.",
        _ONE_STAGE,
        collective_order,
        "collectives",
        _facts(
            "0F0:all_reduce:tp:a,0F0:all_reduce:tp:b\n0F0:all_reduce:tp:a,0F0:all_reduce:tp:b\n0F0:all_reduce:tp:b,0F0:all_reduce:tp:a\n",
            frozenset(),
            tp=3,
        ),
        key=None,
    ),
    Rule(
        "collective-cycle",
        "Calling the collectives in list order, no circle of ranks waits for each other across communicators.",
        "Call communicators that share ranks in one order everywhere.",
        _TWO_STAGES,
        collective_cycle,
        "collectives",
        _facts(
            "0STEP:all_reduce:model:norm,0STEP:all_gather:embedding:table\n1STEP:all_gather:embedding:table,1STEP:all_reduce:model:norm\n",
            frozenset(),
            2,
        ),
        key=None,
    ),
    Rule(
        "gradient-axes",
        "Gradients are summed exactly once over each axis along which ranks hold different parts of the sum, and "
        "over no other.",
        "Reduce over exactly these axes, in one REDUCE_GRAD.",
        _ONE_STAGE,
        gradient_axes,
        "collectives",
        _facts("0REDUCE_GRAD:all_reduce:dp:,0REDUCE_GRAD:all_reduce:dp:\n" * 2, frozenset({"dp"}), dp=2),
        key=None,
    ),
)
