"""`shardproof VERB ...`: finds the verb, runs it, and turns errors into one message and an exit code."""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from ..base.errors import (
    TRACEBACK_VARIABLE,
    InternalError,
    ShardproofError,
    did_you_mean,
    error_words,
    line_words,
)
from ..base.interrupts import Interrupted, Interrupts
from ..base.names import one_line, shortened
from ..base.terminal import USUAL, command_text, fitted, say, table, width_of
from .commands import QUESTIONS, command


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 fine, 1 findings, 2 wrong usage or bad input, 3 a defect of ours. Errors go to standard error.

    Without `argv` this is the whole program, which SIGINT and SIGTERM end with 130 and 143 (`run_program`).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be text
    if argv is None:
        _open_closed_streams()
    run = run_program if argv is None else exit_code
    return run(" ".join(["shardproof", *arguments[:1]]), lambda: _answer(arguments))


def _open_closed_streams() -> None:
    """Gives standard streams that were closed (`>&-`) a place that takes everything and keeps nothing. Else the next
    file that is opened would have their number, and be written to by whatever prints there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # the first number that is free is its own
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(handle, True)
            setattr(sys, name, os.fdopen(handle, mode))


def run_program(command: str, run: Callable[[], int]) -> int:
    """`exit_code` of a process that has nothing else to do. SIGINT and SIGTERM end it in one line on standard error,
    with 128 and the signal's number, when all that it has started and opened is closed; where a library's call holds it
    up, two seconds later."""
    interrupts = Interrupts(command)

    def run_noticed() -> int:
        try:
            return run()
        except Exception:
            if interrupts.came is not None:  # a library has made another error of it, or a peer has ended first
                raise Interrupted(interrupts.came) from None
            raise

    try:
        return exit_code(command, run_noticed)
    except Interrupted as interrupted:
        interrupts.over()
        return interrupts.report(interrupted.number)
    finally:
        interrupts.over()


def exit_code(command: str, run: Callable[[], int]) -> int:
    """What `run` returns; 2 for an error that the user can do something about and 3 for a defect of ours, which are
    reported on standard error after the name of the `command`."""
    try:
        code = run()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader (`| head`) has seen enough; what is left goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE, "0") != "0":
            traceback.print_exception(error)
        code, words = _reported(error)
        say(shortened(f"{command}: {words}"), sys.stderr)
        return code


def _reported(error: Exception) -> tuple[int, str]:
    """The exit code and the words for an error."""
    if isinstance(error, InternalError):
        return 3, str(error)
    if isinstance(error, ShardproofError):
        return 2, str(error)
    if isinstance(error, OSError):
        where = f"{one_line(os.fsdecode(error.filename))}: " if isinstance(error.filename, str | bytes) else ""
        return 2, f"{where}{error.strerror or error}."
    if isinstance(error, MemoryError):
        return 2, f"this machine has not enough memory for that: {error or 'an allocation failed'}."
    frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
    place = line_words(frame.f_code.co_name, frame.f_code.co_filename, line)
    return 3, f"{error_words(error)}, in {place}. {InternalError.ask}"


def _answer(arguments: Sequence[str]) -> int:
    """The exit code of what was asked: help, version, or a verb."""
    if not arguments or arguments[0] in ("-h", "--help"):
        say(_overview)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from ... import __version__

        print(f"shardproof {__version__}")
        return 0
    verb, *rest = arguments
    if verb not in QUESTIONS:
        say(
            shortened(f"shardproof: unknown verb {verb!r}{did_you_mean(verb, QUESTIONS)} See `shardproof --help`."),
            sys.stderr,
        )
        return 2
    return _run(verb, rest)


def _run(verb: str, rest: Sequence[str]) -> int:
    chosen = command(verb)
    width = width_of(sys.stdout) or USUAL
    parser = _Parser(
        prog=f"shardproof {verb}",
        description=QUESTIONS[verb],
        epilog=f"example:\n{command_text(chosen.example, width - 2)}",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    chosen.configure(parser)
    names = "".join(f" [{action.metavar}]" for action in parser._actions if not action.option_strings)
    parser.usage = f"shardproof {verb}{names} [options]"
    args = parser.parse_args(rest)
    for action in parser._actions:
        given = getattr(args, action.dest, None)
        if given == "" or (isinstance(given, list) and "" in given):
            name = "/".join(action.option_strings) or action.metavar
            parser.error(f"argument {name}: it is empty. In a script, look whether its variable is set")
    try:
        return chosen.run(args)
    except ShardproofError as error:
        if getattr(args, "format", None) == "github":
            from .github import error_annotations

            print("\n".join(error_annotations(verb, error)))
        raise


class _Help(argparse.HelpFormatter):
    """Help texts whose lines stay apart, as in an example, each of them wrapped."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return fitted("\n".join(indent + line for line in text.splitlines()), width)


class _Parser(argparse.ArgumentParser):
    """Reports wrong usage in a sentence rather than after two screens of options."""

    def error(self, message: str) -> NoReturn:
        """Exit code 2; of an option that there is not, the closest there is."""
        unknown = (
            message.removeprefix("unrecognized arguments: ").split(" ")[0] if message.startswith("unrecognized") else ""
        )
        close = (
            did_you_mean(unknown.partition("=")[0], self._option_string_actions) if unknown.startswith("--") else "."
        )
        say(shortened(f"{self.prog}: {message.removesuffix('.')}{close} See `{self.prog} --help`."), sys.stderr)
        raise SystemExit(2)


def _overview(width: int | None) -> str:
    verbs = "\n".join(table(list(QUESTIONS.items()), width))
    return (
        "usage: shardproof VERB [PLAN] [options]\n\nPlan it, prove it, run it: sharded training of large models.\n\n"
        f"{verbs}\n\nPLAN is a plan.toml; options alone do where they say enough. `shardproof VERB --help` shows an "
        "example of each."
    )
