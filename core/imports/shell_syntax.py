"""A part of bash's grammar: the text of a script -> commands. Nothing is executed.

Known are words with their quoting and expansions, assignments, arrays, lists, pipelines, `if`, `for`, `while`, `until`,
`case`, functions, groups, here-documents and `[[ ]]`. Parts of a word keep the line that they are written on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Text:
    """Characters as they stand, all of one line."""

    text: str
    line: int
    quoted: bool


@dataclass(frozen=True)
class Parameter:
    """`$name` or `${...}`: `index` is that of an array (`@`, `*` or a number), `operator` such as `:-`, and `argument`
    the word behind it. `written` is how it is spelled."""

    name: str
    line: int
    quoted: bool
    written: str
    index: str = ""
    operator: str = ""
    argument: Word = ()


@dataclass(frozen=True)
class Arithmetic:
    """`$(( ))`."""

    expression: Word
    line: int
    quoted: bool
    written: str


@dataclass(frozen=True)
class Opaque:
    """What would have to be executed to be known: `$( )`, backticks. `number` is set where an outer text has such a
    part."""

    written: str
    line: int
    quoted: bool
    number: int | None = None


Part = Text | Parameter | Arithmetic | Opaque
Word = tuple[Part, ...]


@dataclass(frozen=True)
class Assignment:
    """`NAME=value`, `NAME+=value`, or with words in brackets an array."""

    name: str
    appends: bool
    value: Word | None
    array: tuple[Word, ...] | None
    line: int


@dataclass(frozen=True)
class Simple:
    """Assignments, then words; a here-document's words where it has one."""

    assignments: tuple[Assignment, ...]
    words: tuple[Word, ...]
    line: int
    here: Word = ()


@dataclass(frozen=True)
class AndOr:
    """Two commands joined by `&&` or `||`."""

    left: Command
    operator: str
    right: Command


@dataclass(frozen=True)
class Negated:
    """`! command`."""

    command: Command


@dataclass(frozen=True)
class Pipeline:
    """Commands joined by `|`."""

    commands: tuple[Command, ...]


@dataclass(frozen=True)
class Group:
    """`{ }`, or in a shell of its own `( )`."""

    body: tuple[Command, ...]
    is_subshell: bool


@dataclass(frozen=True)
class If:
    """Pairs of condition and body, and the body of `else`."""

    branches: tuple[tuple[tuple[Command, ...], tuple[Command, ...]], ...]
    orelse: tuple[Command, ...]
    line: int


@dataclass(frozen=True)
class Case:
    """A word, and pairs of patterns and body."""

    word: Word
    branches: tuple[tuple[tuple[Word, ...], tuple[Command, ...]], ...]
    line: int


@dataclass(frozen=True)
class For:
    """`for name in words`; without words it is not known over what it goes."""

    name: str
    words: tuple[Word, ...] | None
    body: tuple[Command, ...]
    line: int


@dataclass(frozen=True)
class While:
    """`while` and `until`."""

    condition: tuple[Command, ...]
    body: tuple[Command, ...]
    line: int


@dataclass(frozen=True)
class Function:
    """A definition."""

    name: str
    body: tuple[Command, ...]


Command = Simple | AndOr | Negated | Pipeline | Group | If | Case | For | While | Function

DECLARING = ("export", "declare", "local", "readonly", "typeset")
"""Commands whose arguments may be assignments."""

OPAQUE = "\0"
"""Opens and closes the number of a part that an outer text could not tell (`Opaque.number`)."""

_RESERVED = ("then", "elif", "else", "fi", "do", "done", "esac", "}")
_BLANK = " \t\r"
_ENDS = " \t\r\n;|&()<>"


class ShellSyntaxError(ValueError):
    """The text is not of the part of bash that is known."""

    def __init__(self, what: str, line: int):
        super().__init__(what)
        self.line = line


