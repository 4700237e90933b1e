"""A part of bash's grammar: the text of a script -> commands. Nothing is executed.

Known are words with their quoting and expansions, assignments, arrays, lists, pipelines, `if`, `for`, `while`, `until`,
`case`, functions, groups, here-documents and `[[ ]]`.
"""

from __future__ import annotations

from collections.abc import Iterator

from .shell_nodes import (
    DECLARING,
    AndOr,
    Assignment,
    Case,
    Command,
    For,
    Function,
    Group,
    If,
    Negated,
    Pipeline,
    ShellSyntaxError,
    Simple,
    Text,
    While,
    Word,
)
from .shell_words import Words, literal, plain

_RESERVED = ("then", "elif", "else", "fi", "do", "done", "esac", "}")


class Parser(Words):
    """Reads the commands of a text."""

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
        branches: list[tuple[tuple[Command, ...], tuple[Command, ...]]] = []
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
                    words.append(self._some_word())
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
        word = self.word()
        self._skip(newlines=True)
        self._expect("in")
        branches: list[tuple[tuple[Word, ...], tuple[Command, ...]]] = []
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
                patterns.append(self._some_word())
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
                if len(words) == 1 and not assignments and (name := literal(words[0])):
                    self._close("(")
                    self._close(")")
                    return self._function_body(name)
                raise ShellSyntaxError("'(' is not expected here", self.line)
            if (not words or declares) and (assignment := self._assignment()) is not None:
                assignments.append(assignment)
                continue
            words.append(self.word())
            if len(words) == 1:
                declares = literal(words[0]) in DECLARING
                if literal(words[0]) == "[[":
                    words += self._test_words()
        if self.position == start:
            raise ShellSyntaxError(f"{self.text[start : start + 1]!r} is not expected here", self.line)
        return Simple(tuple(assignments), tuple(words), line, here[0] if here else ())

    def _some_word(self, *, brackets: bool = False) -> Word:
        """The word that has to be here."""
        start = self.position
        word = self.word(brackets=brackets)
        if self.position == start:
            raise ShellSyntaxError(f"{self.text[start : start + 1] or 'the end'!r} is not expected here", self.line)
        return word

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
            word = self._some_word(brackets=True)
            yield word
            if literal(word) == "]]":
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
            array: list[Word] = []
            while True:
                self._skip(newlines=True)
                if self._at(")"):
                    self.position += 1
                    return Assignment(name, appends, None, tuple(array), line)
                if self.position >= len(self.text):
                    raise ShellSyntaxError(f"{name}=( has no closing bracket", line)
                if self._at("("):
                    raise ShellSyntaxError("'(' is not expected here", self.line)
                array.append(self._some_word())
        return Assignment(name, appends, self.word(), None, line)

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
            word = self.word()
            self.pending.append((plain(word), strips, here))
            return True
        while self.position < len(self.text) and self.text[self.position] in "<>&|":
            self.position += 1
        self._skip()
        self.word()
        return True
