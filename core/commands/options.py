"""The options that verbs share: a plan from a file, from options alone, or from both; and where the output goes."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ...core.plan.plan import AnyPlan
from ..base.bounds import shown
from ..base.errors import PlanError
from ..base.files import check_place, write_text
from ..base.terminal import Text, fitted, say
from ..imports.account import Imported
from ..imports.given import Reading, known_formats, values_of
from ..layout.layout import Layout
from ..machine.cluster import ClusterSpec
from ..model.model import ModelSpec
from ..plan.build import Draft, refuse_modules
from ..plan.communicators import Communicators
from ..plan.keys import key_named
from ..plan.optimizer import Optimizer
from ..plan.plan import Plan, any_plan, build_plan
from ..plan.runtime import Offload, Runtime
from ..plan.sections import Batch, DataParallel, Numerics, Precision
from ..plan.toml import Given, Values
from ..plan.train import Checkpoint, Train
from ..schedule import default_name
from ..schedule.timeline import Timeline

MICROBATCHES_PER_STAGE = 4
"""Without a global batch there are this many microbatches per pipeline rank: enough to see the steady state."""

LONGEST_DEFAULT_SEQUENCE = 8192
"""Without a sequence the model's positions count, up to this many."""

USUAL_STACK = "megatron-te"
"""The stack that a search on GPUs plans for where nobody says one."""

OUTPUT_SUFFIXES = (".json", ".txt", ".log", ".md", "")
"""What `emit` writes: JSON, or text."""


@dataclass(frozen=True)
class PlanOption:
    """One command-line option and the plan key it sets; `--set` reaches all other keys."""

    flag: str
    key: str
    kind: type = int
    metavar: str = "N"


OPTIONS = (
    PlanOption("--devices", "cluster.num_devices"),
    PlanOption("--tp", "layout.tp"),
    PlanOption("--pp", "layout.pp"),
    PlanOption("--vpp", "layout.vpp"),
    PlanOption("--dp", "layout.dp"),
    PlanOption("--cp", "layout.cp"),
    PlanOption("--ep", "layout.ep"),
    PlanOption("--etp", "layout.etp"),
    PlanOption("--zero", "layout.zero"),
    PlanOption("--global-batch", "batch.global"),
    PlanOption("--micro-batch", "batch.micro"),
    PlanOption("--sequence", "batch.sequence"),
    PlanOption("--dtype", "precision.dtype", str),
    PlanOption("--recompute", "recompute.mode", str),
    PlanOption("--profile", "runtime.profile", str),
    PlanOption("--headroom", "cluster.headroom", str, "8%|BYTES"),
)


@dataclass(frozen=True)
class SearchSpace:
    """What a layout search starts from: everything of a plan that changes a prediction but the layout.

    `pinned` holds the layout, microbatch, recompute and schedule values that the user fixed on the command line, by
    dotted key (`{"layout.tp": 8}`); all others are free. `batch.micro_size` is 1 unless pinned or given by a plan file.
    `free` holds what is free besides, the values to try by dotted key (`simulator.search.freed`).
    `assumed` holds keys that the question implies and nobody gave, such as the stack that a GPU cluster is planned for.
    """

    model: ModelSpec
    cluster: ClusterSpec
    batch: Batch
    precision: Precision = field(default_factory=Precision)
    runtime: Runtime = field(default_factory=Runtime)
    numerics: Numerics = field(default_factory=Numerics)
    optimizer: Optimizer = field(default_factory=Optimizer)
    data_parallel: DataParallel = field(default_factory=DataParallel)
    offload: Offload = field(default_factory=Offload)
    train: Train = field(default_factory=Train)
    communicators: Communicators = field(default_factory=Communicators)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    pinned: Mapping[str, Any] = field(default_factory=dict, hash=False)
    free: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)
    assumed: Mapping[str, Any] = field(default_factory=dict, hash=False)


_ITS_OWN = ("pinned", "free", "assumed")

SHARED_WITH_PLANS = tuple(entry.name for entry in fields(SearchSpace) if entry.name not in _ITS_OWN)
"""What a search space takes from a plan."""


def whole_number(text: str) -> int:
    """The type of options that are whole numbers. Raises `ArgumentTypeError`, which repeats no more of the
    text than its beginning."""
    try:
        return int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number of some digits") from error


