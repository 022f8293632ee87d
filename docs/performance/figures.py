"""The figures of docs/performance.md: what is asked, the one line that measures it, and how it is read."""

from collections.abc import Callable
from typing import Any, NamedTuple

Result = dict[str, Any]
BUDGET = " --budget 200"


class Figure(NamedTuple):
    """One figure: `goal` is what it should reach, at least unless `at_most`; a `stretch` is what it might.

    `why` says what stands in the way where it is known to be missed.
    """

    what: str
    unit: str
    goal: float
    read: Callable[[Result], float | None]
    at_most: bool = False
    stretch: bool = False
    why: str = ""


class Measurement(NamedTuple):
    """One line to run, which prints JSON, and the figures in it."""

    title: str
    command: str
    figures: tuple[Figure, ...]


def times(against: str, mode: str) -> Callable[[Result], float | None]:
    """How many times as long as the variant a peer takes: the smallest where there are more rows."""

    def read(result: Result) -> float | None:
        found = [row["times_subject"] for row in rows(result, mode) if row["against"] == against]
        return min(found, default=None)

    return read


def over(against: str, mode: str) -> Callable[[Result], float | None]:
    """By how many percent the variant takes longer than a peer, at the worst."""

    def read(result: Result) -> float | None:
        found = [100 / row["times_subject"] - 100 for row in rows(result, mode) if row["against"] == against]
        return max(found, default=None)

    return read


def peak(length: int, mode: str = "both") -> Callable[[Result], float | None]:
    """The variant's own peak memory in MiB."""

    def read(result: Result) -> float | None:
        found = [row["peak_mib"] for row in rows(result, mode) if not row["against"] and row["length"] == length]
        return found[0] if found else None

    return read


def growth(length: int) -> Callable[[Result], float | None]:
    """The peak memory at twice the length, over that at the length."""

    def read(result: Result) -> float | None:
        small, large = peak(length)(result), peak(2 * length)(result)
        return large / small if small and large else None

    return read


def of_labels(field: str, label: str, *others: str) -> Callable[[Result], float | None]:
    """A field of one row over the largest of some others."""

    def read(result: Result) -> float | None:
        found = {row["label"]: row[field] for row in result["rows"]}
        return found[label] / max(found[other] for other in others)

    return read


def again(kind: str, model: str, why: str = "") -> tuple[Figure, Figure]:
    """Memory and time of recomputing in backward, over those of keeping everything."""
    what, kept = f"{model}, 2048 tokens, 6 layers", "all kept"
    return (
        Figure(f"{what}: memory", "x", 0.6, of_labels("peak_mib", kind, kept), True, why=why),
        Figure(f"{what}: time", "x", 1.35, of_labels("cpu_ms", kind, kept), True),
    )


def rows(result: Result, mode: str) -> list[Result]:
    """The rows of a mode."""
    return [row for row in result["rows"] if row["mode"] == mode]


def bench(words: str) -> str:
    """A line of `attnzoo bench` at one thread."""
    return f"attnzoo bench {words} --threads 1{BUDGET}"


DECODING = "python docs/performance/decoding.py"
HF = ("transformers GPT-2", "transformers Llama")
BFLOAT16 = (
    "Scores stay in float32, forward and backward, for which torch has no product of bfloat16 on a CPU: these two of "
    "seven products take about a third of the time. Torch's flash operator over the same blocks takes 1.7 times as "
    "long."
)
DECODED = (
    "More than nine tenths of a step are the products with the weights and the one over keys and values, both bound by "
    "memory and the same in all these models; what is left to save is the copying of caches."
)
FED = (
    "A fused attention keeps no scores. Of the bytes that a layer keeps, 69 % are the feed-forward's: its input, the "
    "sum that this is made of, and the widened tokens twice. An attention that kept nothing would miss the goal, too."
)

