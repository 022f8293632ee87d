"""`attnzoo bench`: what it measures, what it refuses, and that it keeps its budget."""

import csv
import json
import math
import time

import pytest
import torch

import attnzoo
from attnzoo.attention import Attention
from attnzoo.bench import agreement, bench, memory, peers, show, timing
from attnzoo.bench.contender import peer, subject
from attnzoo.bench.counts import BOTH, flops, least_bytes, matrix_rate, visible_pairs
from attnzoo.bench.peers.of_torch import Sdpa
from attnzoo.bench.peers.peer import Unfit
from attnzoo.bench.problem import MODES, Problem
from attnzoo.bench.progress import Bar, Progress
from attnzoo.bench.report import break_even
from attnzoo.bench.settings import Settings
from attnzoo.errors import OptionError
from attnzoo.kernels.dense import dense
from attnzoo.patterns import Full
from attnzoo.projections import Separate
from attnzoo.registry import DTYPES, _registered
from tests.test_patterns import EXPRESSIONS

SMALL = ("--heads", "2", "--head-dim", "8", "--rounds", "2", "--threads", "1")
TINY = {"heads": 2, "head_dim": 8, "rounds": 2, "threads": 1}


@pytest.fixture(autouse=True)
def _known_rate(monkeypatch):
    monkeypatch.setattr(bench, "matrix_rate", lambda *_: 1e11)


class Wrong(Attention):
    """Says that it is plain attention, and is not."""

    def __init__(
        self, d_model: int, num_heads: int, *, causal: bool = False, dropout: float = 0.0, bias: bool = True,
        positions: str = "none",
    ) -> None:  # fmt: skip
        super().__init__(Separate(d_model, num_heads, bias=bias), Full(), causal=causal, dropout=dropout)

    def attend(self, q, k, v, scope):
        return 1.01 * dense(q, k, v, scope)


# The command


def test_a_benchmark_as_json_and_files(run, tmp_path):
    names = "local:radius=4,block=4", "gqa:num_kv_heads=1"
    sizes = "--lengths", "16,32", "--mode", "both,decode", "--against", "dense,sdpa-repeat"
    status, out, err = run("bench", *names, *sizes, *SMALL, "--json", "--out", str(tmp_path))
    assert (status, err.splitlines()[0]) == (0, "1/8  local:radius=4,block=4 both 16")
    found = json.loads(out)
    assert found["settings"]["threads"] == 1
    assert found["matrix_gflops"] > 0
    assert {"machine", "versions", "threads", "allocator", "date"} == set(found["machine"])
    rows = found["rows"]
    assert len(rows) == 2 * 2 * (2 + 3)  # modes, lengths; sdpa-repeat beside one of the two
    for row in rows:
        assert row["time_ms"] >= row["least_ms"] > 0
        assert row["peak_mib"] >= 0
        assert row["rounds"] == 2
        assert row["times_subject"] == 1 or row["against"]
        assert (row["tokens_a_second"] is not None) == (row["mode"] == "decode")
    local = next(row for row in rows if row["subject"] == names[0] and row["mode"] == "both" and row["length"] == 32)
    assert local["pairs"] == attnzoo.build("local", 16, 2, radius=4).density(32) * 32 * 32 * 2
    assert local["gflop"] == local["pairs"] * BOTH * 8 / 1e9
    cached = [row["cache_mib"] for row in rows if row["subject"] == names[1] and not row["against"]]
    assert cached[2] == attnzoo.build("gqa", 16, 2, num_kv_heads=1, causal=True).new_cache(1, 16).nbytes / 2**20
    assert {one["reason"] for one in found["left_out"]} == {"is for key-value heads that query heads share"}
    assert json.loads((tmp_path / "bench.json").read_text()) == found
    with (tmp_path / "bench.csv").open() as lines:
        assert [row["time_ms"] for row in csv.DictReader(lines)] == [str(row["time_ms"]) for row in rows]
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_benchmark_as_a_table(run):
    status, out, _ = run("bench", "sparse:pattern=Local(1, block=4) | Global(2)", "--lengths", "16", *SMALL)
    assert status == 0
    lines = out.splitlines()
    assert lines[0].split()[:4] == ["mode", "length", "pairs", "ms"]
    assert any(line.split()[:3] == ["forward", "16", "dense"] and "100 %" in line for line in lines)
    assert any(line.startswith("faster than dense, sparse:") for line in lines)
    assert any(line.startswith("threads: 1") for line in lines)


