"""The training command of a Megatron script, argument file or YAML file: its arguments with their lines, and how many
devices its launcher takes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..base.errors import PlanError, Problem
from ..base.findings import Location
from .account import Request
from .megatron_flags import Flag, all_flags
from .megatron_occurrences import Occurrence, TrainingCommand
from .shell import Started, arguments_in, commands_of, variables_of
from .shell_nodes import ShellSyntaxError
from .shell_sourced import Sourced
from .shell_values import Argument, words_of

LINE_VARIABLE = "TRAINING_LINE"
"""--variable TRAINING_LINE=40 chooses among several training commands."""

_SIGNS = ("--num-layers", "--hidden-size", "--micro-batch-size", "--tensor-model-parallel-size", "--seq-length")
_TRAINS = re.compile(r"pretrain|train|finetune|sft|run_pretrain", re.IGNORECASE)
_NO_TRAINING = re.compile(
    r"generat|inference|server|eval|convert|preprocess|checkpoint|export|quantize|hf2|2hf|zeroshot|retro_"
    r"|merge|lambada|prompt|tasks/|setup|torchrun|deepspeed$",
    re.IGNORECASE,
)


def training_command(request: Request) -> TrainingCommand:
    """The training command of the file. Raises `PlanError` where there is none, or several differ."""
    if re.search(r"^\s*MODEL_ARGS:|^\s*[\"']?--[a-z-]+[\"']?:", request.text, re.MULTILINE):
        from .megatron_yaml import command_of_yaml

        return command_of_yaml(request)
    if re.match(r"(\s|#[^\n]*\n)*--[a-z]", request.text):
        try:
            return TrainingCommand(list(occurrences(arguments_in(request.text, request.variables))))
        except ShellSyntaxError as error:
            raise _problem(request, f"these arguments are not understood: {error}", error.line) from None
    variables = {**request.variables, **_slurm_variables(request.text)}
    sourced = Sourced(Path(request.source).parent)
    try:
        started = commands_of(request.text, variables, sourced)
        if not any(argument.text.endswith(".py") for each in started for argument in each.arguments) and (
            alone := _of_variables(variables_of(request.text, variables, sourced))
        ):
            return replace(alone, unread=sourced.unread)
    except RecursionError:
        raise _problem(request, "this script is nested too deeply", 0) from None
    except ShellSyntaxError as error:
        raise _problem(request, f"this script is not understood: {error}", error.line) from None
    chosen = _chosen(request, [each for each in (_split(one, variables) for one in started) if each is not None])
    return replace(chosen, unread=sourced.unread)


def _of_variables(variables: Mapping[str, tuple[Argument, ...]]) -> TrainingCommand | None:
    """The arguments that a script only keeps in variables, for another to use; None where it keeps none."""
    named = {name: words for name, words in variables.items() if any(each.text in _SIGNS for each in words)}
    inner = {name: {(each.text, each.line) for each in words} for name, words in named.items()}
    outer = [name for name in named if not any(inner[name] < inner[other] for other in named)]
    if not outer:
        return None
    command = TrainingCommand([each for name in outer for each in occurrences(named[name])])
    command.devices_unknown = "the file starts nothing"
    command.assumed.append(f"the file starts nothing: the arguments that {', '.join(outer)} holds are read.")
    return command


def _problem(request: Request, sentence: str, line: int) -> PlanError:
    place = Location(request.source, line or None)
    return PlanError([Problem(sentence, None, place, origin=f"{request.source}:{line}" if line else request.source)])


def _chosen(request: Request, commands: Sequence[tuple[Started, TrainingCommand]]) -> TrainingCommand:
    """The one training command; equal ones are one."""
    trains = [each for each in commands if _TRAINS.search(each[1].program)] or list(commands)
    if (wanted := request.variables.get(LINE_VARIABLE)) is not None:
        trains = [each for each in trains if str(each[0].line) == wanted] or trains
    different = {_same(each[1]): each for each in trains}
    if not different:
        raise _problem(request, _nothing(request), 0)
    if len(different) > 1:
        lines = list(dict.fromkeys(each[0].line for each in different.values()))
        if len(lines) > 1:
            raise _problem(
                request,
                f"this script has different training commands, on lines {', '.join(map(str, lines))}. Choose one by "
                f"--variable {LINE_VARIABLE}={lines[0]}.",
                lines[0],
            )
        command = next(iter(different.values()))[1]
        command.assumed.append(
            f"line {lines[0]} starts {len(different)} trainings that differ (it lies in a loop). The first is read."
        )
        return command
    return next(iter(different.values()))[1]


def _nothing(request: Request) -> str:
    return (
        "this script starts no training program (a .py with arguments such as --num-layers) that could be found. Give "
        "the script that does, or a file of its arguments alone."
    )


def _same(command: TrainingCommand) -> tuple[object, ...]:
    return tuple((each.flag, each.values) for each in command.occurrences)


def _split(started: Started, variables: Mapping[str, str]) -> tuple[Started, TrainingCommand] | None:
    """A started command as launcher, program and arguments; None for one that trains nothing."""
    arguments = started.arguments
    texts = [each.text for each in arguments]
    if not any(
        sign in text.split() or text.startswith(f"{sign}=") for text in _all_texts(arguments) for sign in _SIGNS
    ):
        return None
    number = next((number for number, text in enumerate(texts) if text.endswith(".py")), None)
    if number is None:
        number = _program_without_name(texts)
    program = texts[number] if number >= 0 else ""
    if _NO_TRAINING.search(program) and not re.search("pretrain|finetune", program.rpartition("/")[2]):
        return None
    if number < 0 and texts[0].startswith("--"):
        return None  # what a comment or a blank behind a backslash has cut off
    command = TrainingCommand(list(occurrences(arguments[number + 1 :])), program.rpartition("/")[2])
    command.program_line = arguments[number].line if number >= 0 else started.line
    launcher = (*started.within, *arguments[: max(number, 0)])
    command.launcher = list(occurrences(launcher, {}))
    _count_devices(command, [each.text for each in launcher], variables)
    if started.depends:
        command.assumed.append(f"the condition of line {started.depends} is taken to choose this training command")
    return started, command


def _all_texts(arguments: Iterable[Argument]) -> Iterator[str]:
    for each in arguments:
        yield each.text
        for alternative in each.alternatives:
            yield "".join(piece.text for piece in alternative)


def _program_without_name(texts: Sequence[str]) -> int:
    """Where the program stands whose name is not known: before the first argument that is Megatron's."""
    known = all_flags()
    for number, text in enumerate(texts):
        if text.partition("=")[0] in known and text.partition("=")[0] not in LAUNCHER:
            return number - 1
    return -1


