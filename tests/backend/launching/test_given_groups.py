"""Process groups that the user brings to `Trainer`, in ranks that torchrun starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.plans import plan, product_plan
from shardproof.backend.trainer import Trainer
from shardproof.core.base.errors import PlanError
from shardproof.core.layout.layout import Layout
from shardproof.core.machine.cluster_presets import cluster_preset
from shardproof.core.plan.sections import DataParallel

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
# fully_shard in the user's default group
sharded = Trainer(Plan.from_toml(open(sys.argv[2]).read())).fit()
found["sharded"] = [*sharded.losses, *sharded.grad_norms]
dist.all_reduce(torch.ones(1), group=own)  # it is the user's still, and so is the default group
dist.all_reduce(torch.ones(1))
if rank == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""


def test_groups_of_the_user_are_used_where_they_are_right(tmp_path: Path) -> None:
    small = plan(Layout(tp=2), samples=2, steps=2)
    (tmp_path / "plan.toml").write_text(small.to_toml())
    (tmp_path / "rank.py").write_text(RANK)
    copies = product_plan(dp=2, zero=3, samples=2, steps=2, dtype="fp32")
    (tmp_path / "torch.toml").write_text(replace(copies, data_parallel=DataParallel(library="torch")).to_toml())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, *(str(tmp_path / name) for name in ("rank.py", "plan.toml", "torch.toml"))],
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
    whole = Trainer(replace(copies, layout=Layout(), cluster=cluster_preset("this-host", 1)), transport="memory").fit()
    assert found["sharded"] == pytest.approx([*whole.losses, *whole.grad_norms], rel=1e-5)


def test_groups_need_a_process_that_is_a_rank() -> None:
    with pytest.raises(PlanError, match="is not initialised in this process"):
        Trainer(plan(Layout(tp=2)), groups={})
