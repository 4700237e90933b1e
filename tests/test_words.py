"""No name and no text has a word that docs/glossary.md replaces."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardproof.tests.helpers.paths import ROOT

FOREIGN = {"tell": {"tell"}, "around": set[str]()}
"""Names that Python or a library gives: the position in a file is `tell()`."""
NOT_OURS = ("tests/data/", "docs/log.md", "docs/glossary.md", "benchmarks/published/rows/", "tests/test_words.py")


def replaced(where: str) -> list[str]:
    """The words of the glossary's last table, those of names alone or of text too."""
    table = (ROOT / "docs" / "glossary.md").read_text().split("## Words that this code does not use")[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 10
    return [word for words, places, _ in rows if where in places for word in words.split(", ")]


def tracked(*patterns: str) -> list[Path]:
    found = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in found.stdout.split() if not name.startswith(NOT_OURS)]


def in_names(text: str, words: set[str]) -> Iterator[str]:
    """The identifiers of a Python text that have one of `words`, as `line: name`. Names of tests are sentences."""
    lower, others = "|".join(words), "|".join(form for word in words for form in (word.capitalize(), word.upper()))
    if not re.search(rf"(?:(?<![a-z])(?:{lower})|{others})(?![a-z])", text):
        return  # most texts: taking one apart takes long
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and not token.string.startswith("test_"):
            found = {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", token.string)} & words
            if found and token.string not in set().union(*(FOREIGN.get(word, set()) for word in found)):
                yield f"{token.start[0]}: {token.string}"


def in_text(text: str, words: list[str]) -> Iterator[str]:
    pattern = re.compile(rf"\b({'|'.join(words)})\b", re.IGNORECASE)
    for number, line in enumerate(text.splitlines(), start=1):
        if pattern.search(line):
            yield f"{number}: {line.strip()}"


def sentences(text: str) -> str:
    """A text with the words of its tests' names apart."""
    return re.sub(r"def test_\w+", lambda name: name[0].replace("_", " "), text)


pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the files of a checkout")


def test_a_word_is_found_in_a_name_and_in_a_text() -> None:
    assert list(in_names("is_told = Spot()", {"told", "spot"})) == ["1: is_told", "1: Spot"]
    assert list(in_names("file.tell()", {"tell"})) == []
    assert list(in_text("one\nAlike as two", ["alike"])) == ["2: Alike as two"]


def test_no_name_has_a_word_that_the_glossary_replaces() -> None:
    words = set(replaced("names"))
    found = [
        f"{path.relative_to(ROOT)}:{each}" for path in tracked("*.py") for each in in_names(path.read_text(), words)
    ]
    found += [str(path.relative_to(ROOT)) for path in tracked("*.py") if words & set(path.stem.split("_"))]
    assert found == []


def test_no_text_has_a_word_that_the_glossary_replaces_there() -> None:
    words = replaced("text")
    paths = tracked("*.py", "*.md", "*.toml")
    assert [
        f"{path.relative_to(ROOT)}:{each}" for path in paths for each in in_text(sentences(path.read_text()), words)
    ] == []
