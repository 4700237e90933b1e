"""A step of a plan on pretended CUDA: its bits against one device, and races between streams.

python -m shardproof.verify.pretended PLAN [--set section.key=value] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ...core.commands.cli import exit_code
from ...core.plan.plan import Plan
from .environment import environment
from .labelled import CHANGE_VARIABLE
from .log import read_log
from .races import Race, races

STEPS = 2


def examined(text: str, *, steps: int = STEPS, change: str = "") -> tuple[int, dict[int, list[Race]]]:
    """Of a plan: how many bits differ, and the races of each rank. Runs a process of its own; `change` is made wrong in
    the ranks (`changes`). Raises `RuntimeError` where the run fails."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Plan.from_toml(text)
        command = [sys.executable, "-c", f"from {__package__}.__main__ import prove_here; prove_here({steps})"]
        done = subprocess.run(
            command,
            env={**environment(folder, devices=max(plan.world_size, 1), log=True), CHANGE_VARIABLE: change},
            input=text,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"the run on pretended CUDA failed: {done.stderr[-3000:]}")
        different = json.loads(done.stdout.splitlines()[-1])
        found = {}
        for path in sorted((Path(folder) / "logs").glob("*.log")):
            entries = list(read_log(path))
            ranks = [int(entry.name) for entry in entries if entry.kind == "rank"]
            if ranks:
                found[ranks[0]] = races(entries)
        return different, found


def prove_here(steps: int) -> None:
    """The process of `examined`: the plan comes on standard input, the number of different bits goes to its output."""
    from ..dynamic.proof import prove
    from .labelled import labelled_steps

    proof = prove(Plan.from_toml(sys.stdin.read()), transport="nccl", steps=steps, scenario=labelled_steps)
    print(json.dumps(proof.report["bits_different"]), flush=True)


def run(plan: str) -> int:
    """Exit code 1 where a bit differs or streams race."""
    different, found = examined(Path(plan).read_text())
    print(f"{different} different bits against one device.")
    for rank, of_rank in sorted(found.items()):
        print(f"rank {rank}: {len(of_rank)} races")
        for race in of_rank:
            print(f"  {race}")
    return 1 if different or any(found.values()) else 0


def main() -> int:
    """Runs it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", metavar="PLAN")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return exit_code("pretended", lambda: run(args.plan))


if __name__ == "__main__":
    sys.exit(main())
