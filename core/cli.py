"""`shardproof VERB ...`: finds the verb, runs it, and turns errors into one message and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .commands import QUESTIONS, command
from .errors import ShardproofError, did_you_mean


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 fine, 1 findings, 2 wrong usage or bad input. Errors go to standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _answer(arguments)
        sys.stdout.flush()
        return code
    except ShardproofError as error:
        print(f"shardproof {arguments[0]}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader (`| head`) has seen enough; what is left goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.filename is None:
            raise
        print(f"shardproof {arguments[0]}: {error.filename}: {error.strerror}.", file=sys.stderr)
        return 2


def _answer(arguments: Sequence[str]) -> int:
    """The exit code of what was asked: help, version, or a verb."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from .. import __version__

        print(f"shardproof {__version__}")
        return 0
    verb, *rest = arguments
    if verb not in QUESTIONS:
        print(f"shardproof: unknown verb {verb!r}{did_you_mean(verb, QUESTIONS)} See `shardproof --help`.", file=sys.stderr)
        return 2
    return _run(verb, rest)


def _run(verb: str, rest: Sequence[str]) -> int:
    chosen = command(verb)
    parser = argparse.ArgumentParser(
        prog=f"shardproof {verb}",
        description=QUESTIONS[verb],
        epilog=f"example:\n  {chosen.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    chosen.configure(parser)
    args = parser.parse_args(rest)
    try:
        return chosen.run(args)
    except ShardproofError as error:
        if getattr(args, "format", None) == "github":
            from .github import error_annotations

            print("\n".join(error_annotations(verb, error)))
        raise


def _overview() -> str:
    width = max(map(len, QUESTIONS))
    verbs = "\n".join(f"  {verb:<{width}}  {question}" for verb, question in QUESTIONS.items())
    return (
        "usage: shardproof VERB [PLAN] [options]\n\nPlan it, prove it, run it: sharded training of large models.\n\n"
        f"{verbs}\n\nPLAN is a plan.toml; options alone do where they say enough. `shardproof VERB --help` shows an example of each."
    )


if __name__ == "__main__":
    sys.exit(main())