MEASUREMENTS = (
    Measurement(
        "Dense modules against torch's fused attention and four projections",
        bench("gqa:num_kv_heads=8 fused_qkv kv_cached --level module --against sdpa --lengths 512,2048"),
        (
            Figure("dense modules, forward, over SDPA and four projections", "%", 5, over("sdpa", "forward"), True),
            Figure("dense modules, forward and backward, over the same", "%", 5, over("sdpa", "both"), True),
        ),
    ),
    Measurement(
        "A window of 256 tokens to each side",
        bench("local:radius=256 --against dense,hf-longformer,local-attention --lengths 4096 --mode both --rounds 5"),
        (
            Figure("`local`, radius 256, forward and backward: dense SDPA", "x", 5.5, times("dense", "both")),
            Figure(
                "`local`, radius 256, forward and backward: transformers' Longformer",
                "x",
                5,
                times("hf-longformer", "both"),
            ),
            Figure(
                "`local`, radius 256, forward and backward: local-attention", "x", 2, times("local-attention", "both")
            ),
        ),
    ),
    Measurement(
        "A window of 128 tokens to each side",
        bench("local:radius=128 --against dense --lengths 4096 --mode both --rounds 5"),
        (Figure("`local`, radius 128, forward and backward: dense SDPA", "x", 9, times("dense", "both")),),
    ),
    Measurement(
        "A window in bfloat16",
        bench("local:radius=256 --against dense --lengths 4096 --mode both --dtype bfloat16 --rounds 5"),
        (
            Figure(
                "`local`, radius 256, bfloat16, forward and backward: dense SDPA",
                "x",
                6.5,
                times("dense", "both"),
                why=BFLOAT16,
            ),
        ),
    ),
    Measurement(
        "A window, forward alone, against compiled FlexAttention",
        bench("local:radius=256 --against flex --lengths 4096 --mode forward"),
        (Figure("`local`, radius 256, forward: compiled FlexAttention", "x", 0.91, times("flex", "forward")),),
    ),
    Measurement(
        "Memory of a window",
        bench("local:radius=256 --against '' --lengths 8192,16384 --mode both --rounds 1"),
        (
            Figure("`local`, radius 256, 16384 tokens: peak memory", "MiB", 200, peak(16384), True),
            Figure("`local`, radius 256: peak memory at 16384 tokens over 8192", "x", 2.3, growth(8192), True),
        ),
    ),
    Measurement(
        "A window over a sequence no longer than it",
        bench("local:radius=256 --against dense --lengths 256,512 --mode both --rounds 15"),
        (Figure("`local`, radius 256, up to 512 tokens: dense SDPA", "x", 0.95, times("dense", "both")),),
    ),
    Measurement(
        "BigBird: blocks of 64, a window of 3, 2 global and about 4 random ones a row",
        bench("bigbird:global_blocks=2,random_blocks=2 --against hf-bigbird --lengths 4096"),
        (
            Figure("`bigbird`, forward: transformers' BigBird", "x", 4.5, times("hf-bigbird", "forward")),
            Figure(
                "`bigbird`, forward and backward: transformers' BigBird",
                "x",
                2.7,
                times("hf-bigbird", "both"),
                why="Between runs it was 2.6 to 2.9: the other's time varies with the memory it gets.",
            ),
        ),
    ),
    Measurement(
        "The same against one mask for all pairs, and compiled",
        bench("bigbird:global_blocks=2,random_blocks=2 --against sdpa,flex --lengths 4096 --rounds 5"),
        (
            Figure("`bigbird`, forward and backward: SDPA with the pattern as a mask", "x", 5, times("sdpa", "both")),
            Figure(
                "`bigbird`, forward: compiled FlexAttention",
                "x",
                1,
                times("flex", "forward"),
                stretch=True,
                why="Random blocks are gathered before they are multiplied; compiled code reads them where they are.",
            ),
        ),
    ),
    Measurement(
        "Memory of BigBird",
        bench("bigbird:global_blocks=2,random_blocks=2 --against '' --lengths 4096,8192 --mode both --rounds 1"),
        (
            Figure("`bigbird`, 4096 tokens: peak memory", "MiB", 110, peak(4096), True),
            Figure("`bigbird`: peak memory at 8192 tokens over 4096", "x", 2.3, growth(4096), True),
        ),
    ),
    Measurement(
        "Random blocks: the own one of 64 and, as seeing is mutual, about two more",
        bench("random_sparse:keys=64,block=64 --against dense --lengths 4096 --mode both --rounds 9"),
        (
            Figure(
                "`random_sparse`, about 190 keys a query, forward and backward: dense SDPA",
                "x",
                14,
                times("dense", "both"),
                why="The goal is for 128 keys a query, and these are half more.",
            ),
        ),
    ),
    Measurement(
        "One query of grouped heads against a long cache",
        bench("gqa:num_kv_heads=2 --against sdpa --lengths 4096 --mode decode --batch 8 --rounds 25"),
        (
            Figure(
                "`gqa`, 2 of 8 heads, 8 sequences, one query: `enable_gqa`",
                "x",
                1.35,
                times("sdpa", "decode"),
                why="Both read 32 MiB of keys and values from memory, the variant at about 10 GB/s. Folded by hand, "
                "torch's kernel alone is 1.36 to 1.41 times as fast as with `enable_gqa` here.",
            ),
        ),
    ),
    Measurement(
        "The same against keys and values that are repeated for each head",
        bench("gqa:num_kv_heads=2 --against sdpa-repeat --lengths 4096 --mode decode --batch 8 --rounds 15"),
        (
            Figure(
                "`gqa`, 2 of 8 heads, 8 sequences, one query: repeated keys and values",
                "x",
                15,
                times("sdpa-repeat", "decode"),
            ),
        ),
    ),
    Measurement(
        "Decoding with whole models, 512 tokens of 8 sequences",
        DECODING,
        (
            Figure(
                "models, 512 tokens: transformers",
                "x",
                1.2,
                of_labels("tokens_a_second", "kv_cached", *HF),
                why=DECODED,
            ),
            Figure(
                "models, 512 tokens: x-transformers",
                "x",
                1.4,
                of_labels("tokens_a_second", "kv_cached", "x-transformers"),
                why=DECODED,
            ),
            Figure(
                "models with 2 key-value heads, 512 tokens: transformers",
                "x",
                2,
                of_labels("tokens_a_second", "gqa:num_kv_heads=2", *HF),
                stretch=True,
                why=DECODED,
            ),
        ),
    ),
    Measurement(
        "Decoding with whole models, 1536 tokens of 8 sequences",
        f"{DECODING} --models kv_cached,torch.cat --tokens 1536 --rounds 2",
        (
            Figure(
                "models, 1536 tokens: a cache by `torch.cat`",
                "x",
                1.25,
                of_labels("tokens_a_second", "kv_cached", "torch.cat"),
            ),
        ),
    ),
    Measurement(
        "Recomputing in backward, torch's fused attention",
        "python docs/performance/checkpointing.py",
        (
            *again("each layer again", "`gqa`, `gradient_checkpointing=true`"),
            *again("attention again", "`gqa`, `gradient_checkpointing=attention`", why=FED),
        ),
    ),
    Measurement(
        "Recomputing in backward, all scores written out",
        "python docs/performance/checkpointing.py --variant vanilla",
        (
            *again("attention again", "`vanilla`, `gradient_checkpointing=attention`"),
            *again("each layer again", "`vanilla`, `gradient_checkpointing=true`"),
        ),
    ),
    Measurement(
        "A training against the same steps in a bare loop",
        "python docs/performance/throughput.py",
        tuple(
            Figure(
                f"`attnzoo train {recipe}`, a step: a bare loop",
                "x",
                1.1,
                of_labels("cpu_ms", f"{recipe}, training", f"{recipe}, bare loop"),
                True,
            )
            for recipe in ("bigbird", "vanilla", "kv_cached")
        ),
    ),
)