def add_plan(
    parser: argparse.ArgumentParser, plan_help: str = "a plan.toml, or a file that `shardproof import` reads"
) -> None:
    """Adds PLAN, described by `plan_help`, and the options that complete, override or replace it."""
    parser.add_argument(
        "plan", nargs="?", metavar="PLAN", help=(f"{plan_help}; may be left out where options say enough")
    )
    group = parser.add_argument_group("plan options", "override PLAN, or stand in for it")
    group.add_argument(
        "--model", metavar="NAME|CONFIG", help=("a preset (see `shardproof presets`) or the path of a config.json")
    )
    group.add_argument("--cluster", metavar="NAME|FILE", help="a preset or a cluster.toml (default: this-host)")
    for option in OPTIONS:
        key = key_named(option.key)
        metavar = "NAME" if key.listed else "|".join(key.choices) if key.choices else option.metavar
        note = (
            " (derived from --devices when omitted)"
            if option.key == "layout.dp"
            else f" (`presets {key.listed}`)"
            if key.listed
            else ""
        )
        group.add_argument(
            option.flag, type=whole_number if option.kind is int else option.kind, metavar=metavar, help=key.doc + note
        )
    group.add_argument(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        default=None,
        help=key_named("layout.sequence_parallel").doc,
    )
    group.add_argument("--schedule", metavar="NAME|CSV", help="a schedule's name or a schedule CSV")
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help=("any key of the plan file (repeatable)"),
    )
    add_import(parser)


def add_import(parser: argparse.ArgumentParser) -> None:
    """Adds the options for a PLAN in somebody else's format."""
    group = parser.add_argument_group("somebody else's file", "where PLAN is no plan.toml")
    group.add_argument(
        "--from",
        dest="import_from",
        metavar="NAME[:VERSION]",
        help=f"its format, where the file does not tell: {known_formats()}",
    )
    group.add_argument(
        "--variable",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what a variable holds that its script does not set (repeatable)",
    )


def read_plan(args: argparse.Namespace) -> Plan:
    """The plan that PLAN and the options describe. Raises `PlanError` with all problems, each with its file
    and line or its option."""
    values, source, imported = _values(args)
    say_open(imported)
    return build_plan(values, source)


def read_any_plan(args: argparse.Namespace) -> AnyPlan:
    """The same for verbs that take [[modules]] too: a plan of several models where PLAN has them."""
    plan, imported = read_with_account(args)
    say_open(imported)
    return plan


def read_with_account(args: argparse.Namespace) -> tuple[AnyPlan, Imported | None]:
    """The same, and the account of PLAN where it is somebody else's file, of which nothing is said yet."""
    values, source, imported = _values(args)
    return any_plan(values, source), imported


def read_search_space(args: argparse.Namespace) -> SearchSpace:
    """The part of a plan that a layout search starts from; the layout of a PLAN file is set aside,
    that of options is pinned.

    Raises `PlanError` with all problems, as `read_plan` does.
    """
    values, source, imported = _values(args, complete=False)
    say_open(imported)
    refuse_modules(values, source)
    pinned_sections = ("layout", "recompute", "schedule")
    from_options = option_values(args)
    pinned = {
        f"{section}.{name}": given.value
        for section in pinned_sections
        for name, given in from_options.get(section, {}).items()
    }
    if "micro" in from_options.get("batch", {}):
        pinned["batch.micro"] = from_options["batch"]["micro"].value
    checked = Draft(values, source)  # pinned values are checked too, though no layout is built from them
    free = {section: table for section, table in values.items() if section not in pinned_sections}
    _fill_sequence(free)
    assumed = {} if args.plan is not None else _assumed_stack(free)
    draft = Draft(free, source)
    draft.problems = list(dict.fromkeys(checked.problems + draft.problems))
    if "global" not in free["batch"]:
        draft.missing("batch.global", "a search needs a global batch. Give --global-batch or batch.global.")
    nouns = draft.nouns()
    if "num_devices" not in draft.valid["cluster"]:  # known only now that a cluster file has been read
        draft.missing(
            "cluster.num_devices", ("a search needs the number of devices. Give --devices or cluster.num_devices.")
        )
    draft.raise_problems()
    return SearchSpace(**{name: nouns[name] for name in SHARED_WITH_PLANS}, pinned=pinned, assumed=assumed)


def _assumed_stack(values: Values) -> dict[str, Any]:
    """Without a stack: on GPUs that which people run there, filled in as `USUAL_STACK`; on this host our own."""
    runtime = values.setdefault("runtime", {})
    cluster = Draft({"cluster": values.get("cluster", {})}, "").cluster(None)
    if "profile" in runtime or cluster is None or cluster.collective_library != "nccl":
        return {}
    runtime["profile"] = Given(USUAL_STACK, "--profile (default)")
    return {"runtime.profile": USUAL_STACK}


