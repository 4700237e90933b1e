#!/usr/bin/env bash
set -euo pipefail
SIZE="7b"
while [[ $# -gt 0 ]]; do
    case $1 in
        --size) SIZE=$2; shift 2 ;;
        *) echo "what is $1?"; exit 1 ;;
    esac
done
shape() {
    LAYERS=$1; WIDTH=$2; HEADS=$3
}
case "$SIZE" in
    1b) shape 16 2048 16 ;;
    7b|8b) shape 32 4096 32 ;;
    *) exit 2 ;;
esac
run() {
    local extra="--bf16"
    torchrun --nproc-per-node=8 --nnodes=1 pretrain_gpt.py "$@" $extra
}
run --num-layers $LAYERS --hidden-size $WIDTH --num-attention-heads $HEADS --seq-length 2048 \
    --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 32 --lr 1e-4
