"""Each peer of `attnzoo bench` does what the variant beside it does, or says what else."""

import pytest
import torch

from attnzoo.bench import agreement
from attnzoo.bench.bench import run as measured
from attnzoo.bench.contender import peer, subject
from attnzoo.bench.peers.peer import Unfit
from attnzoo.bench.problem import Problem
from attnzoo.bench.progress import Progress
from attnzoo.bench.settings import Settings

SAME = [
    ("hf-longformer", "local:radius=4", "both"),
    ("local-attention", "local:radius=4", "both"),
    ("local-attention", "local:radius=4,causal=true", "both"),
    ("x-transformers", "local:radius=4", "both"),
    ("x-transformers", "gqa:num_kv_heads=1", "both"),
    ("x-transformers", "kv_cached", "both"),
    ("x-transformers", "kv_cached", "decode"),
    ("x-transformers", "bigbird:block=4", "both"),
]


@pytest.mark.peers("transformers", "local_attention", "x_transformers")
@pytest.mark.parametrize("level", ["kernel", "module"])
@pytest.mark.parametrize(("name", "variant", "mode"), SAME)
def test_a_peer_does_the_same(name, variant, mode, level):
    problem = Problem(variant, mode, 32, level, batch=2, heads=2, head_dim=8)
    if (mode, level) == ("decode", "module"):
        pytest.skip("no peer has a cache here")
    found, right = peer(problem, name), subject(problem)
    assert found.pairs == right.pairs
    assert agreement.disagreement(found.results(), right.results(), torch.float32) == ""


@pytest.mark.peers("transformers")
@pytest.mark.parametrize("length", [64, 1024])  # the library draws in two ways
def test_bigbird_computes_the_blocks_that_it_is_counted_with(length):
    problem = Problem("bigbird:block=4,global_blocks=2,random_blocks=1", "both", length, heads=2, head_dim=8)
    found = peer(problem, "hf-bigbird")
    right = agreement.own_definition(found, found.kernel.scores())
    assert agreement.disagreement(found.results(), right, torch.float32) == ""
    assert agreement.unequal_pairs(found.pairs, subject(problem).pairs) == ""
    assert found.label.startswith("hf-bigbird (")


@pytest.mark.peers("transformers")
def test_bigbird_with_other_pairs_is_refused():
    settings = Settings(
        lengths=(64,), modes=("forward",), against=("hf-bigbird",), heads=2, head_dim=8, rounds=1, threads=1
    )
    report = measured(["bigbird:block=4,window_blocks=1,random_blocks=0"], settings, Progress())
    assert [row.against for row in report.rows] == [""]
    assert "% pairs" in report.refused[0]["reason"]


@pytest.mark.peers("transformers", "local_attention", "x_transformers")
@pytest.mark.parametrize(
    ("name", "variant", "mode", "reason"),
    [
        ("hf-longformer", "bigbird:block=4", "forward", "has windows only"),
        ("hf-longformer", "local:radius=5", "forward", "multiples of 10, not 32"),
        ("hf-longformer", "local:radius=4,causal=true", "forward", "both sides"),
        ("hf-longformer", "local:radius=4", "decode", "has no decode"),
        ("hf-longformer", "local:radius=4,num_kv_heads=1", "forward", "share"),
        ("hf-bigbird", "local:radius=4", "forward", "has a window, global and random blocks"),
        ("hf-bigbird", "bigbird:block=16", "forward", "at least 144"),
        ("local-attention", "local:global_tokens=1", "forward", "has windows only"),
        ("x-transformers", "gqa:num_kv_heads=2", "forward", "another order"),
    ],
)
def test_what_a_peer_can_not_do_is_said(name, variant, mode, reason):
    with pytest.raises(Unfit, match=reason):
        peer(Problem(variant, mode, 32, heads=4, head_dim=8), name)
