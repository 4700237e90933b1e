"""The rules that tie keys of a plan together, as one table. Every rule that a plan breaks is reported, not only the first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .cluster import ClusterSpec
from .divisors import divisors
from .errors import LayoutError, PlanError, did_you_mean
from .layout import Layout
from .leaves import leaf_sizes
from .microbatches import constant_microbatches
from .model import ModelSpec
from .plan import Batch, Numerics, Precision, ScheduleChoice
from .schedules import CATALOG, default_name
from .stages import assign_layers


@dataclass(frozen=True)
class Rule:
    """`check` takes the nouns of the sections that `keys` names, in order of first mention, and yields one sentence per problem."""

    name: str
    keys: tuple[str, ...]
    doc: str
    check: Callable[..., Iterator[str]]

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections whose nouns `check` takes."""
        return tuple(dict.fromkeys(key.partition(".")[0] for key in self.keys))


@dataclass(frozen=True)
class BrokenRule:
    """A rule and one sentence about how it is broken."""

    rule: Rule
    sentence: str


def broken_rules(nouns: Mapping[str, Any]) -> list[BrokenRule]:
    """Every problem of the rules whose sections are all in `nouns` (section name -> noun), in table order."""
    found = []
    for rule in RULES:
        if all(section in nouns for section in rule.sections):
            found += [BrokenRule(rule, sentence) for sentence in rule.check(*(nouns[section] for section in rule.sections))]
    return found


def _tp_divides_heads(layout: Layout, model: ModelSpec) -> Iterator[str]:
    for name in dict.fromkeys(("num_heads", "num_kv_heads") if model.num_heads != model.num_kv_heads else ("num_heads",)):
        heads = getattr(model, name)
        if heads % layout.tp:
            yield f"tp={layout.tp} does not divide {name}={heads} (model {model.name}). Use tp among {divisors(model.num_kv_heads)}."


def _leaves_admit_tp(layout: Layout, model: ModelSpec, batch: Batch, numerics: Numerics) -> Iterator[str]:
    sizes = leaf_sizes(
        model,
        batch.sequence,
        ffn_block=numerics.ffn_block,
        vocab_block=numerics.vocab_block,
        gradient_token_block=numerics.gradient_token_block,
        reduction_token_block=numerics.reduction_token_block,
    )
    if model.num_kv_heads % layout.tp == 0:
        try:
            sizes.check(layout.tp)
        except LayoutError as error:
            yield from error.problems


def _microbatches_divide(batch: Batch, layout: Layout) -> Iterator[str]:
    try:
        constant_microbatches(batch.global_size, batch.micro_size, layout.dp)
    except PlanError as error:
        yield from error.problems


def _stages_hold_all_layers(layout: Layout, model: ModelSpec) -> Iterator[str]:
    try:
        assign_layers(model.num_layers, layout)
    except LayoutError as error:
        yield from error.problems


def _interleaving_matches(schedule: ScheduleChoice, layout: Layout) -> Iterator[str]:
    if schedule.file is not None:
        return
    if schedule.name not in CATALOG:
        yield f'schedule.name="{schedule.name}" is not in the catalog{did_you_mean(schedule.name, CATALOG)}'
        return
    entry, suggested = CATALOG[schedule.name], default_name(layout.pp, layout.vpp)
    nearest = entry.nearest_vpp(layout.vpp)
    if nearest == layout.vpp:
        return
    if not entry.chunks:
        yield (
            f'vpp={layout.vpp} needs an interleaved schedule, but schedule.name="{schedule.name}" runs one stage per rank. '
            f'Set schedule.name = "{suggested}" or layout.vpp = 1.'
        )
    else:
        needed = f"{'at least ' if entry.fixed_vpp is None else ''}{nearest}"
        yield (
            f'schedule.name="{schedule.name}" needs vpp of {needed}, but vpp={layout.vpp}. '
            f'Set layout.vpp = {nearest} or schedule.name = "{suggested}".'
        )


def _sizes_are_built(schedule: ScheduleChoice, layout: Layout, batch: Batch) -> Iterator[str]:
    if schedule.file is not None or schedule.name not in CATALOG or batch.global_size % (batch.micro_size * layout.dp):
        return
    num_microbatches = batch.global_size // (batch.micro_size * layout.dp)
    if problem := CATALOG[schedule.name].condition(layout.pp, num_microbatches):
        yield problem


def _name_or_file(schedule: ScheduleChoice) -> Iterator[str]:
    if schedule.file is not None and schedule.name != ScheduleChoice().name:
        yield f'schedule.name="{schedule.name}" and schedule.file="{schedule.file}" both choose a schedule. Give one of them.'


def _stages_are_sharded(schedule: ScheduleChoice, layout: Layout) -> Iterator[str]:
    if schedule.max_active_stages is not None and layout.zero != 3:
        yield (
            f"max_active_stages={schedule.max_active_stages} says how many stages' parameters ZeRO-3 gathers at a time, "
            f"but zero={layout.zero} keeps them all. Set layout.zero = 3, or leave max_active_stages out."
        )


