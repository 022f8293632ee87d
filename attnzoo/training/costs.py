"""What an optimizer step costs, before a training: FLOPs and memory, counted while a few sequences pass on the CPU."""

import copy
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate
from torch.utils.flop_counter import flop_registry

from attnzoo.tasks.task import Task
from attnzoo.training.experiment import Experiment
from attnzoo.training.machine import Machine

AFFORDED = 2e10
"""FLOPs that may be spent on more sequences than one: a second or so."""


def of_added_product(total: Tensor, a: Tensor, b: Tensor, **others: Any) -> int:
    """FLOPs of the product that `baddbmm_` adds."""
    return 2 * a.numel() * b.shape[-1]


def of_attention(q: Tensor, k: Tensor, v: Tensor, *others: Any, **more: Any) -> int:
    """FLOPs of torch's fused attention over all pairs: a product for the scores and one for the heads."""
    pairs = q[..., 0].numel() * k.shape[-2]
    return 2 * pairs * (q.shape[-1] + v.shape[-1])


def of_attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any, **more: Any) -> int:
    """FLOPs of its backward: the scores again, and a product for each of the gradients of weights, q, k and v."""
    pairs = q[..., 0].numel() * k.shape[-2]
    return 2 * pairs * (3 * q.shape[-1] + 2 * v.shape[-1])


FORMULAS = {
    **flop_registry,
    torch.ops.aten.baddbmm_: of_added_product,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: of_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: of_attention_backward,
}
"""FLOPs by operation: torch's formulas, and some for what they leave out."""


class CostCounter(TorchDispatchMode):
    """Counts FLOPs of products, and bytes of tensors made within it: those `held`, and the most at once, `peak`.

    It is no FlopCounterMode, which holds on to what is recomputed in backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.held = self.peak = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        old = _storages((args, kwargs))
        made = operation(*args, **kwargs)
        if formula := FORMULAS.get(operation.overloadpacket):
            self.flops += formula(*args, **kwargs, out_val=made)
        for storage in _storages(made).values():
            if id(storage) not in old:
                self.held += storage.nbytes()
                weakref.finalize(storage, self._let_go, storage.nbytes())
        self.peak = max(self.peak, self.held)
        return made

    def _let_go(self, size: int) -> None:
        self.held -= size


def count(experiment: Experiment, here: Machine) -> dict[str, Any]:
    """The part of a dry run's summary that says what a step will cost; the experiment is left as it is.

    FLOPs are those of matrix products, of all devices together. Memory is that of one device, without what Python and
    torch take.
    """
    settings = experiment.settings
    devices = here.devices * settings.num_nodes
    sequences = settings.batch_size // devices
    model = copy.deepcopy(experiment.model).train()
    if here.precision == "bf16-true":
        model.bfloat16()
    autocast = here.precision.endswith("mixed")
    flops, peak = one_pass(model, experiment.task, 1, autocast)
    # Kernels use some memory for one sequence after the other, so that many take less than so many times one.
    several = max(1, min(sequences, int(AFFORDED / flops)))
    if several > 1:
        _, peak = one_pass(model, experiment.task, several, autocast)
    shards = devices if here.strategy == "fsdp" else 1
    return {
        "flops_per_step": flops * settings.batch_size * settings.accumulate,
        "memory_mib": {
            "weights_gradients_optimizer": _held_bytes(model) / shards / 2**20,
            "activations": peak * sequences / several / 2**20,
        },
    }


def one_pass(model: nn.Module, task: Task, sequences: int, autocast: bool = False) -> tuple[int, int]:
    """FLOPs, and the most bytes of activations at once, of forward and backward over some training sequences.

    Gradients of parameters are dropped as they come: they count with the weights.
    """
    items: Any = task.split("train")
    batch = default_collate([items[i] for i in range(sequences)])
    hooks = [p.register_post_accumulate_grad_hook(_drop) for p in model.parameters() if p.requires_grad]
    try:
        with torch.random.fork_rng(devices=[]), CostCounter() as counter:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = model(batch["tokens"], batch.get("key_mask"))
            task.loss(logits, batch).backward()
    finally:
        for hook in hooks:
            hook.remove()
    return counter.flops, counter.peak


def _held_bytes(model: nn.Module) -> int:
    """Bytes of weights, and of a gradient and AdamW's two moments for each that learns."""
    return sum(p.nbytes * (4 if p.requires_grad else 1) for p in model.parameters())


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _storages(found: Any) -> dict[int, torch.UntypedStorage]:
    """The memory of all tensors in it, by the identity of what torch gives for it."""
    storages = (leaf.untyped_storage() for leaf in tree_leaves(found) if isinstance(leaf, Tensor))
    return {id(storage): storage for storage in storages}
