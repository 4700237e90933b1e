"""`ModularPlan`: several models that are trained as one, each on a range of ranks of its own.

Modules form a tree that joins towards its root. A module without inputs embeds the batch's tokens; one with inputs takes the sum of its
inputs' hidden states, added in the order written. The last module feeds no other: it alone has the final norm, the head and the loss.
Every module is a `ModulePlan`, an ordinary plan of its own ranks and stages. All their stages make one pipeline, numbered module after
module; hidden states pass from the last stage of a module to the first of the next over a bridge (`core.bridge`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from .action import ActionArray
from .cluster import ClusterSpec
from .errors import PlanError
from .layout import Layout
from .module import Module, ModuleLayout
from .parameters import Parameter, expert_biases
from .placement import ModulePlacement, Placement
from .plan import Plan
from .schedule import Schedule
from .sections import Batch, Checkpoint, DataParallel, Numerics, Optimizer, Precision, Recompute, Runtime, ScheduleChoice, Train
from .stage_parameters import stage_parameters
from .stages import StageLayers, assign_layers
from .variation import Variation


@dataclass(frozen=True)
class ModulePlan(Plan):
    """The plan of one module. Its stages count from 0, and from `first_stage` in the whole; its ranks are those of the whole.

    Only a module that `embeds` has an embedding, and only one that `has_loss` a head. The rules about the cluster are those of the whole.
    """

    name: str = ""
    first_stage: int = 0
    embeds: bool = True
    has_loss: bool = True

    @cached_property
    def stages(self) -> tuple[StageLayers, ...]:
        """What every stage of the module holds, stages counted from 0."""
        whole = assign_layers(self.model.num_layers, self.layout)
        return tuple(replace(each, embedding=each.embedding and self.embeds, head=each.head and self.has_loss) for each in whole)

    def name_in_run(self, name: str) -> str:
        """A parameter or an operation by its name among all modules, `encoder.layers.0.mlp.up.weight`: so two modules draw different
        random numbers."""
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

    @property
    def held_parameters(self) -> tuple[Parameter, ...]:
        """The parameters that the module has, in canonical order, by its own names."""
        return tuple(each for stage in self.stages for each in stage_parameters(self.model, stage))

    @property
    def named_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that training changes, by its name in the whole (`encoder.layers.0.mlp.up.weight`), and its full shape."""
        return {self.name_in_run(each.name): each.shape for each in (*self.held_parameters, *expert_biases(self.model))}


@dataclass(frozen=True)
class ModularPlan:
    """A training run of several modules. Everything but `modules` means what it means in a `Plan`, and counts for all of them.

    Raises `PlanError` with every rule that the whole or a module breaks.
    """

    modules: tuple[Module, ...]
    cluster: ClusterSpec
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
        from .plan_rules import broken_rules  # the rule table is written in terms of these nouns

        problems = [broken.sentence for broken in broken_rules(self.sections)]
        if not problems:  # a module's place in the whole is known only now
            for module in self.modules:
                try:
                    self.part(module)
                except PlanError as error:
                    problems += [f'module "{module.name}": {sentence}' for sentence in error.problems]
        if problems:
            raise PlanError(dict.fromkeys(problems))

    @classmethod
    def from_toml(cls, text: str, source: str = "plan.toml") -> ModularPlan:
        """The plan that a TOML text with [[modules]] describes. Raises as `Plan.from_toml`, and `PlanError` for a text without them."""
        plan = Plan.from_toml(text, source)
        if not isinstance(plan, ModularPlan):
            raise PlanError(f"{source}: there is no [[modules]] in it. Read it by Plan.from_toml.")
        return plan

    def to_toml(self) -> str:
        """The plan as text; `ModularPlan.from_toml(plan.to_toml()) == plan`. Values that are defaults are left out."""
        from .plan_write import modular_plan_to_toml

        return modular_plan_to_toml(self)

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
            layout=ModuleLayout(**{each.name: getattr(module.layout, each.name) for each in fields(Layout)}, first_rank=module.first_rank),
            name=module.name,
            first_stage=sum(each.layout.num_stages for each in before),
            embeds=not module.inputs,
            has_loss=module == self.modules[-1],
        )

    def part_named(self, name: str) -> ModulePlan:
        """The plan of the module called `name`."""
        return next(part for part in self.parts if part.name == name)

    def part_of(self, global_rank: int) -> ModulePlan:
        """The module on a rank."""
        return next(part for part in self.parts if 0 <= global_rank - part.first_rank < part.layout.world_size)

    @property
    def world_size(self) -> int:
        """Ranks of all modules."""
        return max(module.last_rank for module in self.modules) + 1

    @property
    def joins(self) -> tuple[tuple[ModulePlan, ModulePlan], ...]:
        """Every pair of modules of which the first feeds the second, by the second, then in the order of its inputs."""
        return tuple((self.part_named(name), self.part_named(module.name)) for module in self.modules for name in module.inputs)

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For every stage the stages whose outputs are added up to its input, in the order of the module's inputs."""
        last_of = {part.name: part.first_stage + part.layout.num_stages - 1 for part in self.parts}
        found: list[tuple[int, ...]] = []
        for part, module in zip(self.parts, self.modules, strict=True):
            found.append(tuple(last_of[name] for name in module.inputs))
            found += [(stage,) for stage in range(part.first_stage, last_of[part.name])]
        return tuple(found)

    def schedule_of(self, num_microbatches: int) -> Schedule:
        """The lowered schedule of all pipeline ranks, a stage on each, for so many microbatches."""
        from .schedules.joined import joined_schedule  # builders are written in terms of the nouns of this folder

        num_stages = len(self.sources)
        is_line = all(sources == ((stage - 1,) if stage else ()) for stage, sources in enumerate(self.sources))
        ranks = tuple((stage,) for stage in range(num_stages))
        placement = Placement("explicit", num_stages, ranks, num_microbatches, None if is_line else self.sources)
        return joined_schedule(self.schedule.name, placement)

    def part_schedule(self, part: ModulePlan, num_microbatches: int) -> Schedule:
        """The rows of one module in `schedule_of`, stages and pipeline ranks counted from 0 as in the module's own plan."""
        whole, pp = self.schedule_of(num_microbatches), part.layout.pp
        first, last = (int(whole.offsets[part.first_stage + place]) for place in (0, pp))
        columns = whole.actions.take(slice(first, last)).columns
        actions = ActionArray(columns[0] - part.first_stage, *columns[1:])
        before = next((source.layout.pp - 1 for source, target in self.joins if target is part), None)
        ranks = tuple((stage,) for stage in range(pp))
        placement = ModulePlacement("explicit", pp, ranks, num_microbatches, before=before, gives=not part.has_loss)
        offsets = whole.offsets[part.first_stage : part.first_stage + pp + 1] - first
        return Schedule(whole.name, placement, actions, offsets)

    @property
    def has_equal_dp(self) -> bool:
        """True when all modules cut the batch alike."""
        return len({module.layout.dp for module in self.modules}) == 1

    @property
    def degrees(self) -> str:
        """For people: `encoder tp4 -> decoder tp2 pp2`; `left tp2 + right pp2 -> last tp3`, and what is fed by others in brackets."""

        def written(module: Module) -> str:
            own, fed_by = f"{module.name} {module.layout.degrees}", [each for each in self.modules if each.name in module.inputs]
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
        return sum(each.num_elements for part in self.parts for each in part.held_parameters)

    def replaced(self, change: Callable[[Module], Module], **shared: Any) -> ModularPlan:
        """The plan with every module changed and some sections replaced."""
        return replace(self, modules=tuple(change(module) for module in self.modules), **shared)
