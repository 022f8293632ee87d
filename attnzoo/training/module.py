"""What Lightning trains: a recipe's model with its loss, metrics, optimizer and schedule."""

import contextlib
import math
import random
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torchmetrics import Metric, MetricCollection

from attnzoo.errors import TrainingError
from attnzoo.training import compiling, experiment
from attnzoo.training.settings import TrainSettings


class DivergedError(TrainingError):
    """A loss or a gradient is not finite."""


class TrainingModule(pl.LightningModule):
    """The experiment of one recipe, given by its sections, so that a checkpoint alone can rebuild it."""

    def __init__(self, recipe: dict[str, dict[str, Any]]) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.experiment = experiment.build(recipe)
        self.model = self.experiment.model
        self.valid_scores = Scores(self.experiment.task.metrics())
        self.test_scores = Scores(self.experiment.task.metrics())

    def configure_model(self) -> None:
        """Shards the parameters where the strategy is fsdp, and compiles what is trained where that is asked for."""
        if self.device_mesh is not None and not isinstance(self.model, FSDPModule):
            shards = self.device_mesh["data_parallel"]
            for layer in self.model.layers:
                fully_shard(layer, mesh=shards)
            fully_shard(self.model, mesh=shards)
        if self.experiment.settings.compile and self.trainer.state.fn == TrainerFn.FITTING:
            compiling.compile_layers(self.model.layers)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["task"] = self.experiment.task.facts()
        checkpoint["shape"] = self.experiment.task.shape()

    def on_train_start(self) -> None:
        """Sets the rate of the first step, which is another one than was saved where a training is made longer."""
        optimizer, settings = self.trainer.optimizers[0], self.experiment.settings
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * lr_factor(self.trainer.global_step, settings)

    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Makes dropout depend on the seed, the batch and the process, and random patterns on the first two alone.

        So nothing depends on what came before. All batches of a training have numbers of their own, whatever the epoch.
        """
        seed = self.experiment.settings.seed
        torch.manual_seed(random.Random(f"{seed} {batch_idx} {self.global_rank}").getrandbits(63))
        salt = torch.tensor(random.Random(f"{seed} {batch_idx} patterns").getrandbits(32))
        for attention in self.model.attentions:
            attention.salt = salt

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        loss = self._loss(self._logits(batch), batch)
        mean = self.trainer.strategy.reduce(loss.detach(), reduce_op="mean").item()
        self._stop_unless_finite(mean, f"the training loss is {mean} at step {self.trainer.global_step + 1}")
        return {"loss": loss, "mean": mean}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Stops before a gradient that is not finite reaches the weights, and clips the others; one norm for both."""
        norm = nn.utils.get_total_norm(
            [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        )
        if not self._scales_loss:  # which skips such a step itself
            found = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
            self._stop_unless_finite(
                found, f"the norm of the gradients is {found} at step {self.trainer.global_step + 1}"
            )
        if gradient_clip_val is not None:
            nn.utils.clip_grads_with_norm_(self.parameters(), gradient_clip_val, norm)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._score(self.valid_scores, batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._score(self.test_scores, batch)

    def on_validation_epoch_end(self) -> None:
        self._log("valid", self.valid_scores)

    def on_test_epoch_end(self) -> None:
        self._log("test", self.test_scores)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        settings = self.experiment.settings
        groups = parameter_groups(self.model, settings.weight_decay)
        optimizer = adamw(groups, settings.lr, fused=not self._scales_loss)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, settings))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @property
    def _scales_loss(self) -> bool:
        """Whether fp16's loss scaler is at work."""
        return getattr(self.trainer.precision_plugin, "scaler", None) is not None

    def _logits(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(batch["tokens"], batch.get("key_mask")).float()

    def _loss(self, logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(logits.device.type, enabled=False):
            return self.experiment.task.loss(logits, batch)

    def _score(self, scores: "Scores", batch: dict[str, Tensor]) -> None:
        logits, counts = self._logits(batch), batch["counts"]
        logits, batch = logits[counts], {name: tensor[counts] for name, tensor in batch.items()}
        scores.update(self._loss(logits, batch), logits, batch["target"])

    def _log(self, split: str, scores: "Scores") -> None:
        values = scores.compute()
        loss, step = values["loss"].item(), self.trainer.global_step
        self._stop_unless_finite(loss, f"the {split} loss is {loss} after step {step}")
        self.log_dict({f"{split}_{name}": value for name, value in values.items()})

    def _stop_unless_finite(self, value: float, what: str) -> None:
        if not math.isfinite(value):
            clip = "train.clip" if self.experiment.settings.clip is None else "a smaller train.clip"
            raise DivergedError(f"{what}: try a lower train.lr, more train.warmup_steps or {clip}")


class Scores(nn.Module):
    """The mean loss and the task's metrics over one split; a module, so that they move along with the model."""

    def __init__(self, metrics: MetricCollection) -> None:
        super().__init__()
        self.loss = MeanLoss()
        self.metrics = metrics

    def update(self, loss: Tensor, logits: Tensor, target: Tensor) -> None:
        self.loss.update(loss, len(logits))
        self.metrics.update(logits, target)

    def compute(self) -> dict[str, Tensor]:
        """The scores of all processes together; then starts anew."""
        values = {"loss": self.loss.compute(), **self.metrics.compute()}
        self.loss.reset()
        self.metrics.reset()
        return values


class MeanLoss(Metric):
    """The mean loss of all sequences; torchmetrics' own mean leaves out what is NaN, and then nobody would know."""

    total: Tensor
    sequences: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("sequences", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, loss: Tensor, sequences: int) -> None:
        self.total += loss * sequences
        self.sequences += sequences

    def compute(self) -> Tensor:
        return self.total / self.sequences


def lr_factor(step: int, settings: TrainSettings) -> float:
    """The share of the highest learning rate that the optimizer step after `step` others uses.

    It rises in equal parts, is 1 in step number `warmup_steps`, and falls along half a cosine that would reach 0 one
    step after the last.
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    before = max(settings.warmup_steps - 1, 0)
    return (1 + math.cos(math.pi * min(1, (step - before) / (settings.max_steps - before)))) / 2


def adamw(groups: list[dict[str, Any]], lr: float, *, fused: bool) -> torch.optim.AdamW:
    """AdamW in one kernel for all parameters where that is wanted and torch has one for where they are."""
    if fused:
        with contextlib.suppress(RuntimeError):
            return torch.optim.AdamW([dict(group) for group in groups], lr=lr, fused=True)
    return torch.optim.AdamW(groups, lr=lr)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The parameters that learn, with weight decay on matrices only: not on biases, norms and embeddings."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in learning if parameter.ndim > 1 and id(parameter) not in embeddings]
    kept = {id(parameter) for parameter in decayed}
    rest = [parameter for parameter in learning if id(parameter) not in kept]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
