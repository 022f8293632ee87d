"""What a dry run says of a step: FLOPs as counted by hand, and memory as a real batch takes it."""

import math

import pytest
import torch
from torch.utils.data import default_collate

from attnzoo.kernels.plan import plan
from attnzoo.scope import Scope, places
from attnzoo.training import costs, experiment
from attnzoo.training.costs import CostCounter, count, one_pass
from attnzoo.training.machine import Machine
from attnzoo.training.recipe import load, shipped

LENGTH = 256
HERE = Machine("cpu", 1, "32-true", "none")


def build(name, *overrides):
    return experiment.build(load(name, [f"task.length={LENGTH}", *overrides]).sections)


# FLOPs


def of_linear(module, tokens):
    return 2 * tokens * module.in_features * module.out_features


def of_pairs(attn, name):
    """FLOPs of a kernel for one sequence: of a forward pass, and of a backward pass."""
    pairs = attn.num_heads * LENGTH**2
    if name in ("bigbird", "local"):
        scope = Scope(attn.pattern, *places(attn.num_heads, LENGTH, LENGTH, torch.device("cpu")))
        pairs = plan(scope, attn.num_heads, attn.num_kv_heads, attn.block, torch.device("cpu")).pairs
        assert pairs < attn.num_heads * LENGTH**2 / 2
    again = 0 if name == "vanilla" else 1  # its scores are kept, or computed once more
    return 4 * pairs * attn.head_dim, (8 + 2 * again) * pairs * attn.head_dim


@pytest.mark.parametrize("again", ["false", "true", "attention"])
@pytest.mark.parametrize("name", ["vanilla", "gqa", "mqa", "bigbird", "local"])
def test_flops_are_those_of_the_products(name, again):
    built = build(name, f"model.gradient_checkpointing={again}")
    wanted = 3 * of_linear(built.model.head, 1)  # the first token's
    for layer in built.model.layers:
        forward, backward = of_pairs(layer.attention, name)
        projections = [of_linear(module, LENGTH) for module in layer.attention.children()]
        fed = [of_linear(module, LENGTH) for module in (layer.widen, layer.narrow)]
        wanted += 3 * sum(projections + fed) + forward + backward
        # What is computed again ends before its last product, whose result no gradient needs.
        wanted += forward + sum(projections) + fed[0] if again == "true" else 0
        wanted += forward + sum(projections[:-1]) if again == "attention" else 0
    assert one_pass(built.model, built.task, 1)[0] == wanted
    assert one_pass(built.model, built.task, 3)[0] == 3 * wanted
    assert count(built, HERE)["flops_per_step"] == 16 * wanted


# Memory


def test_bytes_are_what_is_held_of_what_was_made():
    before = torch.ones(1000)
    with CostCounter() as counter:
        made = before + 1
        assert (counter.held, counter.peak) == (4000, 4000)
        kept = made.view(10, 100)[2:4]
        made.mul_(2)
        torch.add(made, 1, out=before)
        assert (counter.held, counter.peak) == (4000, 4000)
        more = torch.zeros(500, dtype=torch.float64)
        del more, made
        assert (counter.held, counter.peak) == (4000, 8000)
        del kept
        assert (counter.held, counter.peak) == (0, 8000)


def real_peak(built):
    """Bytes of a whole batch and its gradients at their peak, of a training that holds weights and moments too."""
    items, settings = built.task.split("train"), built.settings
    batch = default_collate([items[i] for i in range(settings.batch_size)])
    weights = sum(parameter.nbytes for parameter in built.model.parameters())
    with CostCounter() as counter:
        loss = built.task.loss(built.model(batch["tokens"], batch.get("key_mask")), batch)
        loss.backward()
    return (counter.peak + 3 * weights) / 2**20


@pytest.mark.parametrize("again", ["false", "true", "attention"])
@pytest.mark.parametrize("name", ["vanilla", "gqa", "bigbird", "kv_cached"])
def test_memory_is_that_of_a_real_batch(name, again, monkeypatch):
    built = build(name, f"model.gradient_checkpointing={again}")
    said, scaled = count(built, HERE), 0
    if name != "bigbird":  # blocks use memory for one sequence after the other
        monkeypatch.setattr(costs, "AFFORDED", 0)
        scaled = count(built, HERE)
    peak = real_peak(built)
    for estimate in filter(None, (said, scaled)):
        assert sum(estimate["memory_mib"].values()) == pytest.approx(peak, rel=0.25)