# -- arguments ---------------------------------------------------------------------------------------------------------


def occurrences(
    arguments: Sequence[Argument], flags: Mapping[str, Flag] | None = None, conditional: str = ""
) -> Iterator[Occurrence]:
    """The flags of an argument line with their values, as argparse takes them. `conditional` says why it is not known
    whether they are given."""
    flags = all_flags() if flags is None else flags
    left = list(arguments)
    while left:
        first = left.pop(0)
        if first.alternatives:
            yield from _of_branches(first, flags)
            continue
        spelled, equals, value = first.text.partition("=")
        if not spelled.startswith("-") or spelled == "-":
            if spelled.strip() or first.unknown or first.text:
                yield Occurrence(first.text, first.text, (), first.line, first.unknown or conditional)
            continue
        arity = _arity(flags.get(spelled), has_table=bool(flags))
        taken = [] if equals else _taken(left, arity)
        values = (value,) if equals else tuple(each.text for each in taken)
        unknown = conditional or first.unknown or next((each.unknown for each in taken if each.unknown), "")
        yield Occurrence(spelled, spelled, values, first.line, unknown)


def _arity(flag: Flag | None, *, has_table: bool) -> str:
    """How many values a flag takes. Those without a key take what follows, so that an unquoted list stays together."""
    if flag is None:
        return "*" if has_table else "?"
    return "*" if flag.arity == "1" and flag.status != "mapped" else flag.arity


