#!/bin/bash
EXTRA=""
if [ "$WIDE" = 1 ]; then
    EXTRA="--context-parallel-size 2"
    LOGGING="--log-interval 1"
else
    LOGGING="--log-interval 100"
fi
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --hidden-size 512 --num-attention-heads 8 \
    --seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --lr 1e-3 --bf16 $EXTRA $LOGGING
