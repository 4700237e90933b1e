"""`shardproof tokenize`: text and JSONL files to a memory-mapped token file."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from ..core.base.errors import FileError, PlanError
from ..core.base.terminal import say
from ..core.base.units import format_bytes
from ..core.commands.commands import Command
from ..core.commands.options import whole_number
from .data.pieces import input_files, units
from .data.token_writer import writing
from .data.tokenizer_record import BYTES
from .data.tokenizers import open_tokenizer, token_type, tokenizer_file
from .data.tokenizing import Settings, tokenized


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `tokenize`."""
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILES",
        help="text files, JSONL files (.jsonl, .ndjson) and folders of them, in the order in which they are written",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="bytes|FILE",
        help="bytes, or a tokenizer.json of Hugging Face's, or a folder with one",
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx and PREFIX.tokens.json"
    )
    parser.add_argument(
        "--key", default="text", metavar="NAME", help="of the text in a JSONL line (default: %(default)s)"
    )
    parser.add_argument(
        "--blank-lines",
        action="store_true",
        help="documents of text files end at blank lines, where otherwise a file is one document",
    )
    parser.add_argument(
        "--append-eod",
        action="store_true",
        help="put a token after every document: tokenizer_config.json's eos_token or a usual one; of bytes, id 256",
    )
    parser.add_argument("--eod", metavar="TOKEN", help="the token that --append-eod puts there")
    parser.add_argument(
        "--jobs", type=whole_number, metavar="N", help="processes; what is written is the same (default: one a core)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """Tokenizes. Exit code 0; errors are raised and end with 2."""
    jobs = len(os.sched_getaffinity(0)) if args.jobs is None else args.jobs
    if jobs < 1:
        raise PlanError(f"--jobs {jobs}: at least one process is needed. Use --jobs 1.")
    if args.eod is not None and not args.append_eod:
        raise PlanError(f"--eod {args.eod!r} names what --append-eod puts after documents. Use both, or leave it out.")
    if args.output == "-":
        raise PlanError("-o -: tokens are three files, which standard output does not take. Give a PREFIX.")
    args.output = args.output.removesuffix(".bin").removesuffix(".idx")  # who names a file of the pair means the pair
    began = time.perf_counter()
    files = input_files(args.files)
    tokenizer = open_tokenizer(args.tokenizer, ends=args.append_eod, end=args.eod)
    dtype = token_type(tokenizer.record.vocab_size)
    copied = None if args.tokenizer == BYTES else tokenizer_file(args.tokenizer)
    settings = Settings(args.tokenizer, args.key, args.append_eod, args.eod)
    num_bytes = sum(path.stat().st_size for path in files)
    with (
        _progress(sys.stderr, num_bytes) as advance,
        writing(args.output, dtype, tokenizer.record, copied) as writer,
    ):
        for part in tokenized(units(files, blank_lines=args.blank_lines), settings, jobs):
            writer.add(part.ids, part.lengths)
            advance(part.num_bytes)
        if not writer.num_tokens:
            raise FileError(f"{', '.join(args.files)}: there is no text in {len(files)} files. Give others.")
    elapsed_s = time.perf_counter() - began
    _report(args, writer.num_documents, writer.num_tokens, dtype.name, num_bytes, elapsed_s)
    return 0


def _report(
    args: argparse.Namespace, num_documents: int, num_tokens: int, dtype: str, num_bytes: int, elapsed_s: float
) -> None:
    report: dict[str, Any] = {
        "prefix": args.output,
        "dtype": dtype,
        "num_documents": num_documents,
        "num_tokens": num_tokens,
        "elapsed_s": elapsed_s,
    }
    if args.json:
        print(json.dumps(report, indent=2))
        return
    say(
        f"{num_documents:,} documents, {num_tokens:,} tokens ({dtype}) from {format_bytes(num_bytes)} of text in "
        f"{elapsed_s:.1f} s\nTrain on them with --set train.data={args.output}"
    )
    say(f"written: {Path(f'{args.output}.bin')}", sys.stderr)


@contextlib.contextmanager
def _progress(stream: TextIO, num_bytes: int) -> Iterator[Callable[[int], object]]:
    """What hears how many bytes of text are done, and shows it where `stream` is a terminal."""
    if not stream.isatty():
        yield lambda done: None
        return
    from rich.console import Console  # a moment to load, and only terminals need it
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream), transient=True) as progress:
        task = progress.add_task("tokenize", total=num_bytes)
        yield lambda done: progress.advance(task, done)


TOKENIZE = Command(
    "tokenize", "shardproof tokenize corpus.jsonl --tokenizer model/tokenizer.json -o tokens", configure, run
)
