"""`Layout`: degrees of parallelism, the order of ranks, and every group that follows from them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property

import numpy as np

from ..base.bounds import DEVICES, shown
from ..base.errors import LayoutError
from ..base.option import Bounded, FieldProblem, noun, option

AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"


def rank_grid(order: str, sizes: Mapping[str, int], rank_offset: int = 0) -> np.ndarray:
    """Ranks as an array with one dimension per axis of `order`, the *last* axis of the string
    first (it varies slowest).

    Raises `LayoutError` when an axis of size above one is missing from the order, or `rank_offset` is negative.
    """
    if rank_offset < 0:
        raise LayoutError(f"rank_offset={rank_offset} is negative. Ranks count from 0.")
    axes = order.split("-")
    missing = [axis for axis, size in sizes.items() if size > 1 and axis not in axes]
    if missing:
        raise LayoutError(
            f"order {order!r} does not name {', '.join(missing)}, whose size is above 1. Add it to the order."
        )
    shape = [sizes.get(axis, 1) for axis in reversed(axes)]
    return np.arange(rank_offset, rank_offset + math.prod(shape)).reshape(shape)


def rank_groups(order: str, sizes: Mapping[str, int], axes: str, rank_offset: int = 0) -> list[list[int]]:
    """All groups over the product of `axes` (such as `dp-cp`), as lists of ranks.

    Members are enumerated in the order of the order string, whatever order `axes` names them in; groups
    are sorted by first rank.

    >>> rank_groups("tp-dp-pp", {"tp": 2, "dp": 2, "pp": 2}, "dp")
    [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    grid = rank_grid(order, sizes, rank_offset)
    names = list(reversed(order.split("-")))
    wanted = axes.split("-")
    unknown = [axis for axis in wanted if axis not in names and axis not in sizes]
    if unknown:
        raise LayoutError(f"{axes!r} names {', '.join(unknown)}, which is no axis of {order!r}.")
    inside = [i for i, name in enumerate(names) if name in wanted]
    outside = [i for i, name in enumerate(names) if name not in wanted]
    size = math.prod(grid.shape[i] for i in inside)
    return np.transpose(grid, outside + inside).reshape(-1, size).tolist()


@noun()
class Layout(Bounded, section="layout", problem_type=LayoutError):
    """How one model is cut over ranks. Experts see `tp*cp*dp/(etp*ep)` data parallelism.

    Raises `LayoutError` with every rule that is broken.
    """

    tp: int = option("tensor parallelism", default=1, minimum=1, bound=DEVICES, read_by="core.layout.layout")
    pp: int = option("pipeline parallelism", default=1, minimum=1, bound=DEVICES, read_by="core.layout.layout")
    vpp: int = option(
        "stages per pipeline rank (interleaving)",
        default=1,
        kw_only=True,
        minimum=1,
        bound=DEVICES,
        read_by="core.layout.layout",
    )
    dp: int = option(
        "data parallelism of the dense part",
        default=1,
        minimum=1,
        bound=DEVICES,
        default_note="num_devices / (tp*cp*pp)",
        read_by="core.layout.layout",
    )
    cp: int = option("context parallelism", default=1, minimum=1, bound=DEVICES, read_by="core.layout.layout")
    cp_inner: int = option(
        "how many neighbours of cp exchange heads for tokens (Ulysses); others exchange keys and values",
        default=1,
        kw_only=True,
        minimum=1,
        bound=DEVICES,
        more="The two levels are those of Megatron-Core's hierarchical_context_parallel_sizes.",
        read_by="core.program.attention",
    )
    ep: int = option("expert parallelism", default=1, minimum=1, bound=DEVICES, read_by="core.layout.layout")
    etp: int | None = option(
        "tensor parallelism of experts",
        default=None,
        minimum=1,
        bound=DEVICES,
        default_note="tp",
        read_by="core.layout.layout",
    )
    sequence_parallel: bool = option(
        "shard norms and residuals along the sequence inside tp groups", default=False, read_by="core.program.tensors"
    )
    zero: int = option(
        "ZeRO stage 0..3: what data parallelism shards",
        default=0,
        minimum=0,
        maximum=3,
        read_by="core.program.gradients",
    )
    order: str = option(
        "order of ranks; the leftmost axis varies fastest",
        default=DEFAULT_ORDER,
        more="The form is that of Megatron-Core's rank orders.",
        read_by="core.layout.layout",
    )
    stages: str | None = option(
        'uneven stages, e.g. "Et*11|(t*12|)*6t*13L"',
        default=None,
        default_note="an even cut",
        more="The form is that of Megatron's pipeline layouts.",
        read_by="core.layout.stages",
    )

    def _problems(self, wrong: Collection[str]) -> Iterator[FieldProblem]:
        if {*wrong} - {"zero"}:
            return
        if self.vpp > 1 and self.pp == 1:
            yield "vpp", f"vpp={self.vpp} needs a pipeline, but pp=1. Set pp to 2 or more, or vpp=1."
        if self.cp % self.cp_inner:
            divisors = [size for size in range(1, self.cp + 1) if self.cp % size == 0]
            yield (
                "cp_inner",
                f"cp_inner={self.cp_inner} does not divide cp={self.cp}, so groups of so many neighbours are not all "
                f"of its ranks. Use cp_inner among {', '.join(map(str, divisors))}.",
            )
        axes = self.order.split("-")
        if sorted(set(axes)) != sorted(axes) or not set(axes) <= set(AXES):
            yield "order", f"order={shown(self.order)} must name each of {'-'.join(AXES)} at most once."
        else:
            missing = [axis for axis in AXES if axis not in axes and getattr(self, axis) > 1]
            if missing:
                yield "order", f"order={shown(self.order)} does not name {', '.join(missing)}, whose size is above 1."
        dense, expert = self.tp * self.cp * self.dp, self.expert_tp * self.ep
        if dense % expert:
            divided = dense // math.gcd(dense, self.expert_tp)
            yield (
                "ep",
                f"etp*ep={expert} does not divide tp*cp*dp={dense}, so experts cannot be laid over these ranks. "
                f"Choose ep among the divisors of {divided}.",
            )

    @property
    def world_size(self) -> int:
        """Number of ranks: tp*cp*dp*pp (experts reuse the same ranks)."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def degrees(self) -> str:
        """The degrees above one, for people: `tp2 pp2 dp2`, or `one device`."""
        sizes = {name: getattr(self, name) for name in ("tp", "cp", "cp_inner", "ep", "pp", "vpp", "dp")}
        shown = [f"{name}{size}" for name, size in sizes.items() if size > 1]
        return " ".join([*shown, *([f"etp{self.expert_tp}"] if self.expert_tp != self.tp else [])]) or "one device"

    @property
    def cp_outer(self) -> int:
        """How many groups of `cp_inner` neighbours share a sequence; they exchange keys and values."""
        return self.cp // self.cp_inner

    @property
    def num_stages(self) -> int:
        """Pipeline stages: pp*vpp."""
        return self.pp * self.vpp

    @property
    def expert_tp(self) -> int:
        """Tensor parallelism of experts; equal to tp unless `etp` is given."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """Data parallelism of experts: tp*cp*dp/(etp*ep)."""
        return self.tp * self.cp * self.dp // (self.expert_tp * self.ep)

    def expert_shard(self, shard: int) -> int:
        """Ranks that one copy of an expert's weights is cut over where hybrid sharding cuts dense ones over `shard`:
        experts are spread over etp*ep ranks already."""
        return max(1, shard * self.tp // (self.expert_tp * self.ep))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Axis sizes of the dense grid, where ep is 1."""
        return {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp}

    @cached_property
    def expert_sizes(self) -> dict[str, int]:
        """Axis sizes of the expert grid, where cp is 1, tp the expert-TP and dp the expert-DP size."""
        return {"tp": self.expert_tp, "cp": 1, "ep": self.ep, "dp": self.expert_dp, "pp": self.pp}

    def groups(self, axes: str) -> list[list[int]]:
        """Every dense group over the product of `axes`, e.g. `groups("dp-cp")`: lists of global ranks."""
        return rank_groups(self._full_order, self.sizes, axes)

    def expert_groups(self, axes: str) -> list[list[int]]:
        """The same over the expert grid, e.g. `expert_groups("ep")`."""
        return rank_groups(self._full_order, self.expert_sizes, axes)

    def group_of(self, global_rank: int, axes: str) -> list[int]:
        """The one dense group over `axes` that contains a rank."""
        return self._group_of(global_rank, axes, self.sizes)

    def context_groups_of(self, global_rank: int) -> tuple[list[int], list[int]]:
        """The context-parallel ranks that exchange heads with a rank, its neighbours, and those that exchange keys and
        values with it, `cp_inner` apart."""
        members, here = self.group_of(global_rank, "cp"), self.coordinates(global_rank)["cp"]
        first = here - here % self.cp_inner
        return members[first : first + self.cp_inner], members[here % self.cp_inner :: self.cp_inner]

    def expert_group_of(self, global_rank: int, axes: str) -> list[int]:
        """The one expert group over `axes` that contains a rank."""
        return self._group_of(global_rank, axes, self.expert_sizes)

    def _group_of(self, global_rank: int, axes: str, sizes: Mapping[str, int]) -> list[int]:
        """The ranks that differ from one in some axes of a grid only, the leftmost of these in the
        order varying fastest."""
        here, stride, members = self._coordinates(global_rank, sizes), 1, np.zeros(1, dtype=np.int64)
        first = global_rank
        for axis in self._full_order.split("-"):
            if axis in axes.split("-"):
                first -= here[axis] * stride
                members = (np.arange(sizes[axis])[:, None] * stride + members).reshape(-1)
            stride *= sizes[axis]
        return (first + members).tolist()

    def coordinates(self, global_rank: int) -> dict[str, int]:
        """Dense coordinates of a rank, e.g. `{"tp": 1, "cp": 0, "dp": 0, "pp": 3}`. The inverse of `global_rank`."""
        coordinates = self._coordinates(global_rank, self.sizes)
        del coordinates["ep"]
        return coordinates

    def expert_coordinates(self, global_rank: int) -> dict[str, int]:
        """Coordinates of a rank on the expert grid, where `tp` is expert tensor and `dp` expert data parallelism."""
        coordinates = self._coordinates(global_rank, self.expert_sizes)
        del coordinates["cp"]
        return coordinates

    def _coordinates(self, global_rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
        if not 0 <= global_rank < self.world_size:
            raise LayoutError(f"global rank {global_rank} is outside the world of {self.world_size} ranks.")
        coordinates = {}
        for axis in self._full_order.split("-"):
            global_rank, coordinates[axis] = divmod(global_rank, sizes[axis])
        return coordinates

    def global_rank(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at dense coordinates."""
        coordinates = {"tp": tp, "cp": cp, "ep": 0, "dp": dp, "pp": pp}
        rank, stride = 0, 1
        for axis in self._full_order.split("-"):
            rank += coordinates[axis] * stride
            stride *= self.sizes[axis]
        return rank

    @property
    def _full_order(self) -> str:
        axes = self.order.split("-")
        return "-".join(axes + [axis for axis in AXES if axis not in axes])