def test_all_variants_without_names(run):
    status, out, err = run("bench", "--lengths", "16", "--mode", "forward", "--against", "", *SMALL, "--json")
    assert status == 0
    assert {row["subject"] for row in json.loads(out)["rows"]} == {*attnzoo.list_variants()} - {"gqa", "sparse"}
    assert "left out, as they need options: gqa:num_kv_heads=... sparse:pattern=..." in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gpa",), "no attention variant named 'gpa'. Did you mean 'gqa'?"),
        (("local:radus=4",), "unknown option 'radus' (did you mean 'radius'?)"),
        (("local:4",), "write options as name:option=value"),
        (("gqa:num_heads=4",), "--heads and --head-dim say it for all"),
        (("vanilla:dropout=0.1",), "drawn anew at each call"),
        (("random_sparse:redraw=true",), "drawn anew at each call"),
        (("gqa",), "'num_kv_heads' is missing"),
        (("local", "--against", "hf-longfromer"), "did you mean 'hf-longformer'?"),
        (("local", "--mode", "backward"), "mode must be one of"),
        (("local", "--lengths", "16,x"), "lengths must be whole numbers"),
        (("local", "--lengths", ""), "at least one length"),
        (("local", "--dtype", "float3"), "did you mean 'float32'?"),
        (("local", "--budget", "0"), "budget must be some seconds"),
        (("local", "--device", "tpu"), "device must be one of"),
        (("local", "--threads", "100000"), "threads must be at most 1024"),
        (("local", "--out", "/dev/null"), "--out /dev/null is no folder to write to"),
    ],
)
def test_wrong_input_is_one_message(run, words, said):
    status, out, err = run("bench", *words)
    assert (status, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_a_missing_package_is_named_with_what_to_install(run, monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda package: None)
    status, _, err = run("bench", "local", "--against", "local-attention")
    wanted = "local-attention needs the package local-attention, which is missing: pip install 'attnzoo[bench]'"
    assert (status, err) == (2, f"attnzoo: {wanted}\n")


def test_the_help_names_every_peer_mode_and_dtype(run):
    said = run("bench", "--help")[1]
    for name in (*peers.CATALOGUE, *MODES, *DTYPES):
        assert name in said


def test_no_gpu_is_said(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no GPU" in run("bench", "local", "--device", "cuda")[2]


# Equal work


def test_a_variant_that_is_not_its_definition_is_not_timed(run, monkeypatch):
    monkeypatch.setitem(_registered, "wrong", Wrong)
    status, out, err = run("bench", "wrong", "--lengths", "16", "--mode", "both", *SMALL, "--json")
    assert status == 1
    assert "some do not do equal work" in err
    found = json.loads(out)
    assert found["rows"] == []
    (refused,) = found["refused"]
    assert refused["against"] == "its definition"
    assert "by 0.0" in refused["reason"]


@pytest.mark.parametrize("mode", ["forward", "both"])
def test_a_peer_with_another_output_is_timed_only_where_asked(mode, monkeypatch):
    right = Sdpa.__call__
    monkeypatch.setattr(Sdpa, "__call__", lambda self, *inputs: right(self, *inputs) * 1.001)
    settings = Settings(lengths=(16,), modes=(mode,), against=("sdpa",), **TINY)
    report = bench.run(["local:radius=4"], settings, Progress())
    assert [row.against for row in report.rows] == [""]
    assert "differs by 0.001" in report.refused[0]["reason"]
    settings = Settings(lengths=(16,), modes=(mode,), against=("sdpa",), unequal=True, **TINY)
    report = bench.run(["local:radius=4"], settings, Progress())
    assert [row.against for row in report.rows] == ["", "sdpa"]
    assert report.rows[1].difference == pytest.approx(0.001, rel=0.1)
    assert report.refused == []


def test_a_peer_with_another_gradient_is_refused(monkeypatch):
    right = Sdpa.__call__
    monkeypatch.setattr(Sdpa, "__call__", lambda self, q, k, v: right(self, q, k, v.detach() + 0 * v))
    report = bench.run(
        ["local:radius=4"], Settings(lengths=(16,), modes=("both",), against=("sdpa",), **TINY), Progress()
    )
    assert "the gradient of v differs by 1" in report.refused[0]["reason"]


def test_nan_is_a_difference():
    one, nan = {"output": torch.ones(2)}, {"output": torch.tensor([1.0, math.nan])}
    assert agreement.difference(one, one)[0] == 0
    assert agreement.difference(nan, one)[0] == math.inf
    assert "the output differs" in agreement.disagreement(nan, one, torch.float32)


def test_pairs_may_differ_by_a_few_percent():
    assert agreement.unequal_pairs(104, 100) == ""
    assert agreement.unequal_pairs(94, 100) == "it computes -6.0 % pairs (94 to 100)"


def test_a_peer_that_fails_harms_no_other(monkeypatch):
    def broken(self, *inputs):
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(Sdpa, "__call__", broken)
    settings = Settings(lengths=(16,), modes=("forward",), against=("sdpa", "sdpa-repeat"), **TINY)
    report = bench.run(["gqa:num_kv_heads=1"], settings, Progress())
    assert [row.against for row in report.rows] == [""]
    assert report.left_out[0]["reason"] == "RuntimeError: out of luck"


@pytest.mark.parametrize("name", ["local:radius=3", "gqa:num_kv_heads=1", "kv_cached", "fused_qkv", "bigbird:block=4"])
@pytest.mark.parametrize(
    ("other", "mode", "level"),
    [
        ("sdpa", "forward", "kernel"),
        ("sdpa", "both", "kernel"),
        ("sdpa", "decode", "kernel"),
        ("sdpa", "both", "module"),
        ("nn-mha", "forward", "module"),
        ("nn-mha", "both", "module"),
    ],
)
def test_torch_does_the_same_beside_each_variant(name, other, mode, level):
    if other == "nn-mha" and name.startswith("gqa"):
        pytest.skip("it has no fewer key-value heads")
    problem = Problem(name, mode, 24, level, batch=2, heads=2, head_dim=8, dtype="float64")
    wanted = subject(problem).results()
    grads = ["tokens"] if level == "module" else ["q", "k", "v"]
    assert [*wanted] == (["output", *grads] if mode == "both" else ["output"])
    assert agreement.disagreement(peer(problem, other).results(), wanted, torch.float64) == ""


def test_what_torch_can_not_do_is_said():
    for name, other, mode, level, reason in (
        ("gqa:num_kv_heads=1", "nn-mha", "both", "module", "share"),
        ("local", "nn-mha", "both", "kernel", "--level module"),
        ("local", "flex", "both", "kernel", "no backward on CPU"),
        ("local", "sdpa", "decode", "module", "--level kernel"),
        ("local", "sdpa-repeat", "both", "kernel", "share"),
    ):
        with pytest.raises(Unfit, match=reason):
            peer(Problem(name, mode, 16, level, heads=2, head_dim=8), other)


def test_a_variant_with_projections_of_global_tokens_has_a_module_level_only():
    report = bench.run(["local:global_projections=true,global_tokens=2"], Settings(lengths=(16,), **TINY), Progress())
    assert report.rows == []
    assert {one["reason"] for one in report.left_out} == {"has no plain queries, keys and values: use --level module"}


# Counts


@pytest.mark.parametrize("pattern", EXPRESSIONS, ids=str)
def test_visible_pairs_are_those_of_the_mask(pattern):
    for queries, keys in ((150, 150), (1, 70), (65, 130)):
        mask = pattern.visible(queries, keys, num_heads=3).expand(3, -1, -1)
        assert visible_pairs(pattern, queries, keys, 3) == int(mask.sum())


def test_flops_and_bytes_of_a_problem():
    kernel = Problem("gqa:num_kv_heads=1", "forward", 16, batch=2, heads=2, head_dim=8)
    attn = kernel.build()
    assert flops(kernel, attn, 100) == 2 * 100 * 4 * 8
    assert least_bytes(kernel, attn) == 4 * 2 * 16 * 8 * (2 * 2 + 2 * 1)
    module = Problem("gqa:num_kv_heads=1", "both", 16, "module", batch=2, heads=2, head_dim=8)
    weights = sum(layer.weight.numel() for layer in (attn.q_proj, attn.k_proj, attn.v_proj, attn.out_proj))
    assert flops(module, attn, 100) == 2 * 100 * 14 * 8 + 2 * 16 * weights * 2 * 3
    assert matrix_rate(torch.float32, "cpu", seconds=0.01) > 1e8


def test_break_even_is_between_the_lengths_where_it_turns():
    assert break_even({512: 0.5, 1024: 2.0}) == pytest.approx(724, abs=1)  # half way, as both are powers
    assert break_even({512: 1.5, 1024: 0.9, 2048: 2.0}) > 1024
    assert break_even({512: 0.5, 1024: 0.9}) is None
    assert break_even({512: 1.0, 1024: 2.0}) == 512


# Time


def test_contenders_take_turns_and_drop_rounds_at_the_deadline():
    order = []
    calls = {name: lambda name=name: (order.append(name), time.sleep(0.011)) for name in "ab"}
    times = timing.take_turns(calls, timing.Watch(), 3, math.inf)
    assert "".join(order) == "ab" + 3 * "ab"  # once to see how often one fits into a sample
    assert len(times["a"].wall) == 3
    assert times["a"].median >= 0.011 > max(times["a"].cpu)
    assert len(timing.take_turns(calls, timing.Watch(), 3, time.monotonic())["b"].wall) == 1


def test_the_budget_is_kept_and_what_is_not_measured_is_said():
    settings = Settings(lengths=(16, 32, 64), modes=("forward",), budget=1e-3, **TINY)
    start = time.monotonic()
    report = bench.run(["local:radius=4"], settings, Progress())
    assert time.monotonic() - start < 10
    assert {row.length for row in report.rows} == {16}
    assert {row.rounds for row in report.rows} == {1}
    said = {(one["length"], one["against"]): one["reason"] for one in report.left_out}
    assert said[32, ""] == said[64, ""] == "no time left in the budget"
    assert said[16, ""] == "peak memory: no time left in the budget"


class FakeCuda:
    """Two events that are 6 ms apart."""

    def __init__(self):
        self.done = []

    def Event(self, enable_timing):
        assert enable_timing
        return self

    def synchronize(self):
        self.done.append("synchronize")

    def record(self):
        self.done.append("record")

    def elapsed_time(self, stop):
        self.done.append("elapsed")
        return 6.0


def test_a_gpu_is_timed_between_events():
    cuda = FakeCuda()
    wall, cpu = timing.EventWatch(cuda)(lambda: cuda.done.append("call"), 3)
    assert wall == pytest.approx(0.002)
    assert cpu < 0.002
    assert cuda.done == ["synchronize", "record", *3 * ["call"], "record", "synchronize", "elapsed"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_benchmark_on_a_gpu():
    settings = Settings(lengths=(256,), device="cuda", against=("dense", "sdpa"), rounds=2)
    report = bench.run(["gqa:num_kv_heads=8"], settings, Progress())
    assert {row.against for row in report.rows} == {"", "dense", "sdpa"}
    assert all(row.gigabytes_a_second > 0 and row.peak_mib > 0 for row in report.rows)
    assert "GB/s" in show.table(report)


def test_the_threads_are_put_back():
    before = torch.get_num_threads()
    bench.run(["gqa:num_kv_heads=1"], Settings(lengths=(16,), modes=("forward",), against=(), **TINY), Progress())
    assert torch.get_num_threads() == before


def test_a_bar_is_drawn_on_a_terminal(capsys):
    bar = Bar()
    bench.run(["local"], Settings(lengths=(16,), modes=("forward",), against=(), **TINY), bar)
    assert "1/1" in capsys.readouterr().err


# Memory


def growing() -> int:
    return memory.rise(lambda: torch.ones(2**24))  # 64 MiB


def failing() -> int:
    raise ValueError("out of luck")


def test_memory_is_that_of_a_fresh_process():
    held = torch.ones(2**26)
    assert 63 < memory.in_fresh_process(growing) / 2**20 < 70
    del held
    with pytest.raises(MemoryError, match="ValueError: out of luck"):
        memory.in_fresh_process(failing)


def test_the_peak_of_a_step_holds_output_and_gradients_and_no_inputs():
    problem = Problem("gqa:num_kv_heads=8", "both", 2048)
    assert 15 < memory.peak_mib(problem, None, threads=1) < 24  # four tensors of 4 MiB


def test_options_have_commas_only_between_them():
    with pytest.raises(OptionError, match="name:option=value"):
        Problem("local:radius", "forward", 16).build()
