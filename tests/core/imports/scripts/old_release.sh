python -m torch.distributed.launch --nproc_per_node 8 pretrain_gpt.py \
    --model-parallel-size 2 --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --batch-size 8 \
    --seq-length 1024 --max-position-embeddings 1024 --train-iters 320000 --lr 0.00015 --checkpoint-activations \
    --checkpoint-num-layers 1 --DDP-impl torch --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --fp16
