"""The words of a shell script: quoting and expansions, read a character at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from .shell_nodes import OPAQUE, Arithmetic, Opaque, Parameter, Part, ShellSyntaxError, Text, Word

_BLANK = " \t\r"
_ENDS = " \t\r\n;|&()<>"


@dataclass
class Words:
    """Reads the words of `text`; `lines` has the line of every character, for texts from several places."""

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

    # -- words -----------------------------------------------------------------------------------------------------

    def word(self, *, brackets: bool = False) -> Word:
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
                self.double(parts, '"')
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

    def double(self, parts: list[Part], close: str) -> None:
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
            inner = Words(self.text[start + 3 : end - 2], self.lines[start + 3 : end - 2])
            expression: list[Part] = []
            inner.double(expression, "")
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
            self.double(parts, '"')
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
                self.double(argument, '"')
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
                self.double([], '"')
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


def literal(word: Word) -> str:
    """The word where it is unquoted text only, else nothing."""
    return "".join(part.text if isinstance(part, Text) and not part.quoted else OPAQUE for part in word)


def plain(word: Word) -> str:
    """A word's texts, quoted or not."""
    return "".join(part.text for part in word if isinstance(part, Text))
