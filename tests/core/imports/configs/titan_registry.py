# ruff: noqa: F821
# ours: read as literals, never run (it could not be: nothing here is installed)
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

SEQUENCE = 8192


def llama3_8b():
    return Trainer.Config(
        model_spec=model_registry("8B"),
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=2 * SEQUENCE, max_context_length=SEQUENCE, steps=10
        ),
        parallelism=ParallelismConfig(data_parallel_shard_degree=4, tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
        dataloader=open_anything("c4"),
    )


def llama3_8b_narrow():
    config = llama3_8b()
    config.model_spec = model_registry("8B", converters=[Float8LinearConverter.Config(model_compile_enabled=True)])
    config.compile = CompileConfig(enable=True)
    return config


def llama3_8b_deep():
    config = llama3_8b()
    config.parallelism.tensor_parallel_degree = 4
    config.activation_checkpoint = None
    return config