def _taken(left: list[Argument], arity: str) -> list[Argument]:
    most = {"0": 0, "1": 1, "?": 1}.get(arity, int(arity) if arity.isdigit() else len(left))
    taken: list[Argument] = []
    while left and len(taken) < most and not re.match(r"--?[A-Za-z]", left[0].text):
        if left[0].alternatives and arity not in ("1", "?") and taken:
            break
        taken.append(left.pop(0))
    return taken


def _of_branches(argument: Argument, flags: Mapping[str, Flag]) -> Iterator[Occurrence]:
    """The flags that some branch of an undecided condition gives, once each."""
    seen = set()
    for alternative in argument.alternatives:
        for each in occurrences(words_of(alternative), flags, argument.unknown):
            if each.flag not in seen:
                seen.add(each.flag)
                yield each


# -- devices -----------------------------------------------------------------------------------------------------------

_NODES = ("--nnodes", "--num-nodes", "--nodes", "--num-machines")
_PER_NODE = ("--nproc-per-node", "--num-gpus", "--ntasks-per-node", "--gpus-per-node", "--nproc")
LAUNCHER = (*_NODES, *_PER_NODE)


def _slurm_variables(text: str) -> dict[str, str]:
    """What Slurm sets from the #SBATCH lines of a script."""
    given: dict[str, str] = {}
    for name, value in re.findall(
        r"^#SBATCH\s+(-N|--nodes|--ntasks-per-node|--gpus-per-node|--gres|-n|--ntasks)[=\s]+(\S+)", text, re.MULTILINE
    ):
        count = value.rpartition(":")[2] if name in ("--gres", "--gpus-per-node") else value
        if count.isdigit():
            given.setdefault(name, count)
    nodes = given.get("-N") or given.get("--nodes")
    per_node = given.get("--gres") or given.get("--gpus-per-node")
    tasks = given.get("--ntasks-per-node")
    total = given.get("-n") or given.get("--ntasks") or (str(int(nodes) * int(tasks)) if nodes and tasks else None)
    named = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": total,
        "SLURM_NPROCS": total,
        "SLURM_NTASKS_PER_NODE": tasks,
        "SLURM_GPUS_PER_NODE": per_node,
        "SLURM_GPUS_ON_NODE": per_node,
    }
    return {name: value for name, value in named.items() if value is not None}


def _count_devices(command: TrainingCommand, launcher: Sequence[str], variables: Mapping[str, str]) -> None:
    """Sets how many devices the launcher takes."""
    counts: dict[str, int] = {}
    for each in command.launcher:
        name = each.flag.replace("_", "-")
        name = {"-N": "--nodes"}.get(name, name)
        axis = "nodes" if name in _NODES else "per node" if name in _PER_NODE else ""
        if not axis or (axis == "nodes" and ":" in each.value):
            continue
        if each.unknown or not each.value.isdigit():
            why = each.unknown or f"it is {each.value!r}"
            command.devices_unknown = command.devices_unknown or f"{each.flag} {each.value} is not known: {why}"
        else:
            counts[axis] = int(each.value)
    starts = " ".join(launcher)
    if command.devices_unknown:
        return
    if "per node" not in counts and "srun" in starts.split() and "nproc" not in starts:
        tasks = variables.get("SLURM_NTASKS", "")
        if tasks.isdigit():
            command.num_devices = int(tasks)
            return
    if "per node" in counts:
        command.num_devices = counts["per node"] * counts.get("nodes", 1)
    elif re.search(r"\bsrun\b|mpirun|deepspeed|torchrun|distributed|accelerate", starts) or not starts:
        command.devices_unknown = "the launcher does not say how many processes a node has"
    else:
        command.num_devices = 1
