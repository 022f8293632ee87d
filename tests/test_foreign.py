"""The contract asked of modules that are no attnzoo variant, and what it says of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attnzoo
from attnzoo import OptionError, testing
from attnzoo.testing import NotApplicable, run_checks
from attnzoo.testing.checks import CHECKS, Promise

pytestmark = pytest.mark.usefixtures("without_annotations")


class Wrapped(nn.Module):
    """Right in all that the contract asks, with layers of other names and a definition of its own."""

    def __init__(self, d_model, num_heads, *, causal=False, dropout=0.0, **more):
        super().__init__()
        if more:
            raise TypeError(f"no option {', '.join(more)}")
        self.inner = attnzoo.build("vanilla", d_model, num_heads, causal=causal, dropout=dropout)
        self.without = {"cross"} if causal else set()

    def forward(self, x, context=None, *, values=None, key_mask=None, mask=None, documents=None):
        return self.inner(x, context, values=values, key_mask=key_mask, mask=mask, documents=documents)

    def expected(self, x, context=None, **call):
        return testing.reference.plain(self.inner, x, *([] if context is None else [context]), **call)


class Own(nn.Module):
    """Four layers of the usual names, masks that are not hidden from NaN, and nothing else."""

    def __init__(self, d_model, num_heads, causal=False):
        super().__init__()
        self.h, self.causal = num_heads, causal
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x, key_mask=None):
        q, k, v = (f(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        seen = None if key_mask is None else self.seen(x, key_mask)
        y = F.scaled_dot_product_attention(q, k, v, seen, is_causal=self.causal and seen is None)
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def seen(self, x, key_mask):
        seen = key_mask[:, None, None]
        return seen & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.causal else seen


class LosesCausality(Own):
    def seen(self, x, key_mask):
        return key_mask[:, None, None]


class GivesWeightsToo(Own):
    def forward(self, x, key_mask=None):
        return super().forward(x, key_mask), None


class Silent(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()

    def forward(self, x):
        return x


class OtherNames(nn.Module):
    def __init__(self, embed_dim, heads):
        super().__init__()


class InSinglePrecision(Own):
    """Its softmax has float32 in a float64 module too, which it says."""

    close = 1e-5

    def forward(self, x, key_mask=None):
        return super().forward(x, key_mask) * (1 + 1e-7)


def outcomes(module, *checks):
    """What came out of these checks, by name: the outcome of the first setting that is not held, else of the first."""
    promise = Promise("these", "", tuple(CHECKS[f"check_{check}"] for check in checks))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(testing, "PROMISES", (promise,))
        found = {}
        for outcome in run_checks(module).outcomes:
            name = outcome.check.removeprefix("check_")
            if name not in found or found[name].status == "held":
                found[name] = outcome
        return found


def test_a_module_that_keeps_the_contract_passes():
    report = run_checks(Wrapped)
    assert report.passed, str(report)
    assert report.status_of("9. Cached decoding equals the full pass") == "not applicable"
    assert "it has no option num_kv_heads" in {outcome.detail for outcome in report.outcomes}


def test_a_fault_is_shown_with_what_was_asked_what_was_found_and_the_smallest_call():
    found = outcomes(LosesCausality, "masks_combine", "later_tokens_change_nothing", "any_length")["masks_combine"]
    assert found.status == "failed"
    assert found.asked.startswith("A query may look at what pattern, masks")
    assert "with key_mask [1, 3]" in found.detail
    call = "LosesCausality(d_model=2, num_heads=1, causal=True).eval()(torch.randn(1, 3, 2), key_mask=torch.tensor([["
    assert found.smallest.startswith(call)


def test_what_a_module_does_not_take_is_not_asked():
    found = outcomes(Own, "masks_broadcast", "cross_attention", "documents_are_alone", "dropout_is_for_training")
    assert {outcome.status for outcome in found.values()} == {"not applicable"}
    found = outcomes(Own, "masks_combine", "padding_cannot_be_felt", "output_is_what_the_pattern_says")
    assert {name: outcome.status for name, outcome in found.items()} == {
        "masks_combine": "held",
        "padding_cannot_be_felt": "failed",
        "output_is_what_the_pattern_says": "held",
    }
    assert "nan" in found["padding_cannot_be_felt"].detail


def test_a_module_may_say_how_close_it_computes():
    assert outcomes(InSinglePrecision, "any_length")["any_length"].status == "held"


def test_a_result_that_is_no_tensor_is_named():
    found = outcomes(GivesWeightsToo, "any_length")["any_length"]
    assert "forward gives a tuple, and a tensor [b, q, e] is right" in found.detail


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Silent, r"nothing says what Silent should compute: give it a method expected"),
        (OtherNames, r"OtherNames does not take d_model nor num_heads.*class of a few lines"),
        (lambda d_model, num_heads: 7, "it makes a int, and an nn.Module is wanted"),
    ],
)
def test_what_can_not_be_asked_is_refused_with_what_would_do(module, says):
    with pytest.raises(OptionError, match=f"(?s){says}"):
        run_checks(module)


def test_asking_leaves_the_callers_random_states_alone():
    import random

    import numpy as np

    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    outcomes(Own, "random_state_is_left_alone", "any_length")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def test_checks_are_functions_that_say_when_they_do_not_apply():
    make = testing.Maker(Own, {}, False)
    with pytest.raises(NotApplicable, match="its forward takes no mask"):
        testing.run(CHECKS["check_masks_broadcast"], make)
