"""What a shell script would start, as far as that can be known without executing it.

`commands_of` follows assignments, arrays, expansions, arithmetic over whole numbers and decided branches, and gives
every command with its arguments, each argument with the line that it is written on. What cannot be known (`$( )`,
variables of the environment, branches whose condition is not known) stays in the arguments as a piece that says why.
A script is taken to be called without arguments.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from .shell_arithmetic import changed, evaluate
from .shell_conditions import Condition
from .shell_nodes import (
    DECLARING,
    OPAQUE,
    AndOr,
    Arithmetic,
    Assignment,
    Case,
    Command,
    For,
    Function,
    Group,
    If,
    Negated,
    Opaque,
    Parameter,
    Part,
    Pipeline,
    ShellSyntaxError,
    Simple,
    Text,
    While,
    Word,
)
from .shell_sourced import Sourced
from .shell_syntax import Parser
from .shell_values import (
    Argument,
    Array,
    Environment,
    Piece,
    Pieces,
    common_array,
    common_text,
    differs,
    spaced,
    text_of,
    words_of,
)

MOST_ITERATIONS, MOST_STEPS, DEEPEST, LONGEST = 64, 20_000, 24, 200_000
"""Rounds of a loop, commands of a script, calls in calls that are followed, and characters of a variable."""


@dataclass(frozen=True)
class Started:
    """A command that the script starts; `depends` is the line of the undecided condition that it lies under, 0 for
    none, and `within` the command that it was given to as a text (`srun bash -c "..."`)."""

    arguments: tuple[Argument, ...]
    line: int
    depends: int = 0
    within: tuple[Argument, ...] = ()


class _Leave(Exception):
    """`exit`, or with `returns` the end of a function, or of a loop's round."""

    def __init__(self, *, returns: bool = False):
        super().__init__()
        self.returns = returns


def commands_of(text: str, variables: Mapping[str, str], sourced: Sourced | None = None) -> tuple[Started, ...]:
    """Every command that the script may start, in order. `variables` are those of the environment; `sourced` reads the
    files that it takes in, and hears of those that are not read.

    Raises `ShellSyntaxError` for a text that is not of the part of bash that is known.
    """
    shell = _Shell({name: (Piece(value, 0),) for name, value in variables.items()}, sourced=sourced or Sourced())
    with suppress(_Leave):
        shell.run(Parser(text.replace(OPAQUE, "")).script())
    return tuple(shell.started)


def arguments_in(text: str, variables: Mapping[str, str]) -> tuple[Argument, ...]:
    """The words of a text that is arguments alone, whose lines need not end in a backslash. Raises
    `ShellSyntaxError`."""
    shell = _Shell({name: (Piece(value, 0),) for name, value in variables.items()})
    found: list[Argument] = []
    for number, line in enumerate(text.replace(OPAQUE, "").split("\n"), start=1):
        parser = Parser(line.rstrip("\\ \t\r"), [number] * (len(line) + 1))
        for command in parser.script():
            if isinstance(command, Simple):
                found += [Argument(pieces) for pieces in shell.fields(command.words)]
    return tuple(found)


def variables_of(
    text: str, variables: Mapping[str, str], sourced: Sourced | None = None
) -> dict[str, tuple[Argument, ...]]:
    """The words of each variable as the script leaves it, but for those that are given. Raises `ShellSyntaxError`."""
    shell = _Shell({name: (Piece(value, 0),) for name, value in variables.items()}, sourced=sourced or Sourced())
    with suppress(_Leave):
        shell.run(Parser(text.replace(OPAQUE, "")).script())
    return {
        name: tuple(each for value in ([held] if isinstance(held, tuple) else held) for each in words_of(value))
        for name, held in shell.environment.items()
        if name not in variables
    }


