"""`docs/gpu_status.md`, from what ran: `python -m shardproof.verify.doctor.status --write docs/gpu_status.md`.

Nobody writes a "yes" by hand. A row of a kernel has what each floor found here and now; the last column is of reports
that users sent (`shardproof doctor --gpus -o report.json`), given with `--report`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...core.base.files import read_text, write_text
from ..kernels.amd import GFX942, compiled_for_amd
from ..kernels.barrier_mutants import C_MUTANTS, KERNEL_MUTANTS, MULTICAST_MUTANTS, TABLE_MUTANTS, found_in_c
from ..kernels.changed_kernels import check_changed_kernels
from ..kernels.compilation_mutants import COMPILATION_MUTANTS, check_compilation_mutants
from ..kernels.floors import HOLDS, Found, floors_with, kernel_floors
from ..kernels.product_mutants import PRODUCT_MUTANTS
from .report import Report, read_report

C_SOURCE = Path(__file__).resolve().parents[2] / "backend/transport/symmetric/csrc/shared_memory.c"
"""Of a checkout; an installed package has none."""

COLUMNS = ("interpreted", "PTX executed", "assembled", "model-checked", "device")

SEEN_BY_NO_FLOOR = (
    ("co-residency of blocks", "blocks run one after the other, interpreted or as PTX"),
    ("order across a fabric", "processes of one host share a cache"),
    (
        "a thread that writes too early into a buffer of a rank what others of its block still read",
        "threads that are left over in a small block read what others write, and throw it away",
    ),
    (
        "a barrier less where a product holds values of its tree",
        "in the code that is compiled, others lie there: of products, of changes of layout",
    ),
    ("order of a switch's additions", "the model of multimem adds in the order of the ranks"),
    (
        "bits of tensor cores inside a leaf",
        "their order and roundings are not published: the model rounds the exact sum of an instruction once, and "
        "cases have numbers for which that is the same",
    ),
    ("wgmma and tcgen05, by which products are made on sm_90 and sm_100", "the code for sm_80 is carried out"),
)


def wrong_on_purpose() -> list[tuple[str, str, str]]:
    """Every mutant: its name, what it changes, and by which floor it is found and as what; empty for none."""
    source = read_text(str(C_SOURCE)) if C_SOURCE.exists() else None
    kernels = check_changed_kernels()
    return [
        *((each.name, "the table", _explored(each.check().kind)) for each in TABLE_MUTANTS),
        *(
            (each.name, "the C code", _explored(found_in_c(each.applied(source))))
            for each in C_MUTANTS
            if source is not None
        ),
        *(
            (each.name, "a kernel's source", _explored(kernels[each.name]))
            for each in (*KERNEL_MUTANTS, *MULTICAST_MUTANTS)
        ),
        *(
            (name, "a kernel's compilation", "; ".join(f"{floor}: {words}" for floor, words in floors.items()))
            for name, floors in check_compilation_mutants(COMPILATION_MUTANTS).items()
        ),
        *(
            (name, "a product's source", "; ".join(f"{floor}: {words}" for floor, words in floors.items()))
            for name, floors in check_compilation_mutants(PRODUCT_MUTANTS).items()
        ),
    ]


def _explored(kind: str) -> str:
    """What the model checker found, in words."""
    if kind == "refused":
        return "the reader of the code: refused"
    return "" if kind == "ok" else f"model-checked: {kind}"


def page(
    found: Found,
    wrong: Sequence[tuple[str, str, str]],
    versions: Mapping[str, str],
    reports: Sequence[Report],
    date: str,
    others: Mapping[str, Found] | None = None,
    amd: Mapping[str, str] | None = None,
) -> str:
    """The page, as Markdown. `others` is what was found with other versions of Triton, `amd` what `compiled_for_amd`
    found."""
    heads = "| kernel | " + " | ".join(COLUMNS) + " |\n|---|" + "---|" * len(COLUMNS)
    rows = [
        f"| `{kernel}` | " + " | ".join(_cell(kernel, column, floors, reports) for column in COLUMNS) + " |"
        for kernel, floors in found.items()
    ]
    mutants = [f"| {name} | {of} | {words or '**none**'} |" for name, of, words in wrong]
    unseen = [f"| {what} | | *seen by no floor*: {why} |" for what, why in SEEN_BY_NO_FLOOR]
    words = ", ".join(f"{name} {version}" for name, version in versions.items())
    return "\n".join(
        [
            "# What is known of the GPU kernels",
            "",
            f"Written by `python -m shardproof.verify.doctor.status` on {date}, with {words}.",
            "",
            "*interpreted*: by Triton's interpreter, on processes that share memory. *PTX executed*: the code compiled",
            "for sm_90, or for the GPU named below, instruction by instruction on the CPU, on such processes.",
            "*assembled*: the code of a launch for sm_80, sm_90 and sm_100, within the limits of registers, spills and",
            "vector width that each kernel declares. *model-checked*: the barriers read back from the compiled code,",
            "explored under a weak memory model. *device*: in a report of `shardproof doctor --gpus`.",
            "",
            heads,
            *rows,
            "",
            *_not_on(list(found)),
            *_for_amd(amd or {}),
            *_with_others(others or {}),
            "## Wrong on purpose",
            "",
            "| mutant | of | found by |\n|---|---|---|",
            *mutants,
            *unseen,
            "",
        ]
    )


def _not_on(kernels: Sequence[str]) -> list[str]:
    """Why kernels do not stand on a floor, or with the code for another GPU, a line for each reason."""
    from ...backend.kernels.catalog import KERNELS

    reasons: dict[tuple[str, str], list[str]] = {}
    for kernel in (each for each in KERNELS if each.name in kernels):
        for floor, why in kernel.not_on.items():
            reasons.setdefault((floor, why), []).append(f"`{kernel.name}`")
    lines = [f"Not {floor}: {', '.join(names)}. {why}." for (floor, why), names in reasons.items()]
    lines += [
        f"PTX executed for sm_{each.executed_architecture}: `{each.name}`. {each.executed_because}."
        for each in KERNELS
        if each.name in kernels and each.executed_because
    ]
    return [*lines, ""] if lines else []


def _for_amd(amd: Mapping[str, str]) -> list[str]:
    """Which kernels Triton compiles for AMD."""
    if not amd:
        return []
    compiled = ", ".join(f"`{kernel}`" for kernel, wrong in amd.items() if not wrong)
    wrong = "".join(f" **Not** `{kernel}`: {words}." for kernel, words in amd.items() if words)
    return [
        f"For {GFX942} (AMD's MI300) Triton makes code of {compiled or 'none'}, without spilled vector registers; "
        f"it is neither run nor read.{wrong} Kernels by multicast have instructions of NVIDIA's.",
        "",
    ]


def _with_others(others: Mapping[str, Found]) -> list[str]:
    if not others:
        return []
    columns = [column for column in COLUMNS if column != "device"]
    lines = ["| with Triton | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    for version, found in others.items():
        cells = []
        for column in columns:
            words = {kernel: floors[column] for kernel, floors in found.items() if column in floors}
            wrong = [kernel for kernel, each in words.items() if each != HOLDS]
            cells.append(f"**not** {', '.join(wrong)}" if wrong else f"all {len(words)}" if words else "-")
        lines.append(f"| {version} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _cell(kernel: str, column: str, floors: Mapping[str, str], reports: Sequence[Report]) -> str:
    if column == "device":
        devices = [report.device for report in reports if report.kernels.get(kernel, {}).get("device") == HOLDS]
        return "; ".join(devices) or "not yet"
    if column not in floors:
        return "-"
    return "yes" if floors[column] == HOLDS else f"**no**: {floors[column]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the floors and prints or writes the page; exit code 1 where one does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="FILE", help="write the page here instead of printing it")
    parser.add_argument("--report", metavar="FILE", nargs="*", default=[], help="reports of shardproof doctor --gpus")
    parser.add_argument("--triton", metavar="FOLDER", nargs="*", default=[], help="other versions, unpacked there")
    args = parser.parse_args(argv)
    reports = [read_report(path) for path in args.report]
    found = kernel_floors()
    versions = {name: importlib.metadata.version(name) for name in ("triton", "torch", "numpy")}
    wrong = wrong_on_purpose()
    others = dict(floors_with(folder) for folder in args.triton)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    text = page(found, wrong, versions, reports, date, others, compiled_for_amd())
    if args.write is None:
        sys.stdout.write(text)
    else:
        write_text(args.write, text)
    all_found = [floors for each in (found, *others.values()) for floors in each.values()]
    holds = all(words == HOLDS for floors in all_found for words in floors.values())
    return 0 if holds and all(words for _, _, words in wrong) else 1


if __name__ == "__main__":
    sys.exit(main())
