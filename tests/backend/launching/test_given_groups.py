"""Process groups that the user brings to `Trainer`, in ranks that torchrun starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.plans import plan
from shardproof.backend.trainer import Trainer
from shardproof.core.base.errors import PlanError
from shardproof.core.layout.layout import Layout

RANK = """
import json, sys
import torch
import torch.distributed as dist
from shardproof import Plan, Trainer
from shardproof.backend.transport.base import Transport
from shardproof.core.base.errors import PlanError

dist.init_process_group("gloo")
rank, text = dist.get_rank(), open(sys.argv[1]).read()
plan = Plan.from_toml(text)
own, alone = dist.new_group([0, 1]), [dist.new_group([each]) for each in (0, 1)][rank]


def fit(groups):
    return Trainer(plan, groups=groups).fit()


def problem(groups):
    try:
        fit(groups)
    except PlanError as error:
        return str(error)


found = {
    "unknown": problem({"tq": own}),
    "messages": problem({"pp": own}),
    "experts": problem({"ep": own}),
    "other members": problem({"tp": alone}),
    "other axes": problem({"tp": own} if rank else {"tp": own, "dp": alone}),
}
opened = []
group = Transport.group


def noted(self, name, axis, ranks, **how):
    made = group(self, name, axis, ranks, **how)
    opened.append((name, getattr(made, "_process_group", None) is own._get_backend(torch.device("cpu"))))
    return made


Transport.group = noted
result = fit({"tp": own, "dp": alone})
found["numbers"] = [number.hex() for number in (*result.losses, *result.grad_norms)]
found["brought"] = [name for name, is_own in opened if is_own]
dist.all_reduce(torch.ones(1), group=own)  # it is the user's still
if rank == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""


def test_groups_of_the_user_are_used_where_they_are_right(tmp_path: Path) -> None:
    small = plan(Layout(tp=2), samples=2, steps=2)
    (tmp_path / "plan.toml").write_text(small.to_toml())
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "rank.py"), str(tmp_path / "plan.toml")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert "no group can be given for 'tq'; did you mean 'tp'?" in found["unknown"]
    assert "no group can be given for 'pp'" in found["messages"]
    assert "ep joins ranks of experts, which the model has not" in found["experts"]
    assert (
        "the group given for tp on rank 0 joins ranks 0, but the layout's tp joins ranks 0, 1" in found["other members"]
    )
    assert "rank 1 gives those of tp, rank 0 those of dp, tp" in found["other axes"]
    assert found["brought"] == ["tp/0"]
    alone = Trainer(plan(Layout(), samples=2, steps=2), transport="memory").fit()
    assert found["numbers"] == [number.hex() for number in (*alone.losses, *alone.grad_norms)]


def test_groups_need_a_process_that_is_a_rank() -> None:
    with pytest.raises(PlanError, match="is not initialised in this process"):
        Trainer(plan(Layout(tp=2)), groups={})
