#!/bin/bash
# arrays, comments inside them, and += behind a decided condition
GPUS=8
NODES=2
PRECISION=bf16
LAUNCH=(--nproc_per_node $GPUS --nnodes $NODES --master_port 6000)
MODEL=(
    --num-layers 32
    --hidden-size 4096      # width
    --num-attention-heads 32
    --group-query-attention --num-query-groups 8
    --ffn-hidden-size 14336
    --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --rotary-base 500000
    --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
    --seq-length 8192 --max-position-embeddings 8192
    # --num-experts 8
)
TRAIN=(--micro-batch-size 1 --global-batch-size 128 --lr 3e-4 --train-iters 10)
if [ "$PRECISION" = "bf16" ]; then
    TRAIN+=(--bf16)
else
    TRAIN+=(--fp16)
fi
LAYOUT=(--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --sequence-parallel
    --num-layers-per-virtual-pipeline-stage 4 --use-distributed-optimizer --overlap-grad-reduce)
torchrun "${LAUNCH[@]}" pretrain_gpt.py "${MODEL[@]}" ${TRAIN[@]} "${LAYOUT[@]}" --vocab-size 128256 \
    --tokenizer-type NullTokenizer
