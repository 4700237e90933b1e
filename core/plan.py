"""`Plan`: one training run as data."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from .cluster import ClusterSpec
from .errors import PlanError
from .layout import Layout
from .leaves import LeafSizes, degree_to_admit, leaf_sizes
from .microbatches import microbatch_counts, own_microbatches
from .model import ModelSpec
from .placement import Placement
from .reduction import cut
from .sections import Batch, Checkpoint, DataParallel, Numerics, Optimizer, Precision, Recompute, Runtime, ScheduleChoice, Train
from .stages import StageLayers, assign_layers
from .variation import Variation


@dataclass(frozen=True)
class Plan:
    """Model, cluster, layout, batch and the choices that make one training run.

    Validated as a whole when it is made: raises `PlanError` with every rule of `core.plan_rules` that is broken.
    """

    model: ModelSpec
    cluster: ClusterSpec
    layout: Layout
    batch: Batch
    runtime: Runtime = field(default_factory=Runtime)
    precision: Precision = field(default_factory=Precision)
    recompute: Recompute = field(default_factory=Recompute)
    schedule: ScheduleChoice = field(default_factory=ScheduleChoice)
    numerics: Numerics = field(default_factory=Numerics)
    optimizer: Optimizer = field(default_factory=Optimizer)
    data_parallel: DataParallel = field(default_factory=DataParallel)
    train: Train = field(default_factory=Train)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    variation: Variation = field(default_factory=Variation)

    def __post_init__(self) -> None:
        from .plan_rules import broken_rules  # the rule table is written in terms of the nouns of this file

        if broken := broken_rules({section: getattr(self, section) for section in self.ruled}):
            raise PlanError([problem.sentence for problem in broken])

    @property
    def ruled(self) -> tuple[str, ...]:
        """The sections that the rules are asked about: all of them."""
        return tuple(entry.name for entry in fields(Plan))

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.layout.world_size

    @property
    def title(self) -> str:
        """The model's name."""
        return self.model.name

    def name_in_run(self, name: str) -> str:
        """What checkpoints call a parameter, and what the random numbers of a parameter or an operation go by: its name."""
        return name

    @classmethod
    def from_toml(cls, text: str, source: str = "plan.toml") -> Plan:
        """The plan that a TOML text describes. `source` is its file name: it opens every message, and relative paths start there.

        A text with [[modules]] gives a `core.modules.ModularPlan`, which has no one model and layout, but which simulate, draw, verify and
        train take as well.

        Raises `PlanError` with every problem of the text, each with its line.
        """
        from .plan_toml import plan_from_toml

        return plan_from_toml(text, source)

    def to_toml(self) -> str:
        """The plan as text; `Plan.from_toml(plan.to_toml()) == plan`. Values that are defaults are left out."""
        from .plan_write import plan_to_toml

        return plan_to_toml(self)

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step on the data-parallel rank that has most: global / (micro * dp), rounded up."""
        return self.microbatches_of(0)

    def microbatches_of(self, dp_rank: int) -> int:
        """Microbatches per step on a data-parallel rank. Where dp does not divide those of the global batch, later ranks have one less,
        or a schedule's `together`."""
        lo, hi = self.samples_of(dp_rank)
        return (hi - lo) // self.batch.micro_size

    @cached_property
    def microbatch_counts(self) -> tuple[int, ...]:
        """The different numbers of microbatches that data-parallel ranks have, the largest first."""
        return microbatch_counts(self.batch.global_size, self.batch.micro_size, self.layout.dp, self._microbatches_together)

    @cached_property
    def _microbatches_together(self) -> int:
        from .schedules import CATALOG  # builders are written in terms of the nouns of this folder

        return 1 if self.schedule.file is not None else CATALOG[self.schedule.name].together

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """What functions of this plan have worked out already, each under a key of its own."""
        return {}

    @cached_property
    def stages(self) -> tuple[StageLayers, ...]:
        """What every pipeline stage holds."""
        return assign_layers(self.model.num_layers, self.layout)

    @cached_property
    def placement(self) -> Placement:
        """Which pipeline ranks hold which stage: that of the schedule. Raises `ScheduleError` for a file that does not fit."""
        return self._placement_of(self.num_microbatches)

    def _placement_of(self, num_microbatches: int) -> Placement:
        from .schedule_of import placement_for  # builders are written in terms of the nouns of this folder

        return placement_for(self, num_microbatches)

    @cached_property
    def leaf_sizes(self) -> LeafSizes:
        """Leaf sizes of the canonical sums."""
        return leaf_sizes(
            self.model,
            self.batch.sequence,
            ffn_block=self.numerics.ffn_block,
            vocab_block=self.numerics.vocab_block,
            gradient_token_block=self.numerics.gradient_token_block,
            reduction_token_block=self.numerics.reduction_token_block,
            max_degree=degree_to_admit(self.numerics.mode, self.layout),
        )

    def tokens_of(self, tp_rank: int) -> tuple[int, int]:
        """The tokens `[lo, hi)` of each sequence (of a context-parallel rank's part of it) whose hidden states a tensor-parallel rank holds
        between the cut layers: all of them, or with sequence parallelism its own.

        Exact numerics cut between blocks of `reduction_token_block` tokens, the leaves of sums over tokens; fast ones cut evenly.
        """
        sequence = self.batch.sequence // self.layout.cp
        if not self.layout.sequence_parallel:
            return 0, sequence
        if self.numerics.mode == "exact":
            return self.leaf_sizes.tokens(sequence).owned_items(self.layout.tp, tp_rank)
        return cut(sequence, self.layout.tp, tp_rank)

    def samples_of(self, dp_rank: int) -> tuple[int, int]:
        """The contiguous interval of the global batch that a data-parallel rank owns."""
        total, together = self.batch.global_size // self.batch.micro_size, self._microbatches_together
        lo, hi = own_microbatches(total, self.layout.dp, dp_rank, together)
        return lo * self.batch.micro_size, hi * self.batch.micro_size

    def num_copies(self, stage: int) -> int:
        """Copies of a stage that add up its gradients: dp*cp, times two where the placement has replicas of it."""
        return self.layout.dp * self.layout.cp * len(self.placement.ranks[stage])

    def copy_of(self, stage: int, *, dp_rank: int, pp_rank: int, cp_rank: int = 0) -> int:
        """The number of a rank's copy of a stage. Copies are numbered in the order of the samples they see, those that context parallelism
        gives parts of the same samples one after the other."""
        replicas, replica = len(self.placement.ranks[stage]), self.placement.replica_of(stage, pp_rank)
        return (dp_rank * replicas + replica) * self.layout.cp + cp_rank

    def copy_samples(self, stage: int, copy: int) -> tuple[int, int]:
        """The contiguous interval of the global batch that a copy of a stage sees: its data-parallel rank's, or one half of it."""
        dp_rank, replica = divmod(copy // self.layout.cp, len(self.placement.ranks[stage]))
        first, _ = self.samples_of(dp_rank)
        lo, hi = self._placement_of(self.microbatches_of(dp_rank)).microbatches_of(stage, replica)
        return first + lo * self.batch.micro_size, first + hi * self.batch.micro_size
