"""Whether two runs ended in the same bits."""

import csv
import json

import torch

from attnzoo.training import checkpoints

MEASURED = ("run", "ms_per_step", "peak_memory_mib")


def outcome(folder):
    """All that a run leaves which may not depend on when it was stopped."""
    with folder.metrics.open(newline="") as lines:
        rows = [{name: value for name, value in row.items() if name != "ms"} for row in csv.DictReader(lines)]
    summary = json.loads(folder.summary.read_text())
    return {
        "rows": rows,
        "summary": {name: value for name, value in summary.items() if name not in MEASURED},
        "recipe": folder.recipe.read_text(),
        "files": sorted(str(file.relative_to(folder.path)) for file in folder.path.rglob("*")),
        "names": {file.name: str(file.readlink()) for file in (folder.last, folder.best)},
        "checkpoints": {step: checkpoints.load(folder.checkpoint(step)) for step in folder.checkpointed()},
    }


def first_gradients(folder):
    """The gradients of a run's first step, clipped, in the order of the optimizer, whose first moment they made."""
    [optimizer] = checkpoints.load(folder.checkpoint(1))["optimizer_states"]
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    return [optimizer["state"][name]["exp_avg"] / 0.1 for name in names]


def difference(found, expected, where=""):
    """The first place where two nested values differ; None if there is none."""
    if type(found) is not type(expected):
        return f"{where}: {type(found).__name__}, not {type(expected).__name__}"
    if isinstance(found, torch.Tensor):
        same = found.dtype == expected.dtype and torch.equal(found, expected)
        return None if same else f"{where}: tensors differ"
    if isinstance(found, dict):
        if found.keys() != expected.keys():
            return f"{where}: keys {sorted(map(str, found.keys() ^ expected.keys()))}"
        pairs = [(f"{where}.{key}", found[key], expected[key]) for key in expected]
    elif isinstance(found, list | tuple):
        if len(found) != len(expected):
            return f"{where}: {len(found)} items, not {len(expected)}"
        pairs = [(f"{where}[{i}]", *pair) for i, pair in enumerate(zip(found, expected, strict=True))]
    else:
        return None if found == expected else f"{where}: {found!r}, not {expected!r}"
    return next((told for place, one, other in pairs if (told := difference(one, other, place))), None)