@dataclass
class _Shell:
    given: Environment
    environment: Environment = field(default_factory=dict)
    functions: dict[str, tuple[Command, ...]] = field(default_factory=dict)
    started: list[Started] = field(default_factory=list)
    depends: int = 0
    undecided: str = ""
    within: tuple[Argument, ...] = ()
    depth: int = 0
    steps: int = 0
    sourced: Sourced = field(default_factory=Sourced)

    def __post_init__(self) -> None:
        self.environment = {**self.given, **self.environment}

    # -- commands --------------------------------------------------------------------------------------------------

    def run(self, commands: Iterable[Command]) -> bool | None:
        """Follows commands; whether the last succeeds, None where that is not known."""
        truth: bool | None = True
        for command in commands:
            truth = self._one(command)
        return truth

    def _one(self, command: Command) -> bool | None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise ShellSyntaxError(f"this script runs more than {MOST_STEPS:,} commands", 0)
        match command:
            case Simple():
                return self._simple(command)
            case AndOr():
                return self._and_or(command)
            case Negated():
                truth = self._one(command.command)
                return None if truth is None else not truth
            case Pipeline():
                for each in command.commands:
                    self._one(each)
                return None
            case Group():
                return self._group(command)
            case If():
                return self._if(command)
            case Case():
                return self._case(command)
            case For():
                return self._for(command)
            case While():
                return self._while(command)
            case Function():
                self.functions[command.name] = command.body
                return True

    def _and_or(self, command: AndOr) -> bool | None:
        truth = self._one(command.left)
        wanted = command.operator == "&&"
        if truth is None:
            line = _line_of(command.right)
            self._branches([(command.right,)], line, may_skip=True, why=self.undecided)
            return None
        return self._one(command.right) if truth is wanted else truth

    def _group(self, command: Group) -> bool | None:
        if not command.is_subshell:
            return self.run(command.body)
        saved = dict(self.environment)
        try:
            return self.run(command.body)
        except _Leave:
            return None
        finally:
            self.environment = saved

    def _if(self, command: If) -> bool | None:
        open_bodies: list[tuple[Command, ...]] = []
        why = ""
        for condition, body in command.branches:
            truth = self.run(condition)
            if truth is True and not open_bodies:
                return self.run(body)
            if truth is None:
                why = why or self.undecided
            if truth is not False:
                open_bodies.append(body)
            if truth is True:
                break
        else:
            if not open_bodies:
                return self.run(command.orelse)
            open_bodies.append(command.orelse)
        self._branches(open_bodies, command.line, why=why)
        return None

    def _case(self, command: Case) -> bool | None:
        word = Argument(self._joined(command.word))
        possible: list[tuple[Command, ...]] = []
        for patterns, body in command.branches:
            matches = [self._matches(word, Argument(self._joined(pattern))) for pattern in patterns]
            if any(matches) and not possible:
                return self.run(body)
            if any(match is not False for match in matches):
                possible.append(body)
            if any(matches):
                break
        else:
            possible.append(())
        if len(possible) > 1:
            self._branches(possible, command.line, why=word.unknown)
        return None

    @staticmethod
    def _matches(word: Argument, pattern: Argument) -> bool | None:
        if pattern.text == "*":
            return True
        return None if word.unknown or pattern.unknown else fnmatch.fnmatchcase(word.text, pattern.text)

    def _for(self, command: For) -> bool | None:
        if command.words is None:
            self._branches([command.body], command.line, may_skip=True)
            return None
        values = self.fields(command.words)
        for value in values[:MOST_ITERATIONS]:
            self.environment[command.name] = value
            try:
                self.run(command.body)
            except _Leave as leave:
                if not leave.returns:
                    raise
        return None

    def _while(self, command: While) -> bool | None:
        if _asks_arguments(command.condition):
            return True  # the script is called without any
        for _ in range(MOST_ITERATIONS):
            truth = self.run(command.condition)
            if truth is False:
                return True
            if truth is None:
                break
            try:
                self.run(command.body)
            except _Leave as leave:
                if not leave.returns:
                    raise
                return None
        self._branches([command.body], command.line, may_skip=True)
        return None

    def _branches(
        self, bodies: Sequence[Sequence[Command]], line: int, *, may_skip: bool = False, why: str = ""
    ) -> None:
        """Follows bodies of which it is not known which one runs, and keeps of the variables what they agree on."""
        before, depends = dict(self.environment), self.depends
        ends: list[Environment] = [before] if may_skip else []
        self.depends = self.depends or line
        left = 0
        for body in bodies:
            self.environment = {name: list(v) if isinstance(v, list) else v for name, v in before.items()}
            try:
                self.run(body)
                ends.append(self.environment)
            except _Leave:
                left += 1
        self.depends = depends
        if not ends:
            raise _Leave
        self.environment = self._agreed(ends, f"line {line}", why)

    def _agreed(self, ends: Sequence[Environment], where: str, why: str) -> Environment:
        agreed: Environment = {}
        for name in dict.fromkeys(name for end in ends for name in end):
            values = [end.get(name) for end in ends]
            if all(value == values[0] for value in values[1:]) and values[0] is not None:
                agreed[name] = values[0]
            elif name in self.given:
                agreed[name] = self.given[name]
            elif any(isinstance(value, list) for value in values):
                agreed[name] = common_array(
                    [value if isinstance(value, list) else [] for value in values], differs(name, where, why)
                )
            else:
                texts = [() if value is None or isinstance(value, list) else value for value in values]
                agreed[name] = common_text(texts, differs(name, where, why), [value is None for value in values])
        return agreed

    def _simple(self, command: Simple) -> bool | None:
        for assignment in command.assignments:
            if not command.words or _literal_first(command) in DECLARING:
                self._assign(assignment)
        if not command.words:
            return True
        arguments = tuple(Argument(pieces) for pieces in self.fields(command.words))
        if not arguments:
            return True
        name = arguments[0].text
        if name in ("[[", "[", "test", "(("):
            return self._test(name, arguments)
        if name in ("true", ":", "false"):
            return name != "false"
        if name in self.functions:
            return self._call(name, arguments[1:])
        if name == "exit":
            raise _Leave
        if name in ("return", "break", "continue"):
            raise _Leave(returns=True)
        if name == "unset":
            for each in arguments[1:]:
                self.environment.pop(each.text, None)
        elif name in ("read", "mapfile", "readarray"):
            self._read(arguments[1:], command)
        elif name == "eval":
            return self._nested(spaced([each.pieces for each in arguments[1:]]))
        elif name in ("source", "."):
            return self._source(arguments[1:], command.line)
        elif name not in ("echo", "printf", *DECLARING, "set", "shift", "trap"):
            self._start(arguments, command)
        return None

    def _source(self, arguments: Sequence[Argument], line: int) -> bool | None:
        """Follows a file that is taken in, all of it on this line."""
        text = self.sourced.text(arguments[0], line) if arguments and self.depth < DEEPEST else None
        if text is None:
            return None
        text, self.depth = text.replace(OPAQUE, ""), self.depth + 1
        try:
            return self.run(Parser(text, [line] * (len(text) + 1)).script())
        except _Leave as leave:
            if not leave.returns:
                raise
            return None
        except ShellSyntaxError as error:
            raise ShellSyntaxError(f"{arguments[0].text}: {error}", line) from None
        finally:
            self.depth -= 1

    def _read(self, arguments: Sequence[Argument], command: Simple) -> None:
        names = [each.text for each in arguments if each.text.isidentifier()]
        if command.here and names:
            self.environment[names[-1]] = self._joined(_expanding(command.here))
            return
        for name in names:
            self.environment[name] = (Piece(f"${name}", command.line, unknown=f"${name} is read when the script runs"),)

    def _start(self, arguments: tuple[Argument, ...], command: Simple) -> None:
        """Keeps a command; one that is text for another shell is followed."""
        texts = [each.text for each in arguments]
        nested = next(
            (
                number + 1
                for number, text in enumerate(texts[:-1])
                if re.fullmatch(r"-[a-z]*c", text) and number and texts[number - 1].rpartition("/")[2] in _SHELLS
            ),
            None,
        )
        if nested is None and (texts[0].rpartition("/")[2] in _HOLDERS or len(texts) == 1):
            nested = next((number for number, text in enumerate(texts) if _is_command(text)), None)
        if nested is not None:
            outer, self.within = self.within, (*self.within, *arguments[:nested])
            self._nested(arguments[nested].pieces, subshell=True)
            self.within = outer
        if command.here and texts[0].rpartition("/")[2] in (*_SHELLS, *_HOLDERS, "sbatch"):
            self._nested(self._joined(_expanding(command.here)), subshell=True)
        if nested is None:
            self.started.append(Started(arguments, command.line, self.depends, self.within))

    def _nested(self, pieces: Pieces, *, subshell: bool = False) -> bool | None:
        """Follows a text as a script of its own."""
        if self.depth >= DEEPEST:
            return None
        carried: list[Piece] = []
        text, lines = [], []
        for piece in pieces:
            written = piece.text
            if piece.unknown:
                written = f"{OPAQUE}{len(carried)}{OPAQUE}"
                carried.append(piece)
            text.append(written)
            lines += [piece.line] * len(written)
        saved, outer = dict(self.environment), self.carried
        self.carried, self.depth = carried, self.depth + 1
        try:
            return self.run(Parser("".join(text), lines).script())
        except ShellSyntaxError:
            return None  # text for a program that is no shell
        except _Leave:
            return None
        finally:
            self.carried, self.depth = outer, self.depth - 1
            if subshell:
                self.environment = saved

    carried: list[Piece] = field(default_factory=list)

    def _call(self, name: str, arguments: Sequence[Argument]) -> bool | None:
        if self.depth >= DEEPEST:
            return None
        positional = [key for key in self.environment if key.isdigit() or key in "@*#"]
        saved = {key: self.environment.pop(key) for key in positional}
        for number, each in enumerate(arguments, start=1):
            self.environment[str(number)] = each.pieces
        self.environment["@"] = self.environment["*"] = [each.pieces for each in arguments]
        self.environment["#"] = (Piece(str(len(arguments)), 0),)
        self.depth += 1
        try:
            return self.run(self.functions[name])
        except _Leave as leave:
            if not leave.returns:
                raise
            return None
        finally:
            self.depth -= 1
            for key in [key for key in self.environment if key.isdigit() or key in "@*#"]:
                del self.environment[key]
            self.environment |= saved

    def _assign(self, assignment: Assignment) -> None:
        name, old = assignment.name, self.environment.get(assignment.name)
        if assignment.array is not None:
            new = self.fields(assignment.array)
            before = old if isinstance(old, list) else [old] if old else []
            if len(before) + len(new) > LONGEST:
                raise ShellSyntaxError(f"${name} grows beyond {LONGEST:,} words", assignment.line)
            self.environment[name] = [*before, *new] if assignment.appends else new
            return
        value = self._joined(assignment.value or ())
        if assignment.appends and old is not None:
            if isinstance(old, list):
                self.environment[name] = [(*(old[0] if old else ()), *value), *old[1:]]
                return
            value = (*old, *value)
        if name in self.given and any(piece.unknown for piece in value):
            value = self.given[name]  # type: ignore[assignment]
        if sum(len(piece.text) for piece in value) > LONGEST or len(value) > LONGEST:
            raise ShellSyntaxError(f"${name} grows beyond {LONGEST:,} characters", assignment.line)
        self.environment[name] = tuple(replace(piece, quoted=False) for piece in value)

    # -- words -----------------------------------------------------------------------------------------------------

    def fields(self, words: Iterable[Word]) -> Array:
        """The words after expansion and splitting."""
        return [field for word in words for field in self._split(word)]

    def _split(self, word: Word) -> Iterator[Pieces]:
        current: list[Piece] | None = None
        if _is_empty_array(word) and not any(self._values(part) for part in word if isinstance(part, Parameter)):
            return
        for part in word:
            values = self._values(part)
            for number, pieces in enumerate(values):
                if number and current is not None:
                    yield tuple(current)
                    current = None
                if part.quoted or isinstance(part, Text):
                    current = [*(current or []), *(replace(each, quoted=True) for each in pieces)]
                    continue
                for piece in pieces:
                    if piece.unknown:
                        current = [*(current or []), piece]
                        continue
                    for letters in re.findall(r"\s+|\S+", piece.text):
                        if not letters.isspace():
                            current = [*(current or []), Piece(letters, piece.line)]
                        elif current is not None:
                            yield tuple(current)
                            current = None
        if current is not None:
            yield tuple(current)

    def _joined(self, word: Word) -> Pieces:
        """The word after expansion, unsplit."""
        return tuple(piece for part in word for piece in spaced(self._values(part)))

    def _values(self, part: Part) -> Array:
        """What a part becomes: one value, or one for each element of an array."""
        match part:
            case Text():
                return [(Piece(part.text, part.line),)]
            case Arithmetic():
                return [(self._arithmetic(part),)]
            case Opaque():
                if part.number is not None:
                    return [(self.carried[part.number],)] if part.number < len(self.carried) else [()]
                if (folder := self.sourced.own_folder(part.written)) is not None:
                    return [(Piece(folder, part.line),)]
                return [(Piece(part.written, part.line, unknown=f"{part.written} is not executed"),)]
            case Parameter():
                return self._parameter(part)

    def _parameter(self, part: Parameter) -> Array:
        value = self.environment.get(part.name)
        if isinstance(value, list):
            elements = value
            if part.index not in ("@", "*"):
                number = int(part.index) if part.index.isdigit() else 0
                value = elements[number] if number < len(elements) else None
            elif part.operator == "#":
                return [(Piece(str(len(elements)), part.line),)]
            elif not part.operator or elements:
                return [spaced(elements)] if part.index == "*" and part.quoted else list(elements)
            else:
                value = None
        elif part.name in ("@", "*") and value is None and not part.operator:
            return []
        return self._scalar(part, value)

    def _scalar(self, part: Parameter, value: Pieces | None) -> Array:
        operator, unknown = part.operator, self._unknown(part)
        is_known = value is not None and not any(piece.unknown for piece in value)
        is_empty = value is None or (":" in operator and is_known and not text_of(value))
        if operator in (":-", "-", ":=", "="):
            if not is_empty:
                return [value or ()]
            default = self._joined(part.argument)
            if "=" in operator:
                self.environment[part.name] = default
            return [default]
        if operator in (":+", "+"):
            if value is None or is_known:
                return [() if is_empty else self._joined(part.argument)]
            return [(unknown,)]
        if value is None:
            return [(unknown,)]
        if operator in ("", ":?", "?"):
            return [value]
        argument = self._joined(part.argument)
        if not is_known or any(piece.unknown for piece in argument):
            return [(unknown,)]
        text = changed(operator, text_of(value), text_of(argument), self.environment)
        return [(unknown,)] if text is None else [(Piece(text, part.line),)]

    def _unknown(self, part: Parameter) -> Piece:
        name = part.name
        why = f"${name} is not set in the script"
        if value := self.environment.get(name):
            pieces = value if isinstance(value, tuple) else value[0]
            why = next((piece.unknown for piece in pieces if piece.unknown), f"{part.written} is not understood")
        elif name.isdigit():
            why = f"${name} is an argument of the script"
        return Piece(part.written, part.line, unknown=why)

    def _arithmetic(self, part: Arithmetic) -> Piece:
        pieces = self._joined(part.expression)
        why = next((piece.unknown for piece in pieces if piece.unknown), "")
        if not why:
            try:
                return Piece(str(evaluate(text_of(pieces), self.environment)), part.line)
            except ValueError as error:
                why = str(error)
        return Piece(part.written, part.line, unknown=why)

    # -- conditions ------------------------------------------------------------------------------------------------

    def _test(self, name: str, arguments: Sequence[Argument]) -> bool | None:
        if name == "((":
            try:
                return bool(evaluate(re.sub(r"\$\{?(\w+)\}?", r"\1", arguments[1].text), self.environment))
            except ValueError:
                return None
        words = list(arguments[1:])
        if words and words[-1].text in ("]", "]]"):
            words.pop()
        self.undecided = next((each.unknown for each in words if each.unknown), "")
        return Condition(words).disjunction()


