#!/bin/bash
ZERO=1
cat <<EOT > ds_config.json
{ "zero_optimization": { "stage": $ZERO } }
EOT
deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 --num-attention-heads 16 \
    --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 64 --lr 1e-4 --bf16 \
    --tensor-model-parallel-size 2 --deepspeed --deepspeed_config ds_config.json --zero-stage $ZERO
