"""Peak memory at long lengths, in bytes that the operating system counted in a fresh process."""

import subprocess
import sys

import pytest

LENGTH, HEADS, FEATURES = 8192, 8, 64

PROGRAM = f"""
import resource, sys, torch, attnzoo

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

torch.set_num_threads(1)
attention = attnzoo.build({{name!r}}, d_model={HEADS * FEATURES}, num_heads={HEADS}, **{{options!r}})
x = torch.randn(1, {LENGTH}, {HEADS * FEATURES}, requires_grad=True)
attention(x[:, :64].detach()).sum().backward()  # what is loaded once does not count
before = peak()
attention(x).sum().backward()
print(peak() - before)
"""


TWO_SETS = {"global_tokens": 2, "global_projections": True}


@pytest.mark.parametrize(
    ("name", "options", "part"), [("local", {"radius": 128}, 8), ("local", TWO_SETS, 4), ("bigbird", {}, 8)]
)
def test_forward_and_backward_stay_under_a_part_of_one_dense_score_matrix(name, options, part):
    program = PROGRAM.format(name=name, options=options)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < HEADS * LENGTH * LENGTH * 4 / part


@pytest.mark.parametrize(
    ("name", "options", "facts"),
    [
        ("gqa", {"num_kv_heads": 2, "positions": "rotary"}, {"documents": "// 1000"}),
        ("local", {"radius": 128}, {"documents": "// 1000", "marked": "< 30"}),
    ],
)
def test_documents_and_marks_need_no_mask_of_all_pairs(name, options, facts):
    given = "".join(f", {fact}=torch.arange({LENGTH})[None] {rule}" for fact, rule in facts.items())
    program = PROGRAM.format(name=name, options=options).replace("attention(x).sum()", f"attention(x{given}).sum()")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < HEADS * LENGTH * LENGTH * 4 / 8
