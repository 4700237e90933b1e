"""What each action computes and sends on one rank: the one description that is priced and executed.
No seconds and no tensors.

An `Op` says what one operator of the model (`core.model.operators`) does on a rank: what its forward, its input
gradient and its weight gradient compute and send. `operations` assembles the actions of a stage from them. Exact and
fast numerics share the products and differ in the collectives: fast numerics leave the sum to the library, exact
numerics move partial sums and add them in a fixed order (`core.base.reduction`).

Letters: b samples per microbatch, s sequence, h hidden, n tensor-parallel size, cp context-parallel size. Norms,
biases, activations, rotations and softmax are elementwise or row-wise work without products; they are not listed here.
"""

from ..model.roles import Role
from .actions import copies_do_the_same, message_bytes, operations
from .batch import load_batch
from .context import finish_sequences
from .gradients import EXPERT_BIAS, copies_axis, gradient_bytes, own_token_parameters, reduce_microbatch, tied_ends
from .holdings import (
    Held,
    gradient_elements,
    held_elements,
    held_gradients,
    local_elements,
    num_copies,
    num_shards,
    rank_elements,
    rank_stages,
    stage_elements,
)
from .layers import Group, block_ops, composition, group_ops, layer_ops, stage_groups, stage_ops
from .recompute import recomputed_modules, recomputed_runs, recomputes_all, recomputes_whole, repeated_roles
from .tensors import sequences_are_cut
from .work import (
    EXACT_SCALAR_BYTES,
    FAST_SCALAR_BYTES,
    PARTIAL_BYTES,
    Collective,
    CollectiveOp,
    Message,
    Op,
    Operation,
    Operations,
    Product,
    activation_bytes,
    weight_bytes,
)

__all__ = [
    "EXACT_SCALAR_BYTES",
    "EXPERT_BIAS",
    "FAST_SCALAR_BYTES",
    "PARTIAL_BYTES",
    "Collective",
    "CollectiveOp",
    "Group",
    "Held",
    "Message",
    "Op",
    "Operation",
    "Operations",
    "Product",
    "Role",
    "activation_bytes",
    "block_ops",
    "composition",
    "copies_axis",
    "copies_do_the_same",
    "finish_sequences",
    "gradient_bytes",
    "gradient_elements",
    "group_ops",
    "held_elements",
    "held_gradients",
    "layer_ops",
    "load_batch",
    "local_elements",
    "message_bytes",
    "num_copies",
    "num_shards",
    "operations",
    "own_token_parameters",
    "rank_elements",
    "rank_stages",
    "recomputed_modules",
    "recomputed_runs",
    "recomputes_all",
    "recomputes_whole",
    "reduce_microbatch",
    "repeated_roles",
    "sequences_are_cut",
    "stage_elements",
    "stage_groups",
    "stage_ops",
    "tied_ends",
    "weight_bytes",
]