_SHELLS = ("bash", "sh", "zsh")
_HOLDERS = ("srun", "ssh", "mpirun", "pdsh", "docker", "singularity", "apptainer", "nohup", "sudo", "kubectl")
"""Programs that are given a command as one text."""


def _is_command(text: str) -> bool:
    return ".py" in text and " --" in text and len(text.split()) > 2


def _is_empty_array(word: Word) -> bool:
    """True for `"${array[@]}"`, which is no word at all where the array is empty."""
    arrays = [part for part in word if isinstance(part, Parameter) and part.index == "@" and part.quoted]
    return bool(arrays) and all(part in arrays or (isinstance(part, Text) and not part.text) for part in word)


def _literal_first(command: Simple) -> str:
    return "".join(part.text for part in command.words[0] if isinstance(part, Text)) if command.words else ""


def _line_of(command: Command) -> int:
    match command:
        case AndOr():
            return _line_of(command.left)
        case Negated():
            return _line_of(command.command)
        case Pipeline():
            return _line_of(command.commands[0])
        case Group():
            return _line_of(command.body[0]) if command.body else 0
        case Function():
            return 0
        case _:
            return command.line


def _asks_arguments(condition: Sequence[Command]) -> bool:
    """True for the condition of a loop over the script's arguments."""
    for command in condition:
        if isinstance(command, Simple):
            if _literal_first(command) == "getopts":
                return True
            for part in (part for word in command.words for part in word):
                name = part.name if isinstance(part, Parameter) else ""
                if name in ("#", "1", "@", "*") or (isinstance(part, Text) and "$#" in part.text):
                    return True
    return False


def _expanding(word: Word) -> Word:
    """A here-document's text with its expansions."""
    text = "".join(part.text for part in word if isinstance(part, Text))
    lines = [part.line for part in word if isinstance(part, Text) for _ in part.text]
    parts: list[Part] = []
    Parser(text, lines).double(parts, "")
    return tuple(parts)
