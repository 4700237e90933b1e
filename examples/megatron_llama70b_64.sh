#!/bin/bash
GPUS_PER_NODE=8
NNODES=8
CHECKPOINT_PATH=$1
TP=8; PP=4
MODEL_ARGS=(
  --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
  --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192
  --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
  --vocab-size 128256 --tokenizer-type NullTokenizer
)
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py "${MODEL_ARGS[@]}" \
  --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --sequence-parallel \
  --micro-batch-size 1 --global-batch-size 256 --bf16 --use-distributed-optimizer --overlap-grad-reduce \
  --train-iters 1000 --lr 3e-4 --save $CHECKPOINT_PATH --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
