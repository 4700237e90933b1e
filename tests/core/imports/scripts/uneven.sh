torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py \
    --num-layers 30 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 \
    --micro-batch-size 1 --global-batch-size 16 --lr 1e-4 --bf16 --pipeline-model-parallel-size 4 \
    --decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 7
