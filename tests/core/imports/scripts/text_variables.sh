#! /bin/bash
# texts that are split into words, defaults of the environment, arithmetic
export CUDA_DEVICE_MAX_CONNECTIONS=1
WORLD_SIZE=$((2*4))
TP=${TP:-2}
: ${PP:=2}
MICRO=2
GLOBAL=$(( MICRO * 16 ))
ARGS="--num-layers 12 \
  --hidden-size 768 \
  --num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024"
python -m torch.distributed.launch --nproc_per_node ${WORLD_SIZE} ../pretrain_gpt.py $ARGS \
  --micro-batch-size $MICRO --global-batch-size $GLOBAL --lr 1e-4 --fp16 \
  --tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP} \
  --save $CHECKPOINT_PATH --data-path `cat data.txt` --vocab-file $(pwd)/vocab.json
