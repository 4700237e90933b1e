#!/bin/bash
TP=$1
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --hidden-size 512 --num-attention-heads 8 \
    --seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --lr 1e-3 --bf16 \
    --tensor-model-parallel-size $TP \
    --save $OUTPUT
