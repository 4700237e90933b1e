"""Files that a script takes in (`source conf.sh`): those next to it are read, as data, and followed as its own lines
are; nothing is executed.

Next to a script is what its folder holds, named by a path that follows from the script alone: `conf.sh`,
`conf/model.sh`, or behind the script's own folder as bash scripts write that, `$(dirname "$0")/conf.sh`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from ..base.errors import FileError
from ..base.files import read_text
from .shell_values import Argument

_NAMED = r"\"?\$\{?(?:0|BASH_SOURCE(?:\[0\])?)\}?\"?"
_ITSELF = rf"(?:{_NAMED}|\"?\$\(\s*(?:readlink\s+-f|realpath)\s+(?:--\s+)?{_NAMED}\s*\)\"?)"
_FOLDER = re.compile(
    rf"\$\(\s*(?:dirname\s+(?:--\s+)?{_ITSELF}|cd\s+(?:--\s+)?\"?\$\(\s*dirname\s+(?:--\s+)?{_ITSELF}\s*\)\"?"
    r"(?:\s*(?:&>|>&|[12]?>)\s*(?:/dev/null|&1))*\s*&&\s*pwd(?:\s+-P)?)\s*\)"
)


MOST_CHARACTERS = 1_000_000
"""Of all files that a script takes in, each as often as it is."""


def next_to(folder: Path, path: Path) -> Path | None:
    """A path by the folder of a script; None for one that leads out of it. Raises `ValueError` for what is no path."""
    is_named_whole = path.is_relative_to(folder)  # as `Sourced.own_folder` makes it
    if ".." in path.parts or (path.is_absolute() and not is_named_whole):
        return None
    found = (path if is_named_whole else folder / path).resolve()
    return found if found.is_relative_to(folder.resolve()) else None


@dataclass(frozen=True)
class Unread:
    """A file that a script takes in and that is not read: as written, on which line, why, and whether without it the
    script is not understood."""

    written: str
    line: int
    why: str
    is_needed: bool


@dataclass
class Sourced:
    """The files of a script in `folder` that it takes in, None where it lies in none. `unread` are those that were not
    read."""

    folder: Path | None = None
    unread: list[Unread] = field(default_factory=list)
    left: int = MOST_CHARACTERS

    def own_folder(self, written: str) -> str | None:
        """The script's folder, where a substitution is one of the ways to name it.

        >>> Sourced(Path("runs")).own_folder('$(dirname "$0")'), Sourced(Path("runs")).own_folder("$(pwd)")
        ('runs', None)
        """
        return str(self.folder) if self.folder is not None and _FOLDER.fullmatch(written) else None

    def text(self, file: Argument, line: int) -> str | None:
        """The text of a file that is taken in; None, with the reason among `unread`, for one that is not read."""
        if file.unknown:
            self._leave(file, line, f"which file this is is not known ({file.unknown})")
            return None
        if self.folder is None:
            self._leave(file, line, "the script lies in no folder")
            return None
        try:
            path = next_to(self.folder, Path(file.text))
            text = None if path is None else read_text(path)
        except (OSError, ValueError, FileError):
            self._leave(file, line, "there is no such text next to the script. Bring it, or leave the line out", True)
            return None
        if text is None:
            self._leave(file, line, "it does not lie next to the script, and only such files are read")
        elif len(text) > self.left:
            self._leave(file, line, f"the script takes in more than {MOST_CHARACTERS:,} characters", True)
        else:
            self.left -= len(text)
            return text
        return None

    def _leave(self, file: Argument, line: int, why: str, is_needed: bool = False) -> None:
        unread = Unread(file.text, line, why, is_needed)
        if unread not in self.unread:
            self.unread.append(unread)
