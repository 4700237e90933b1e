torchrun --nproc_per_node 8 pretrain_gpt.py \
    --num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 \
    --micro-batch-size 1 --global-batch-size 16 --lr 1e-4 --bf16 --tensor-model-parallel-size 2 \
    --recompute-granularity full --recompute-method block --recompute-num-layers 4 --distribute-saved-activations