def _positions_suffice(batch: Batch, model: ModelSpec) -> Iterator[str]:
    if model.position == "learned" and batch.sequence > model.max_positions:
        yield (
            f"sequence={batch.sequence} is longer than the learned position table, max_positions={model.max_positions} "
            f"(model {model.name}). Use sequence <= {model.max_positions}, or model.max_positions = {batch.sequence}."
        )


def _cluster_is_filled(cluster: ClusterSpec, layout: Layout) -> Iterator[str]:
    if cluster.num_devices != layout.world_size:
        model_size = layout.tp * layout.cp * layout.pp
        dp, rest = divmod(cluster.num_devices, model_size)
        remedy = f"dp={dp}" if dp and not rest else f"num_devices={layout.world_size}"
        yield (
            f"tp*cp*dp*pp = {layout.tp}*{layout.cp}*{layout.dp}*{layout.pp} = {layout.world_size} ranks, "
            f"but num_devices={cluster.num_devices}. Use {remedy}."
        )


def _nodes_are_whole(cluster: ClusterSpec) -> Iterator[str]:
    if cluster.num_devices > cluster.devices_per_node and cluster.num_devices % cluster.devices_per_node:
        per_node = cluster.devices_per_node
        below = cluster.num_devices // per_node * per_node
        yield f"num_devices={cluster.num_devices} does not fill nodes of devices_per_node={per_node}. Use {below} or {below + per_node}."


def _sequence_divides(layout: Layout, batch: Batch) -> Iterator[str]:
    if layout.sequence_parallel and batch.sequence % layout.tp:
        below = batch.sequence // layout.tp * layout.tp
        yield (
            f"sequence_parallel=true cuts sequence={batch.sequence} over tp={layout.tp}, which does not divide it. "
            f"Use sequence={below or layout.tp}, or sequence_parallel=false."
        )


def _dense_only(layout: Layout) -> Iterator[str]:
    if layout.cp > 1:
        yield f"cp={layout.cp}: context parallelism can be laid out but not yet simulated or run. Use cp=1; more tp saves memory too."
    if layout.ep > 1:
        yield f"ep={layout.ep}: models are dense so far, so there are no experts to spread. Use ep=1."
    if layout.etp is not None and layout.etp != layout.tp:
        yield f"etp={layout.etp}: models are dense so far, so experts have no tensor parallelism of their own. Leave etp out."


def _dtype_has_peak(precision: Precision, cluster: ClusterSpec) -> Iterator[str]:
    if precision.dtype not in cluster.peak_flops_per_s:
        known = sorted(cluster.peak_flops_per_s)
        yield f'dtype="{precision.dtype}" has no peak rate on cluster {cluster.name}. Use one of {", ".join(known)}.'


RULES: tuple[Rule, ...] = (
    Rule("tp-divides-heads", ("layout.tp", "model.num_heads", "model.num_kv_heads"), "every tp rank holds whole heads", _tp_divides_heads),
    Rule(
        "leaves-admit-tp",
        ("layout.tp", "model.ffn_hidden_size", "model.vocab_size", "batch.sequence", "numerics.ffn_block", "numerics.vocab_block"),
        "every tp rank owns at least one whole leaf of each feature axis",
        _leaves_admit_tp,
    ),
    Rule("microbatches-divide", ("batch.global", "batch.micro", "layout.dp"), "micro*dp divides the global batch", _microbatches_divide),
    Rule(
        "stages-hold-all-layers",
        ("layout.stages", "layout.pp", "layout.vpp", "model.num_layers"),
        "pp*vpp divides the layers, or the stage string holds them all",
        _stages_hold_all_layers,
    ),
    Rule(
        "interleaving-matches",
        ("schedule.name", "layout.vpp"),
        "vpp above 1 and interleaved schedules go together",
        _interleaving_matches,
    ),
    Rule(
        "schedule-can-be-built",
        ("schedule.name", "layout.pp", "batch.global", "batch.micro", "layout.dp"),
        "the schedule exists for this number of ranks and microbatches",
        _sizes_are_built,
    ),
    Rule(
        "stages-are-sharded",
        ("schedule.max_active_stages", "layout.zero"),
        "only ZeRO-3 gathers the parameters of stages",
        _stages_are_sharded,
    ),
    Rule("name-or-file", ("schedule.name", "schedule.file"), "a schedule has a name or a file, not both", _name_or_file),
    Rule("positions-suffice", ("batch.sequence", "model.max_positions"), "learned positions cover the sequence", _positions_suffice),
    Rule(
        "cluster-is-filled",
        ("cluster.num_devices", "layout.dp", "layout.tp", "layout.pp", "layout.cp"),
        "the ranks of the layout are the devices of the cluster",
        _cluster_is_filled,
    ),
    Rule("nodes-are-whole", ("cluster.num_devices", "cluster.devices_per_node"), "several nodes are whole nodes", _nodes_are_whole),
    Rule("sequence-divides", ("layout.sequence_parallel", "batch.sequence", "layout.tp"), "tp divides the sequence", _sequence_divides),
    Rule("dense-only", ("layout.cp", "layout.ep", "layout.etp"), "axes that the code does not run yet are refused", _dense_only),
    Rule("dtype-has-peak", ("precision.dtype", "cluster.peak_flops_per_s"), "the cluster has a rate for it", _dtype_has_peak),
)
"""Every cross-key rule. The first key of a rule that the file gives is the line that its problems point at."""
