"""A plan for who starts it: the schedule as CSV, and scripts for torchrun, Slurm and Kubernetes that run
`shardproof train plan.toml` on the plan's nodes. Values of the plan are quoted wherever they stand."""

from __future__ import annotations

import re
import shlex

from ..plan.plan import Plan
from ..plan.schedule_of import schedule_for
from ..plan.write import toml_value
from ..schedule.lower import lower
from .exported import Exported

PLAN = "plan.toml"
PORT = 29500
IMAGE = "shardproof:latest"
"""The container image of the manifest, for the user to replace."""


def write_csv(plan: Plan) -> Exported:
    """The schedule as torch.distributed.pipelining reads it; it says nothing of the plan but that."""
    text = lower(schedule_for(plan)).to_csv(dialect="torch")
    lost = (("schedule.name", "a schedule is all that this format has: model, layout and batch go with plan.toml"),)
    return Exported("csv", (("schedule.csv", text),), lost)


def write_torchrun(plan: Plan) -> Exported:
    """A shell script that every node runs, with NODE_RANK and MASTER_ADDR set where there are several."""
    nodes, ranks = nodes_of(plan)
    script = f"""#!/bin/sh
# {_comment(plan)}
# On every node: NODE_RANK=0..{nodes - 1} MASTER_ADDR=<the first node> sh train.sh
set -eu
cd "$(dirname "$0")"
exec torchrun --nnodes {nodes} --nproc-per-node {ranks} \\
    --node-rank "${{NODE_RANK:-0}}" \\
    --master-addr "${{MASTER_ADDR:-127.0.0.1}}" --master-port "${{MASTER_PORT:-{PORT}}}" \\
    -m shardproof train {shlex.quote(PLAN)} "$@"
"""
    return Exported("torchrun", (("train.sh", script), (PLAN, plan.to_toml())))


def write_slurm(plan: Plan) -> Exported:
    """A batch script for sbatch: one task a node, which starts the node's ranks."""
    nodes, ranks = nodes_of(plan)
    script = f"""#!/bin/sh
# {_comment(plan)}
#SBATCH --job-name={_label(plan.title)}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={ranks}
#SBATCH --exclusive
set -eu
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
cd "$SLURM_SUBMIT_DIR"
exec srun --kill-on-bad-exit=1 sh -c 'exec torchrun --nnodes {nodes} --nproc-per-node {ranks} \\
    --node-rank "$SLURM_NODEID" --master-addr "$MASTER_ADDR" --master-port {PORT} \\
    -m shardproof train {shlex.quote(PLAN)}'
"""
    return Exported("slurm", (("train.sbatch", script), (PLAN, plan.to_toml())))


def write_kubernetes(plan: Plan) -> Exported:
    """A manifest: the plan in a ConfigMap, a headless service, and an indexed Job with a pod for each node."""
    nodes, ranks = nodes_of(plan)
    name = _label(plan.title)
    first = f"{name}-0.{name}"
    command = (
        f"exec torchrun --nnodes {nodes} --nproc-per-node {ranks} --node-rank $JOB_COMPLETION_INDEX "
        f"--master-addr {shlex.quote(first)} --master-port {PORT} -m shardproof train /plan/{shlex.quote(PLAN)}"
    )
    indented = "".join(f"    {line}\n" if line else "\n" for line in plan.to_toml().splitlines())
    manifest = f"""# {_comment(plan)}
apiVersion: v1
kind: ConfigMap
metadata:
  name: {name}
data:
  {PLAN}: |
{indented}---
apiVersion: v1
kind: Service
metadata:
  name: {name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    job-name: {name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  completions: {nodes}
  parallelism: {nodes}
  completionMode: Indexed
  backoffLimit: 0
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      containers:
      - name: train
        image: {toml_value(IMAGE)}
        command: ["sh", "-c", {toml_value(command)}]
        resources:
          limits:
            nvidia.com/gpu: {ranks}
        volumeMounts:
        - {{ name: plan, mountPath: /plan }}
        - {{ name: shm, mountPath: /dev/shm }}
      volumes:
      - name: plan
        configMap: {{ name: {name} }}
      - name: shm
        emptyDir: {{ medium: Memory }}
"""
    return Exported("kubernetes", (("train.yaml", manifest),))


def nodes_of(plan: Plan) -> tuple[int, int]:
    """Nodes, and ranks on each: a plan fills its nodes."""
    ranks = min(plan.world_size, plan.cluster.devices_per_node)
    return plan.world_size // ranks, ranks


def _comment(plan: Plan) -> str:
    """What the file is for, in one line, whatever the model is called."""
    return f"{_label(plan.title)} on {plan.world_size} devices: {plan.degrees}"


def _label(name: str) -> str:
    """A name that hosts, jobs and pods may have (RFC 1123, section 2.1): small letters, digits and dashes.

    >>> _label("Llama3.1-8B $(x)")
    'llama3-1-8b-x'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50].strip("-") or "train"