def option_values(args: argparse.Namespace) -> Values:
    """The plan keys that options set, by section and key, each with the option as its origin."""
    values: Values = {}

    def put(key: str, value: Any, origin: str) -> None:
        section, _, name = key.partition(".")
        values.setdefault(section, {})[name] = Given(value, origin)

    if args.model is not None:
        is_path = args.model.endswith(".json") or os.sep in args.model or Path(args.model).is_dir()
        put("model.config" if is_path else "model.preset", args.model, "--model")
    if args.cluster is not None:
        put("cluster.file" if args.cluster.endswith(".toml") else "cluster.preset", args.cluster, "--cluster")
    for option in OPTIONS:
        if (value := getattr(args, option.flag[2:].replace("-", "_"))) is not None:
            put(option.key, value, option.flag)
    if args.sequence_parallel is not None:
        put("layout.sequence_parallel", args.sequence_parallel, "--sequence-parallel")
    if args.schedule is not None:
        put("schedule.file" if args.schedule.endswith(".csv") else "schedule.name", args.schedule, "--schedule")
    for assignment in args.set:
        put(*_assignment(assignment) if isinstance(assignment, str) else assignment)
    return values


def assign(args: argparse.Namespace, key: str, text: str, option: str) -> None:
    """Sets a key of the plan as --set does, for an `option` of another name, which problems then name."""
    args.set.append((*_assignment(f"{key}={text}")[:2], option))


def _assignment(text: str) -> tuple[str, Any, str]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or key.count(".") != 1 or not all(key.split(".")):
        raise PlanError(f"--set {shown(text)}: write section.key=value, such as --set layout.tp=4.")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()  # an unquoted text, as shells leave it
    except (RecursionError, ValueError):
        raise PlanError(
            f"--set {key}: this value is nested too deeply, or has a number of more than 4,300 digits."
        ) from None
    return key, parsed, f"--set {key}"


_EXCLUSIVE = {"model.preset": "model.config", "cluster.preset": "cluster.file", "schedule.name": "schedule.file"}
"""Keys that choose the same thing in two ways: an option for one replaces the other in the file."""


def _values(args: argparse.Namespace, *, complete: bool = True) -> tuple[Values, str, Imported | None]:
    """The values of PLAN and the options, what they are called, and the account of somebody else's PLAN. With
    `complete` options alone get the defaults that a plan needs besides."""
    options = option_values(args)
    if args.plan is not None:
        values, imported = given_values(args, options)
        return with_options(values, options), args.plan, imported
    if given := ["--from"] * (args.import_from is not None) + ["--variable"] * bool(args.variable):
        raise PlanError(
            f"{given[0]} says how PLAN is read, and there is no PLAN. Give the file, or leave {given[0]} out."
        )
    values = with_options({}, options)
    if not values.get("model"):
        raise PlanError(
            "which model? Give PLAN, or --model with a preset (see `shardproof presets`) or the path of a config.json."
        )
    if complete:
        _fill_batch(values)
        _fill_schedule(values)
    return values, "options", None


def with_options(values: Values, options: Values) -> Values:
    """The values of a plan with those that options give (`option_values`) in their place."""
    merged = {section: dict(table) for section, table in values.items()}
    if {"preset", "config"} & options.get("model", {}).keys():
        merged["model"] = {}
    _replace_alternatives(merged, options)
    if any(name in options.get(section, {}) for section, name in _RESIZING) and "dp" not in options.get("layout", {}):
        merged.get("layout", {}).pop("dp", None)
    for section, table in options.items():
        merged.setdefault(section, {}).update(table)
    return merged


def given_values(args: argparse.Namespace, options: Values) -> tuple[Values, Imported | None]:
    """The values of PLAN, and its account where it is somebody else's file. `options` tell how many devices there are.
    Raises `PlanError` as `values_of` does, and for variables of a file that has none."""
    reading = asked_reading(args)
    values, imported = values_of(args.plan, named=reading.named, options=options, variables=reading.variables)
    if imported is None and args.variable:
        raise PlanError(f"--variable is about a script, and {args.plan} is a plan.toml. Leave it out, or use --set.")
    return values, imported


def asked_reading(args: argparse.Namespace) -> Reading:
    """How PLAN is to be read where it is somebody else's file. Raises `PlanError` as `import_variables` does."""
    return Reading(args.import_from, import_variables(args))


def import_variables(args: argparse.Namespace) -> dict[str, str]:
    """Name -> value of every --variable. Raises `PlanError` for one without a name or a value."""
    pairs = [text.partition("=") for text in args.variable]
    for name, equals, value in pairs:
        if not equals or not (name.isidentifier() or name.isdigit()):  # $1 is an argument of the script
            raise PlanError(f"--variable {shown(name + equals + value)}: write NAME=VALUE, such as --variable TP=8.")
    return {name: value for name, _, value in pairs}


