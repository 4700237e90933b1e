torchrun --nproc_per_node 8 pretrain_gpt.py \
    --num-layers 14 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 \
    --micro-batch-size 1 --global-batch-size 16 --lr 1e-4 --bf16 --pipeline-model-parallel-size 4 \
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