@dataclass
class Parser:
    """Reads `text`; `lines` has the line of every character, for texts that are put together from several places."""

    text: str
    lines: list[int] = field(default_factory=list)
    position: int = 0
    pending: list[tuple[str, bool, list[Word]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.lines:
            line = 1
            for letter in self.text:
                self.lines.append(line)
                line += letter == "\n"

    @property
    def line(self) -> int:
        """The line here."""
        return self.lines[min(self.position, len(self.lines) - 1)] if self.lines else 1

    def script(self) -> tuple[Command, ...]:
        """All commands of the text. Raises `ShellSyntaxError`."""
        body = self._list(())
        if self.position < len(self.text):
            raise ShellSyntaxError(f"{self.text[self.position]!r} is not expected here", self.line)
        return body

    # -- lists -----------------------------------------------------------------------------------------------------

    def _list(self, ends: tuple[str, ...]) -> tuple[Command, ...]:
        """Commands up to a reserved word among `ends`, a closing bracket, or the end."""
        found: list[Command] = []
        while True:
            self._skip(newlines=True)
            if self._at(";") and not self.text.startswith(";;", self.position):
                self.position += 1
                continue
            if self.position >= len(self.text) or self._at(")") or self.text.startswith(";;", self.position):
                return tuple(found)
            if (word := self._peek()) in ends:
                return tuple(found)
            if word in _RESERVED:
                raise ShellSyntaxError(f"{word} without its beginning", self.line)
            found.append(self._and_or())
            self._skip()
            if self._at("&") and not self.text.startswith("&&", self.position):
                self.position += 1

    def _and_or(self) -> Command:
        command = self._pipeline()
        while True:
            self._skip()
            operator = self.text[self.position : self.position + 2]
            if operator not in ("&&", "||"):
                return command
            self.position += 2
            self._skip(newlines=True)
            command = AndOr(command, operator, self._pipeline())

    def _pipeline(self) -> Command:
        self._skip()
        if self._peek() == "!":
            self._expect("!")
            return Negated(self._pipeline())
        commands = [self._command()]
        while True:
            self._skip()
            if not self._at("|") or self.text.startswith("||", self.position):
                return commands[0] if len(commands) == 1 else Pipeline(tuple(commands))
            self.position += 2 if self.text.startswith("|&", self.position) else 1
            self._skip(newlines=True)
            commands.append(self._command())

    def _command(self) -> Command:
        self._skip()
        compound = {
            "if": self._if,
            "for": self._for,
            "select": self._for,
            "while": self._while,
            "until": self._while,
            "case": self._case,
            "{": self._braces,
            "function": self._function,
        }.get(self._peek())
        if compound is not None:
            return self._redirected(compound())
        if self.text.startswith("((", self.position):
            start, line = self.position, self.line
            self._skip_brackets()
            return Simple(
                (), ((Text("((", line, False),), (Text(self.text[start + 2 : self.position - 2], line, True),)), line
            )
        if self._at("("):
            self.position += 1
            body = self._list(())
            self._close(")")
            return self._redirected(Group(body, True))
        return self._simple()

    def _redirected(self, command: Command) -> Command:
        while True:
            self._skip()
            if not self._redirection([]):
                return command

    def _if(self) -> Command:
        line = self.line
        branches = []
        self._expect("if")
        while True:
            condition = self._list(("then",))
            self._expect("then")
            branches.append((condition, self._list(("elif", "else", "fi"))))
            word = self._peek()
            self._expect(word)
            if word == "elif":
                continue
            orelse: tuple[Command, ...] = ()
            if word == "else":
                orelse = self._list(("fi",))
                self._expect("fi")
            return If(tuple(branches), orelse, line)

    def _for(self) -> Command:
        line = self.line
        self._expect(self._peek())
        self._skip()
        words: list[Word] | None = None
        if self.text.startswith("((", self.position):
            self._skip_brackets()
            name = ""
        else:
            name = self._peek()
            self._expect(name)
            self._skip(newlines=True)
            if self._peek() == "in":
                self._expect("in")
                words = []
                while True:
                    self._skip()
                    if self.position >= len(self.text) or self.text[self.position] in ";\n":
                        break
                    words.append(self._word())
        body = self._do()
        return For(name, None if words is None else tuple(words), body, line)

    def _while(self) -> Command:
        line = self.line
        self._expect(self._peek())
        condition = self._list(("do",))
        return While(condition, self._do(), line)

    def _do(self) -> tuple[Command, ...]:
        self._skip(newlines=True)
        if self._at(";"):
            self.position += 1
            self._skip(newlines=True)
        self._expect("do")
        body = self._list(("done",))
        self._expect("done")
        return body

    def _case(self) -> Command:
        line = self.line
        self._expect("case")
        self._skip()
        word = self._word()
        self._skip(newlines=True)
        self._expect("in")
        branches = []
        while True:
            self._skip(newlines=True)
            if self._peek() == "esac":
                self._expect("esac")
                return Case(word, tuple(branches), line)
            if self._at("("):
                self.position += 1
            patterns = []
            while not self._at(")"):
                self._skip(newlines=True)
                if self._at("|"):
                    self.position += 1
                    continue
                patterns.append(self._word())
                self._skip()
            self._close(")")
            body = self._list(("esac",))
            branches.append((tuple(patterns), body))
            while self._at(";") or self._at("&"):
                self.position += 1

    def _braces(self) -> Command:
        self._expect("{")
        body = self._list(("}",))
        self._expect("}")
        return Group(body, False)

    def _function(self) -> Command:
        self._expect("function")
        self._skip()
        name = self._peek()
        self._expect(name)
        self._skip()
        if self.text.startswith("(", self.position):
            self._close("(")
            self._close(")")
        return self._function_body(name)

    def _function_body(self, name: str) -> Command:
        self._skip(newlines=True)
        command = self._command()
        return Function(name, command.body if isinstance(command, Group) else (command,))

    def _simple(self) -> Command:
        line = self.line
        assignments: list[Assignment] = []
        words: list[Word] = []
        here: list[Word] = []
        declares = False
        start = self.position
        while True:
            self._skip()
            ends = self.position >= len(self.text) or self.text[self.position] in "\n;|&)"
            if ends and not self.text.startswith("&>", self.position):
                break
            if self._redirection(here):
                continue
            if self._at("("):
                if len(words) == 1 and not assignments and (name := _literal(words[0])):
                    self._close("(")
                    self._close(")")
                    return self._function_body(name)
                raise ShellSyntaxError("'(' is not expected here", self.line)
            if (not words or declares) and (assignment := self._assignment()) is not None:
                assignments.append(assignment)
                continue
            words.append(self._word())
            if len(words) == 1:
                declares = _literal(words[0]) in DECLARING
                if _literal(words[0]) == "[[":
                    words += self._test_words()
        if self.position == start:
            raise ShellSyntaxError(f"{self.text[start : start + 1]!r} is not expected here", self.line)
        return Simple(tuple(assignments), tuple(words), line, here[0] if here else ())

    def _test_words(self) -> Iterator[Word]:
        """The words of `[[ ]]`, in which operators are words too."""
        while True:
            self._skip(newlines=True)
            if self.position >= len(self.text):
                raise ShellSyntaxError("[[ without ]]", self.line)
            line = self.line
            operator = next((each for each in ("&&", "||", "(", ")", "<", ">") if self._at(each)), None)
            if operator is not None:
                self.position += len(operator)
                yield (Text(operator, line, False),)
                continue
            word = self._word(brackets=True)
            yield word
            if _literal(word) == "]]":
                return

    def _assignment(self) -> Assignment | None:
        """The assignment that begins here, if one does."""
        end = self.position
        while end < len(self.text) and (self.text[end].isalnum() or self.text[end] == "_"):
            end += 1
        name = self.text[self.position : end]
        if not name or name[0].isdigit():
            return None
        appends = self.text.startswith("+=", end)
        if not appends and not self.text.startswith("=", end):
            return None
        line = self.line
        self.position = end + (2 if appends else 1)
        if self._at("("):
            self.position += 1
            array = []
            while True:
                self._skip(newlines=True)
                if self._at(")"):
                    self.position += 1
                    return Assignment(name, appends, None, tuple(array), line)
                if self.position >= len(self.text):
                    raise ShellSyntaxError(f"{name}=( has no closing bracket", line)
                if self._at("("):
                    raise ShellSyntaxError("'(' is not expected here", self.line)
                before = self.position
                array.append(self._word())
                if self.position == before:  # an operator in an array means nothing to bash either
                    raise ShellSyntaxError(f"{self.text[before]!r} is not expected here", self.line)
        return Assignment(name, appends, self._word(), None, line)

    def _redirection(self, here: list[Word]) -> bool:
        """True after skipping a redirection; a here-document's words go to `here` when its lines are read."""
        start = self.position
        while self.position < len(self.text) and self.text[self.position].isdigit():
            self.position += 1
        if self.text.startswith("&>", self.position):
            self.position += 1
        if not (self._at("<") or self._at(">")):
            self.position = start
            return False
        if self.text.startswith(("<(", ">("), self.position):
            self.position += 1
            self._skip_brackets()
            return True
        if self.text.startswith("<<", self.position) and not self.text.startswith("<<<", self.position):
            self.position += 2
            strips = self._at("-")
            self.position += strips
            self._skip()
            word = self._word()
            self.pending.append((_plain(word), strips, here))
            return True
        while self.position < len(self.text) and self.text[self.position] in "<>&|":
            self.position += 1
        self._skip()
        self._word()
        return True

    # -- words -----------------------------------------------------------------------------------------------------

    def _word(self, *, brackets: bool = False) -> Word:
        """The word that begins here; with `brackets` parts of it may be bracketed, as those of a pattern."""
        parts: list[Part] = []
        depth = 0
        while self.position < len(self.text):
            letter = self.text[self.position]
            if letter in _ENDS:
                if brackets and letter == "(" and parts:
                    depth += 1
                elif not (brackets and depth and letter in "()|"):
                    break
                depth -= letter == ")"
            if letter == "\\":
                self._backslash(parts)
            elif letter == "'":
                self._single(parts)
            elif letter == '"':
                self.position += 1
                self._double(parts, '"')
            else:
                self._unquoted(parts)
        return tuple(parts)

    def _unquoted(self, parts: list[Part]) -> None:
        letter, line = self.text[self.position], self.line
        if letter == "$":
            self._dollar(parts, quoted=False)
        elif letter == "`":
            parts.append(self._backticks(quoted=False))
        elif letter == OPAQUE:
            parts.append(self._carried(quoted=False))
        else:
            start = self.position
            self.position += 1
            while self.position < len(self.text) and self.text[self.position] not in _ENDS + "\\'\"$`" + OPAQUE:
                self.position += 1
            parts.append(Text(self.text[start : self.position], line, False))

    def _backslash(self, parts: list[Part]) -> None:
        line = self.line
        following = self.text[self.position + 1 : self.position + 2]
        if following == "\r" and self.text[self.position + 2 : self.position + 3] == "\n":
            self.position += 3
            return
        self.position += 2
        if following and following != "\n":
            parts.append(Text(following, line, True))

    def _single(self, parts: list[Part]) -> None:
        end = self.text.find("'", self.position + 1)
        if end < 0:
            raise ShellSyntaxError("' is not closed", self.line)
        self._texts(parts, self.position + 1, end)
        self.position = end + 1

    def _texts(self, parts: list[Part], start: int, end: int) -> None:
        """The quoted text between two positions, a part for each line of it."""
        first = True
        while start < end or first:
            newline = self.text.find("\n", start, end)
            stop = end if newline < 0 else newline + 1
            parts.append(Text(self.text[start:stop], self.lines[start] if start < len(self.lines) else self.line, True))
            start, first = stop, False

    def _double(self, parts: list[Part], close: str) -> None:
        """The rest of a double-quoted text, or with another `close` of a text that is read like one."""
        opening = self.line
        parts.append(Text("", opening, True))
        start = self.position
        while True:
            if self.position >= len(self.text):
                if close:
                    raise ShellSyntaxError(f"{close} is not closed", opening)
                break
            letter = self.text[self.position]
            if close and letter == close:
                break
            if letter not in "\\$`" + OPAQUE:
                self.position += 1
                continue
            if start < self.position:
                self._texts(parts, start, self.position)
            if letter == "\\":
                self._escaped(parts)
            elif letter == "$":
                self._dollar(parts, quoted=True)
            else:
                parts.append(self._backticks(quoted=True) if letter == "`" else self._carried(quoted=True))
            start = self.position
        if start < self.position:
            self._texts(parts, start, self.position)
        self.position += len(close)

    def _escaped(self, parts: list[Part]) -> None:
        line = self.line
        following = self.text[self.position + 1 : self.position + 2]
        self.position += 2
        if following != "\n":
            parts.append(Text(following if following in '"$`\\' else "\\" + following, line, True))

    def _carried(self, *, quoted: bool) -> Part:
        end = self.text.index(OPAQUE, self.position + 1)
        number, line = int(self.text[self.position + 1 : end]), self.line
        self.position = end + 1
        return Opaque("", line, quoted, number)

    def _backticks(self, *, quoted: bool) -> Part:
        start, line = self.position, self.line
        end = self.position + 1
        while end < len(self.text) and self.text[end] != "`":
            end += 2 if self.text[end] == "\\" else 1
        if end >= len(self.text):
            raise ShellSyntaxError("` is not closed", line)
        self.position = end + 1
        return Opaque(self.text[start : end + 1], line, quoted)

    def _dollar(self, parts: list[Part], *, quoted: bool) -> None:
        start, line = self.position, self.line
        following = self.text[start + 1 : start + 2]
        if self.text.startswith("$((", start) and (end := self._arithmetic_end(start)) > 0:
            inner = Parser(self.text[start + 3 : end - 2], self.lines[start + 3 : end - 2])
            expression: list[Part] = []
            inner._double(expression, "")
            self.position = end
            parts.append(Arithmetic(tuple(expression), line, quoted, self.text[start:end]))
        elif following == "(":
            self.position += 1
            self._skip_brackets()
            parts.append(Opaque(self.text[start : self.position], line, quoted))
        elif following == "{":
            parts.append(self._braced(quoted=quoted))
        elif following == "'" and not quoted:
            self._ansi(parts)
        elif following == '"' and not quoted:
            self.position += 2
            self._double(parts, '"')
        elif following and (following.isalnum() or following in "_@*#?$!-"):
            end = start + 2
            if following.isalpha() or following == "_":
                while end < len(self.text) and (self.text[end].isalnum() or self.text[end] == "_"):
                    end += 1
            self.position = end
            name = self.text[start + 1 : end]
            index = name if name in "@*" else ""
            parts.append(Parameter(name, line, quoted, self.text[start:end], index))
        else:
            self.position += 1
            parts.append(Text("$", line, quoted))

    def _arithmetic_end(self, start: int) -> int:
        """The end of `$(( ))` behind its brackets; 0 where it is `$( ( ) )`."""
        saved = self.position
        self.position = start + 1
        self._skip_brackets()
        end, self.position = self.position, saved
        return end if self.text[end - 2 : end] == "))" else 0

    def _ansi(self, parts: list[Part]) -> None:
        """`$'...'`."""
        line, found = self.line, []
        self.position += 2
        while self.position < len(self.text) and self.text[self.position] != "'":
            letter = self.text[self.position]
            if letter == "\\":
                self.position += 1
                letter = _ANSI.get(self.text[self.position : self.position + 1], self.text[self.position :][:1])
            found.append(letter)
            self.position += 1
        self.position += 1
        parts.append(Text("".join(found), line, True))

    def _braced(self, *, quoted: bool) -> Part:
        """`${...}`."""
        start, line = self.position, self.line
        self.position += 2
        prefix = ""
        if (
            self.text[self.position : self.position + 1] in "#!"
            and self.text[self.position + 1 : self.position + 2] != "}"
        ):
            prefix = self.text[self.position]
            self.position += 1
        begin = self.position
        while self.position < len(self.text) and (
            self.text[self.position].isalnum() or self.text[self.position] == "_"
        ):
            self.position += 1
        if self.position == begin and self.text[begin : begin + 1] in "@*#?$!-":
            self.position += 1
        name, index = self.text[begin : self.position], ""
        if self._at("["):
            end = self.text.find("]", self.position)
            index, self.position = self.text[self.position + 1 : end], end + 1
        if name in ("@", "*"):
            index = name
        operator = prefix
        begin = self.position
        while self.position < len(self.text) and self.text[self.position] in ":-=+?#%/^,@":
            self.position += 1
            if (
                self.text[begin : self.position] in _OPERATORS
                and self.text[begin : self.position + 1] not in _OPERATORS
            ):
                break
        operator += self.text[begin : self.position]
        argument: list[Part] = []
        while not self._at("}"):
            if self.position >= len(self.text):
                raise ShellSyntaxError("${ is not closed", line)
            letter = self.text[self.position]
            if letter == "\\":
                self._backslash(argument)
            elif letter == "'" and not quoted:
                self._single(argument)
            elif letter == '"':
                self.position += 1
                self._double(argument, '"')
            elif letter in "$`" + OPAQUE:
                self._unquoted(argument) if not quoted else self._quoted_part(argument)
            else:
                argument.append(Text(letter, self.line, quoted))
                self.position += 1
        self.position += 1
        return Parameter(name, line, quoted, self.text[start : self.position], index, operator, tuple(argument))

    def _quoted_part(self, parts: list[Part]) -> None:
        letter = self.text[self.position]
        if letter == "$":
            self._dollar(parts, quoted=True)
        else:
            parts.append(self._backticks(quoted=True) if letter == "`" else self._carried(quoted=True))

    # -- characters ------------------------------------------------------------------------------------------------

    def _at(self, text: str) -> bool:
        return self.text.startswith(text, self.position)

    def _close(self, bracket: str) -> None:
        self._skip(newlines=True)
        if not self._at(bracket):
            raise ShellSyntaxError(f"{bracket!r} is missing here", self.line)
        self.position += 1

    def _peek(self) -> str:
        """The characters up to the next blank or operator, unquoted ones only."""
        end = self.position
        while end < len(self.text) and self.text[end] not in _ENDS:
            end += 1
        return self.text[self.position : end]

    def _expect(self, word: str) -> None:
        self._skip(newlines=True)
        if not word or self._peek() != word:
            raise ShellSyntaxError(f"{word or 'a word'} is missing here", self.line)
        self.position += len(word)

    def _skip(self, *, newlines: bool = False) -> None:
        """Skips blanks, continued lines and comments; with `newlines` also the ends of lines."""
        while self.position < len(self.text):
            letter = self.text[self.position]
            if letter in _BLANK:
                self.position += 1
            elif self._at("\\\n") or self._at("\\\r\n"):
                self.position = self.text.index("\n", self.position) + 1
            elif letter == "#" and (self.position == 0 or self.text[self.position - 1] in _ENDS):
                end = self.text.find("\n", self.position)
                self.position = len(self.text) if end < 0 else end
            elif letter == "\n" and self.pending:
                self._here_documents()
            elif letter == "\n" and newlines:
                self.position += 1
            else:
                return

    def _here_documents(self) -> None:
        """Reads the here-documents that the line which ends here has opened; stops before the last newline."""
        self.position += 1
        for delimiter, strips, here in self.pending:
            start = self.position
            while self.position < len(self.text):
                end = self.text.find("\n", self.position)
                stop = len(self.text) if end < 0 else end
                written = self.text[self.position : stop].rstrip("\r")
                if (written.lstrip("\t") if strips else written) == delimiter:
                    break
                self.position = min(stop + 1, len(self.text))
            parts: list[Part] = []
            self._texts(parts, start, self.position)
            here.append(tuple(parts))
            end = self.text.find("\n", self.position)
            self.position = len(self.text) if end < 0 else end + 1
        self.pending = []
        self.position -= 1 if self.position and self.text[self.position - 1] == "\n" else 0

    def _skip_brackets(self) -> None:
        """Skips from an opening bracket to behind the one that closes it; quotes have no brackets."""
        depth, line = 0, self.line
        while self.position < len(self.text):
            letter = self.text[self.position]
            if letter == "\\":
                self.position += 1
            elif letter == "'":
                end = self.text.find("'", self.position + 1)
                self.position = len(self.text) if end < 0 else end
            elif letter == '"':
                self.position += 1
                self._double([], '"')
                continue
            elif letter == "(":
                depth += 1
            elif letter == ")":
                depth -= 1
                if depth == 0:
                    self.position += 1
                    return
            self.position += 1
        raise ShellSyntaxError("( is not closed", line)


_ANSI = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v"}

_OPERATORS = (
    *(":-", "-", ":=", "=", ":+", "+", ":?", "?"),
    *("#", "##", "%", "%%", "/", "//", "/#", "/%", ":", "^", "^^", ",", ",,", "@"),
)
"""What may follow a name in `${ }`."""


def _literal(word: Word) -> str:
    """The word where it is unquoted text only, else nothing."""
    return "".join(part.text if isinstance(part, Text) and not part.quoted else OPAQUE for part in word)


def _plain(word: Word) -> str:
    """A word's texts, quoted or not."""
    return "".join(part.text for part in word if isinstance(part, Text))
