"""`Plan`: one training run as data; and `ModularPlan`: one of several models that are trained as one.

Both are made of sections (`core.plan.sections`). Rules judge sections, the reader makes them from text, the writer
makes text from them: none of these knows a plan. The two kinds of plan lie in one file because each makes the other: a
text with [[modules]] gives a `ModularPlan`, and every module of that is a `Plan`.

Modules form a tree that joins towards its root. A module without inputs embeds the batch's tokens; one with inputs
takes the sum of its inputs' hidden states, added in the order written. The last module feeds no other: it alone has the
final norm, the head and the loss. Every module is a `ModulePlan`, an ordinary plan of its own ranks and stages. All
their stages make one pipeline, numbered module after module; hidden states pass from the last stage of a module to the
first of the next over a bridge (`core.program.bridge`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any, TypeVar, cast

from ..base.errors import PlanError, Problem
from ..base.reduction import cut
from ..layout.layout import Layout
from ..layout.leaves import LeafSizes, degree_to_admit, leaf_sizes
from ..layout.microbatches import microbatch_counts, own_microbatches
from ..layout.recorded_numerics import Leaf, RecordedNumerics
from ..layout.stage_parameters import stage_parameters
from ..layout.stages import StageLayers, assign_layers
from ..machine.cluster import ClusterSpec
from ..machine.variation import Variation
from ..model.model import ModelSpec
from ..model.parameters import Parameter, expert_biases
from ..schedule.placement import Placement
from .batch_sizes import batch_at
from .build import plan_sections
from .build_modules import modular_sections
from .communicators import Communicators
from .experimental import Experimental
from .log import Log
from .module import Module, ModuleLayout
from .optimizer import Optimizer
from .rates import Rates
from .rules import broken_rules
from .runtime import Offload, Recompute, Runtime
from .schedule_choice import chosen_placement, microbatch_multiple
from .sections import Batch, DataParallel, Numerics, Precision, ScheduleChoice
from .toml import Values, num_modules, read_values
from .train import Checkpoint, Train
from .write import sections_to_toml

Section = TypeVar("Section")


@cache
def _plain(section: type[Section]) -> Section:
    """The section with the default of every option: no plan can change it, so all plans have the same one."""
    return section()


@dataclass(frozen=True)
class Plan:
    """Model, cluster, layout, batch and the choices that make one training run.

    Validated as a whole when it is made: raises `PlanError` with every rule of `core.plan.rules` that is broken.
    """

    model: ModelSpec
    cluster: ClusterSpec
    layout: Layout
    batch: Batch
    runtime: Runtime = field(default=_plain(Runtime))
    precision: Precision = field(default=_plain(Precision))
    recompute: Recompute = field(default=_plain(Recompute))
    schedule: ScheduleChoice = field(default=_plain(ScheduleChoice))
    numerics: Numerics = field(default=_plain(Numerics))
    optimizer: Optimizer = field(default=_plain(Optimizer))
    data_parallel: DataParallel = field(default=_plain(DataParallel))
    communicators: Communicators = field(default=_plain(Communicators))
    train: Train = field(default=_plain(Train))
    checkpoint: Checkpoint = field(default=_plain(Checkpoint))
    log: Log = field(default=_plain(Log))
    experimental: Experimental = field(default=_plain(Experimental))
    variation: Variation = field(default=_plain(Variation))
    offload: Offload = field(default=_plain(Offload))

    def __post_init__(self) -> None:
        if broken := broken_rules({section: getattr(self, section) for section in self.ruled}):
            raise PlanError([Problem(each.sentence, each.rule.keys[0]) for each in broken])

    @staticmethod
    def of_checked(sections: Mapping[str, Any]) -> Plan:
        """The plan of these sections, all of them, which are known to obey the rules: they are not asked again."""
        assert sections.keys() == _sections()
        made = object.__new__(Plan)
        made.__dict__.update(sections)
        return made

    @property
    def ruled(self) -> tuple[str, ...]:
        """The sections that the rules are asked about: all of them."""
        return tuple(entry.name for entry in fields(Plan))

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return self.layout.world_size

    @property
    def parts(self) -> tuple[Plan, ...]:
        """The plans that ranks train by, one for each model: this one. A `ModularPlan` has several; what takes
        either asks the parts."""
        return (self,)

    def part_of(self, global_rank: int) -> Plan:
        """The part that a rank trains by."""
        return self

    def own_name(self, name: str) -> str:
        """The name that a parameter or an operation has in its part, by that in the run."""
        return name

    @property
    def name(self) -> str:
        """What a part is called among several; empty for the only one."""
        return ""

    @property
    def first_rank(self) -> int:
        """The first of its ranks in the run."""
        return 0

    @property
    def first_stage(self) -> int:
        """The number of its first stage in the run."""
        return 0

    @property
    def has_loss(self) -> bool:
        """True for the part that ends in the head and the losses."""
        return True

    @property
    def title(self) -> str:
        """The model's name."""
        return self.model.name

    @property
    def degrees(self) -> str:
        """The layout for people: `tp8 pp4`."""
        return self.layout.degrees

    def name_in_run(self, name: str) -> str:
        """What checkpoints call a parameter, and what the random numbers of a parameter or an
        operation go by: its name."""
        return name

    @property
    def held_parameters(self) -> tuple[Parameter, ...]:
        """The parameters that its stages have, in canonical order, by its own names."""
        held = (each for stage in self.stages for each in stage_parameters(self.model, stage))
        return tuple({each.name: each for each in held}.values())  # a shared table lies on two stages

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, shared tables once."""
        return sum(each.num_elements for each in self.held_parameters)

    @property
    def named_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that training changes, by its name in the run, and its full shape; in canonical order."""
        return {self.name_in_run(each.name): each.shape for each in (*self.held_parameters, *expert_biases(self.model))}

    @classmethod
    def from_toml(cls, text: str, source: str = "plan.toml") -> Plan:
        """The plan that a TOML text describes. `source` is its file name: it opens every message, and
        relative paths start there.

        A text with [[modules]] gives a `ModularPlan`, which has no one model and layout, but which simulate, draw,
        verify and train take as well.

        Raises `PlanError` with every problem of the text, each with its line.
        """
        # the type is that of a text without [[modules]], so that its callers need not distinguish the two kinds
        return cast("Plan", any_plan(read_values(text, source), source))

    def to_toml(self) -> str:
        """The plan as text; `Plan.from_toml(plan.to_toml()) == plan`. Values that are defaults are left out."""
        return sections_to_toml({entry.name: getattr(self, entry.name) for entry in fields(Plan)})

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step on the data-parallel rank that has most: global / (micro * dp), rounded up."""
        return self.microbatches_of(0)

    def microbatches_of(self, dp_rank: int) -> int:
        """Microbatches per step on a data-parallel rank. Where dp does not divide those of the global batch, later
        ranks have one less, or a schedule's `multiple`."""
        lo, hi = self.samples_of(dp_rank)
        return (hi - lo) // self.batch.micro_size

    @cached_property
    def microbatch_counts(self) -> tuple[int, ...]:
        """The different numbers of microbatches that data-parallel ranks have, the largest first."""
        return microbatch_counts(
            self.batch.global_size, self.batch.micro_size, self.layout.dp, microbatch_multiple(self.schedule)
        )

    @cached_property
    def rates(self) -> Rates:
        """Learning rate and weight decay of each step."""
        return Rates.of(self.optimizer, self.train, self.batch)

    def of_step(self, step: int) -> Plan:
        """What a step runs, counted from 0: this plan where every step has the same batch, else one with that of the
        step, which knows of no other."""
        return self if self.batch.stays else self.of_size(batch_at(self.batch, step))

    def of_size(self, global_size: int) -> Plan:
        """The same with every global batch of a size among `sizes_of(self.batch)`; its rates are those of this plan."""
        if self.batch.stays:
            assert global_size == self.batch.global_size, f"all batches have {self.batch.global_size} sequences"
            return self
        key = ("of_size", global_size)
        if key not in self.memo:
            made = object.__new__(type(self))
            made.__dict__.update({entry.name: getattr(self, entry.name) for entry in fields(self)}, rates=self.rates)
            made.__dict__["batch"] = Batch(global_size, self.batch.micro_size, self.batch.sequence)
            self.memo[key] = made
        return cast("Plan", self.memo[key])

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
        """Which pipeline ranks hold which stage: that of the schedule. Raises `ScheduleError` for a
        file that does not fit."""
        return self._placement_of(self.num_microbatches)

    def _placement_of(self, num_microbatches: int) -> Placement:
        return chosen_placement(self.schedule, self.layout, num_microbatches)

    @cached_property
    def leaf_sizes(self) -> LeafSizes:
        """Leaf sizes of the canonical sums."""
        return leaf_sizes(
            self.model,
            self.batch.sequence,
            head_block=self.numerics.head_block,
            ffn_block=self.numerics.ffn_block,
            vocab_block=self.numerics.vocab_block,
            gradient_token_block=self.numerics.gradient_token_block,
            reduction_token_block=self.numerics.reduction_token_block,
            max_degree=degree_to_admit(self.numerics.mode, self.layout),
        )

    def tokens_of(self, tp_rank: int) -> tuple[int, int]:
        """The tokens `[lo, hi)` of each sequence (of a context-parallel rank's part of it) whose hidden states a
        tensor-parallel rank holds between the cut layers: all of them, or with sequence parallelism its own.

        Exact numerics cut between blocks of `reduction_token_block` tokens, the leaves of sums over
        tokens; fast ones cut evenly.
        """
        sequence = self.batch.sequence // self.layout.cp
        if not self.layout.sequence_parallel:
            return 0, sequence
        if self.numerics.mode == "exact":
            return self.leaf_sizes.tokens(sequence).owned_items(self.layout.tp, tp_rank)
        return cut(sequence, self.layout.tp, tp_rank)

    def samples_of(self, dp_rank: int) -> tuple[int, int]:
        """The contiguous interval of the global batch that a data-parallel rank owns."""
        total, multiple = self.batch.global_size // self.batch.micro_size, microbatch_multiple(self.schedule)
        lo, hi = own_microbatches(total, self.layout.dp, dp_rank, multiple)
        return lo * self.batch.micro_size, hi * self.batch.micro_size

    def num_copies(self, stage: int) -> int:
        """Copies of a stage that add up its gradients: dp*cp, times two where the placement has replicas of it."""
        return self.layout.dp * self.layout.cp * len(self.placement.ranks[stage])

    def copy_of(self, stage: int, *, dp_rank: int, pp_rank: int, cp_rank: int = 0) -> int:
        """The number of a rank's copy of a stage. Copies are numbered in the order of the samples they see, those that
        context parallelism gives parts of the same samples one after the other."""
        replicas, replica = len(self.placement.ranks[stage]), self.placement.replica_of(stage, pp_rank)
        return (dp_rank * replicas + replica) * self.layout.cp + cp_rank

    def copy_samples(self, stage: int, copy: int) -> tuple[int, int]:
        """The contiguous interval of the global batch that a copy of a stage sees: its data-parallel
        rank's, or one half of it."""
        dp_rank, replica = divmod(copy // self.layout.cp, len(self.placement.ranks[stage]))
        first, _ = self.samples_of(dp_rank)
        lo, hi = self._placement_of(self.microbatches_of(dp_rank)).microbatches_of(stage, replica)
        return first + lo * self.batch.micro_size, first + hi * self.batch.micro_size


@cache
def _sections() -> frozenset[str]:
    """The sections of a plan."""
    return frozenset(entry.name for entry in fields(Plan))


@dataclass(frozen=True)
class ModulePlan(Plan):
    """The plan of one module. Its stages count from 0, and from `first_stage` in the whole; its
    ranks are those of the whole.

    Only a module that `embeds` has an embedding, and only one that `has_loss` a head. The rules about the
    cluster are those of the whole.
    """

    name: str = ""
    first_stage: int = 0
    embeds: bool = True
    has_loss: bool = True

    @cached_property
    def stages(self) -> tuple[StageLayers, ...]:
        """What every stage of the module holds, stages counted from 0."""
        whole = assign_layers(self.model.num_layers, self.layout)
        return tuple(
            replace(each, embedding=each.embedding and self.embeds, head=each.head and self.has_loss) for each in whole
        )

    def name_in_run(self, name: str) -> str:
        """A parameter or an operation by its name among all modules, `encoder.layers.0.mlp.up.weight`: so two modules
        draw different random numbers."""
        return f"{self.name}.{name}"

    @property
    def first_rank(self) -> int:
        """The first of its ranks."""
        return self.layout.global_rank()

    @property
    def alone(self) -> ModulePlan:
        """The same with ranks counted from 0, as if there were no other module."""
        given = {entry.name: getattr(self.layout, entry.name) for entry in fields(Layout)}
        return replace(self, layout=Layout(**given))

    @property
    def ruled(self) -> tuple[str, ...]:
        """The sections that rules are asked about: the cluster is no module's."""
        return tuple(section for section in super().ruled if section != "cluster")


@dataclass(frozen=True)
class ModularPlan:
    """A training run of several modules. Everything but `modules` means what it means in a `Plan`,
    and counts for all of them.

    Raises `PlanError` with every rule that the whole or a module breaks.
    """

    modules: tuple[Module, ...]
    cluster: ClusterSpec
    batch: Batch
    runtime: Runtime = field(default=_plain(Runtime))
    precision: Precision = field(default=_plain(Precision))
    recompute: Recompute = field(default=_plain(Recompute))
    schedule: ScheduleChoice = field(default=_plain(ScheduleChoice))
    numerics: Numerics = field(default=_plain(Numerics))
    optimizer: Optimizer = field(default=_plain(Optimizer))
    data_parallel: DataParallel = field(default=_plain(DataParallel))
    communicators: Communicators = field(default=_plain(Communicators))
    train: Train = field(default=_plain(Train))
    checkpoint: Checkpoint = field(default=_plain(Checkpoint))
    log: Log = field(default=_plain(Log))
    experimental: Experimental = field(default=_plain(Experimental))
    variation: Variation = field(default=_plain(Variation))
    offload: Offload = field(default=_plain(Offload))

    def __post_init__(self) -> None:
        problems = [Problem(broken.sentence, broken.rule.keys[0]) for broken in broken_rules(self.sections)]
        if not problems:  # a module's place in the whole is known only now
            for module in self.modules:
                try:
                    self.part(module)
                except PlanError as error:
                    problems += [problem.of(f'module "{module.name}"') for problem in error.problems]
        if problems:
            raise PlanError(dict.fromkeys(problems))

    @classmethod
    def from_toml(cls, text: str, source: str = "plan.toml") -> ModularPlan:
        """The plan that a TOML text with [[modules]] describes. Raises as `Plan.from_toml`, and `PlanError`
        for a text without them."""
        plan = any_plan(read_values(text, source), source)
        if not isinstance(plan, ModularPlan):
            raise PlanError(f"{source}: there is no [[modules]] in it. Read it by Plan.from_toml.")
        return plan

    def to_toml(self) -> str:
        """The plan as text; `ModularPlan.from_toml(plan.to_toml()) == plan`. Values that are defaults are left out."""
        return sections_to_toml(self.sections)

    @property
    def sections(self) -> Mapping[str, Any]:
        """Section -> noun."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @cached_property
    def parts(self) -> tuple[ModulePlan, ...]:
        """The modules as plans, in the order of the modules."""
        return tuple(self.part(module) for module in self.modules)

    def part(self, module: Module) -> ModulePlan:
        """The plan of one module. Raises `PlanError` with the rules that it breaks."""
        shared = {name: noun for name, noun in self.sections.items() if name != "modules"}
        before = self.modules[: self.modules.index(module)]
        return ModulePlan(
            **shared,
            model=module.model,
            layout=ModuleLayout(
                **{each.name: getattr(module.layout, each.name) for each in fields(Layout)},
                first_rank=module.first_rank,
            ),
            name=module.name,
            first_stage=sum(each.layout.num_stages for each in before),
            embeds=not module.inputs,
            has_loss=module == self.modules[-1],
        )

    @cached_property
    def rates(self) -> Rates:
        """Learning rate and weight decay of each step."""
        return Rates.of(self.optimizer, self.train, self.batch)

    def of_step(self, step: int) -> ModularPlan:
        """As `Plan.of_step`."""
        return self if self.batch.stays else self.of_size(batch_at(self.batch, step))

    def of_size(self, global_size: int) -> ModularPlan:
        """As `Plan.of_size`."""
        if self.batch.stays:
            assert global_size == self.batch.global_size, f"all batches have {self.batch.global_size} sequences"
            return self
        made = replace(self, batch=Batch(global_size, self.batch.micro_size, self.batch.sequence))
        made.__dict__["rates"] = self.rates
        return made

    def part_named(self, name: str) -> ModulePlan:
        """The plan of the module called `name`."""
        return next(part for part in self.parts if part.name == name)

    def part_of(self, global_rank: int) -> ModulePlan:
        """The module on a rank."""
        return next(part for part in self.parts if 0 <= global_rank - part.first_rank < part.layout.world_size)

    def own_name(self, name: str) -> str:
        """The name that a parameter or an operation has in its module, by that in the run."""
        return name.partition(".")[2]

    @property
    def world_size(self) -> int:
        """Ranks of all modules."""
        return max(module.last_rank for module in self.modules) + 1

    @property
    def joins(self) -> tuple[tuple[ModulePlan, ModulePlan], ...]:
        """Every pair of modules of which the first feeds the second, by the second, then in the order of its inputs."""
        return tuple(
            (self.part_named(name), self.part_named(module.name)) for module in self.modules for name in module.inputs
        )

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For every stage the stages whose outputs are added up to its input, in the order of the module's inputs."""
        last_of = {part.name: part.first_stage + part.layout.num_stages - 1 for part in self.parts}
        found: list[tuple[int, ...]] = []
        for part, module in zip(self.parts, self.modules, strict=True):
            found.append(tuple(last_of[name] for name in module.inputs))
            found += [(stage,) for stage in range(part.first_stage, last_of[part.name])]
        return tuple(found)

    @property
    def degrees(self) -> str:
        """For people: `encoder tp4 -> decoder tp2 pp2`; `left tp2 + right pp2 -> last tp3`, and what is fed
        by others in brackets."""

        def written(module: Module) -> str:
            own, fed_by = (
                f"{module.name} {module.layout.degrees}",
                [each for each in self.modules if each.name in module.inputs],
            )
            if not fed_by:
                return own
            inputs = [written(each) if len(fed_by) == 1 or not each.inputs else f"({written(each)})" for each in fed_by]
            return f"{' + '.join(inputs)} -> {own}"

        return written(self.modules[-1])

    @property
    def title(self) -> str:
        """The models' names."""
        return " + ".join(module.model.name for module in self.modules)

    @property
    def num_parameters(self) -> int:
        """Parameters of all modules."""
        return sum(part.num_parameters for part in self.parts)

    @property
    def named_shapes(self) -> dict[str, tuple[int, ...]]:
        """As `Plan.named_shapes`, of all modules: `encoder.layers.0.mlp.up.weight`."""
        return {name: shape for part in self.parts for name, shape in part.named_shapes.items()}

    def replaced(self, change: Callable[[Module], Module], **shared: Any) -> ModularPlan:
        """The plan with every module changed and some sections replaced."""
        return replace(self, modules=tuple(change(module) for module in self.modules), **shared)


def build_plan(values: Values, source: str) -> Plan:
    """The plan of one model that `values` describe. Raises `PlanError` with all problems, each with
    where its value was given."""
    return Plan.of_checked(plan_sections(values, source))


AnyPlan = Plan | ModularPlan
"""A run of one model or of several."""


def recorded_numerics(plan: AnyPlan, machine: Mapping[str, str] | None = None) -> RecordedNumerics:
    """What checkpoints and ledgers of a run say of its numerics; `machine` is that of the rank that writes. It is the
    same in every layout of a problem."""
    leaves: dict[str, Leaf] = {}
    if plan.numerics.mode == "exact":
        for part in plan.parts:
            leaves |= {part.name_in_run(name): leaf for name, leaf in asdict(part.leaf_sizes).items()}
    products = plan.numerics.kernel_forms if plan.numerics.mode == "exact" else ()
    return RecordedNumerics(plan.numerics.mode, leaves, machine or {}, triton_products=products)


def only_model(plan: AnyPlan, option: str) -> Plan:
    """The plan, for an option that is about one model. Raises `PlanError` for a plan of several."""
    if isinstance(plan, ModularPlan):
        raise PlanError(
            f"{option} is about one model, and this plan has {len(plan.modules)} [[modules]]. Leave it out."
        )
    return plan


def any_plan(values: Values, source: str) -> AnyPlan:
    """The same, of one model or of several."""
    return ModularPlan(**modular_sections(values, source)) if num_modules(values) else build_plan(values, source)