def say_open(imported: Imported | None) -> None:
    """Says on standard error what a plan from somebody else's file assumes, and what of the file it does not model."""
    if imported is None:
        return
    for sentence in imported.assumed:
        say(f"{imported.source}: {sentence}", sys.stderr)
    for each in imported.of_status("not-modelled"):
        say(f"{imported.source}:{each.line}: {each.flag} is not modelled: {each.why}", sys.stderr)


_RESIZING = (("cluster", "num_devices"), ("layout", "tp"), ("layout", "pp"), ("layout", "cp"))
"""Options that change how many replicas fit: with one of them, a file's dp is derived anew unless --dp is given."""


def _replace_alternatives(values: Values, options: Values) -> None:
    pairs = [*_EXCLUSIVE.items(), *((other, key) for key, other in _EXCLUSIVE.items())]
    for chosen, other in pairs:
        section, _, name = chosen.partition(".")
        if name in options.get(section, {}):
            values.get(section, {}).pop(other.partition(".")[2], None)


def _fill_sequence(values: Values) -> None:
    """Without a sequence: as many tokens as the model has positions, up to a limit."""
    batch = values.setdefault("batch", {})
    if "sequence" not in batch:
        # its problems are found again, and reported, by the caller
        model = Draft({"model": values.get("model", {})}, "").model()
        positions = LONGEST_DEFAULT_SEQUENCE if model is None else model.max_positions
        batch["sequence"] = Given(min(positions, LONGEST_DEFAULT_SEQUENCE), "--sequence (default)")


def _fill_batch(values: Values) -> None:
    """Without a global batch: a few microbatches per pipeline rank."""
    _fill_sequence(values)
    batch = values["batch"]
    draft = Draft({section: values[section] for section in ("layout", "cluster") if section in values}, "")
    if "global" not in batch:
        layout = draft.layout() or Layout()
        micro = Draft({"batch": batch}, "").valid["batch"].get("micro", 1)
        size = micro * layout.dp * layout.pp * MICROBATCHES_PER_STAGE
        batch["global"] = Given(size, "--global-batch (default)")


def _fill_schedule(values: Values) -> None:
    """Without a schedule's name or file: the usual one for the number of chunks."""
    layout = Draft({"layout": values.get("layout", {})}, "").valid["layout"]
    schedule = values.get("schedule", {})
    if not {"name", "file"} & set(schedule) and layout.get("vpp", 1) > 1:
        values["schedule"] = {
            **schedule,
            "name": Given(default_name(layout.get("pp", 1), layout["vpp"]), "--schedule (default)"),
        }


def add_output(parser: argparse.ArgumentParser, *, findings: bool = False) -> None:
    """Adds --json and -o; with `findings` also --format, for verbs whose result is something that is wrong."""
    printed = parser.add_mutually_exclusive_group()
    printed.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    if findings:
        printed.add_argument(
            "--format",
            choices=("text", "github"),
            default="text",
            help=("github: text, and findings as annotations of GitHub Actions"),
        )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help=("also write the result, as JSON or text by its suffix; - is standard output"),
    )


def add_durations(group: Any) -> None:
    """Adds --durations, which replaces prices by what actions took in recorded steps, to a parser or a
    group of its options."""
    group.add_argument(
        "--durations",
        action="append",
        metavar="FILE",
        help=(
            "a recorded step (`train -o run.timeline.json`) whose durations replace the modelled ones; of several "
            "the middle one"
        ),
    )


def read_durations(args: argparse.Namespace) -> list[Timeline]:
    """The recorded steps that --durations names. Raises `TimelineError` for a file that is none."""
    return [Timeline.load(name) for name in args.durations or ()]


def check_output(output: str | None, *others: str) -> None:
    """Raises `PlanError` for an -o FILE whose suffix names neither JSON nor text nor what else a verb writes,
    and `OSError` where it cannot be written; verbs that work long ask before they start."""
    if output is None or output == "-":
        return
    suffix = Path(output).suffix
    if suffix not in OUTPUT_SUFFIXES and not output.endswith(others):
        *first, last = (".json", ".txt", *others)
        raise PlanError(
            f"-o {output}: this verb writes {', '.join(first)} or {last}, not {suffix}. `shardproof draw` writes "
            "pictures."
        )
    check_place(output)


def emit(args: argparse.Namespace, text: Text, report: Mapping[str, Any]) -> None:
    """Prints `text` within the terminal's width, or `report` as one JSON object with --json; with -o writes the file,
    whole or not at all, and the same on every terminal."""
    check_output(args.output)
    as_json = json.dumps(report, indent=2, allow_nan=False)
    is_file = args.output is not None and args.output != "-"
    if is_file:
        write_text(args.output, (as_json if args.output.endswith(".json") else fitted(text, None)) + "\n")
    if args.json:
        print(as_json)
        return
    say(text)
    if is_file:
        say(f"written: {args.output}", sys.stderr)
