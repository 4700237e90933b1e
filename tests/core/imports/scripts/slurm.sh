#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
options=" --num-layers 40 --hidden-size 5120 --num-attention-heads 40 --seq-length 4096 \
    --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --bf16 \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 2"
run_cmd="python -u pretrain_gpt.py ${options}"
srun --ntasks-per-node=8 --nodes=$SLURM_JOB_NUM_NODES -o %j.log bash -c "${run_cmd}" 2>&1 | tee log.txt
