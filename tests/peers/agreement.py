"""What it means that two modules agree: the same weights give the same outputs and the same gradients."""

import torch
from torch import nn
from weight_maps import gradient

ROWS = ("q_proj", "k_proj", "v_proj")


def stirred(module, seed=0):
    """The module in float64 and eval, with random weights and biases so large that no attention is nearly even."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4, generator=generator)
    return module


def tokens(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def padded(batch, length, left=0, right=0):
    """A key mask with padding in all sequences but the first."""
    key_mask = torch.ones(batch, length, dtype=torch.bool)
    key_mask[1:, :left] = False
    key_mask[1:, length - right :] = False
    return key_mask


def close(ours, theirs, tolerance=1e-9):
    """Equal up to a tolerance that is relative to the largest number where that is above 1."""
    for name in theirs if isinstance(theirs, dict) else [None]:
        mine, wanted = (ours, theirs) if name is None else (ours[name], theirs[name])
        scale = max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(
            mine, wanted, rtol=0, atol=tolerance * scale, msg=lambda text, n=name: f"{n}: {text}"
        )


def separated(state, rows):
    """A state dict, or one of gradients, with qkv_proj cut into its three parts."""
    cut = {}
    for name, tensor in state.items():
        if name.startswith("qkv_proj"):
            cut |= {name.replace("qkv_proj", part): rest for part, rest in zip(ROWS, tensor.split(rows), strict=True)}
        else:
            cut[name] = tensor
    return cut


def assert_agree(ours, theirs, weights, ours_call, theirs_call, *inputs, keep=None, tolerance=1e-9):
    """Loads theirs into ours, runs both, and compares outputs and the gradients of inputs and of all parameters.

    `weights` is a map of `weight_maps`; `keep` chooses the tokens [b, q] whose output means something.
    """
    ours.load_state_dict(weights(theirs))
    found = []
    for module, call in ((ours, ours_call), (theirs, theirs_call)):
        own = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        y = call(*own)
        y = y if keep is None else y[keep]
        module.zero_grad()
        (y * torch.arange(y.numel(), dtype=y.dtype).sin().view_as(y)).sum().backward()
        found.append({"output": y.detach()} | {f"gradient of input {i}": own[i].grad for i in range(len(own))})
    assert found[0]["output"].abs().max() > 0.1
    close(*found, tolerance)
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    gradients, wanted = (separated(state, ours.projection.rows) for state in (gradients, weights(theirs, gradient)))
    assert gradients.keys() == wanted.keys()
    close(gradients, wanted, tolerance)