def test_gradients_of_weights_are_no_activations():
    built = build("gqa", "task.length=16", "model.feed_forward=4096", "model.layers=6")
    _, peak = one_pass(built.model, built.task, 1)
    assert peak < sum(parameter.nbytes for parameter in built.model.parameters()) / 2
    assert all(parameter.grad is None for parameter in built.model.parameters())


def test_checkpointing_lowers_it_and_raises_the_flops():
    def of(again):
        said = count(build("vanilla", "model.layers=6", f"model.gradient_checkpointing={again}"), HERE)
        return said["flops_per_step"], said["memory_mib"]["activations"]

    (flops, kept), (more, few), (some, fewer) = of("false"), of("true"), of("attention")
    assert flops < some < more
    assert max(few, fewer) < 0.6 * kept


def test_dtypes_count():
    built = build("gqa")
    full, mixed, true = (
        count(built, Machine("cpu", 1, kind, "none")) for kind in ("32-true", "bf16-mixed", "bf16-true")
    )
    assert full["flops_per_step"] == mixed["flops_per_step"] == true["flops_per_step"]
    full, mixed, true = (said["memory_mib"] for said in (full, mixed, true))
    assert full["weights_gradients_optimizer"] == mixed["weights_gradients_optimizer"]
    assert true["weights_gradients_optimizer"] == full["weights_gradients_optimizer"] / 2
    assert true["activations"] < mixed["activations"] < 0.9 * full["activations"]
    assert count(built, Machine("cuda", 1, "16-mixed", "none"))["memory_mib"] == mixed


def test_weights_that_do_not_learn_have_no_gradient_nor_moments():
    built = build("gqa")
    before = count(built, HERE)["memory_mib"]["weights_gradients_optimizer"]
    table = built.model.token_embedding.weight.requires_grad_(False)
    after = count(built, HERE)["memory_mib"]["weights_gradients_optimizer"]
    assert before - after == pytest.approx(3 * table.nbytes / 2**20)


def test_a_step_is_all_batches_of_all_devices_and_memory_is_of_one():
    alone = count(build("gqa"), HERE)
    for strategy, shards in (("ddp", 1), ("fsdp", 4)):
        said = count(build("gqa", "train.accumulate=3", "train.num_nodes=2"), Machine("cpu", 2, "32-true", strategy))
        assert said["flops_per_step"] == 3 * alone["flops_per_step"]
        held, activations = said["memory_mib"].values()
        assert held == alone["memory_mib"]["weights_gradients_optimizer"] / shards
        assert activations == pytest.approx(alone["memory_mib"]["activations"] / 4, rel=0.1)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", shipped())
def test_the_experiment_is_left_as_it_is(name, precision):
    built = build(name, "model.dropout=0.2", "attention.dropout=0.2", "train.batch_size=2")
    built.model.layers[0].eval()
    weights = {name: tensor.clone() for name, tensor in built.model.state_dict().items()}
    modes = [module.training for module in built.model.modules()]
    generator = torch.get_rng_state()
    said = count(built, Machine("cpu", 1, precision, "none"))
    assert said["flops_per_step"] > 0
    assert all(mib > 0 and math.isfinite(mib) for mib in said["memory_mib"].values())
    assert torch.equal(torch.get_rng_state(), generator)
    assert [module.training for module in built.model.modules()] == modes
    for name, tensor in built.model.state_dict().items():
        assert torch.equal(tensor, weights[name])
        assert tensor.dtype == weights[name].dtype
    for parameter in built.model.parameters():
        assert parameter.grad is None
        assert not parameter._post_accumulate_grad_hooks


def test_long_sequences_pass_alone(monkeypatch):
    passed = []
    monkeypatch.setattr(costs, "one_pass", lambda *given: passed.append(given[2]) or (1e10, 2**20))
    assert count(build("gqa"), HERE)["memory_mib"]["activations"] == 8
    monkeypatch.setattr(costs, "one_pass", lambda *given: passed.append(given[2]) or (2e10, 2**20))
    assert count(build("gqa"), HERE)["memory_mib"]["activations"] == 16
    assert passed == [1, 2, 1]
