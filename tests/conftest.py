"""One thread, and shape annotations that are executed."""

import jaxtyping
import pytest
import torch

torch.set_num_threads(1)  # small tensors: threads only wait for each other
KERNELS = [f"attnzoo.kernels.{name}" for name in ("dense", "fused", "blocks", "fastest")]  # those with shapes
jaxtyping.install_import_hook([*KERNELS, "attnzoo.projections", "attnzoo.positions"], "beartype.beartype")


@pytest.fixture
def without_annotations():
    """For what torch traces: a graph can't hold what executes them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _traced(request):
    if any(word in request.node.name for word in ("compile", "export")):
        request.getfixturevalue("without_annotations")


@pytest.fixture
def run(capsys):
    """Runs a command and gives its exit status, stdout and stderr."""
    from attnzoo import cli  # not before the hook is in place

    def run(*arguments):
        status = cli.run(arguments)
        return status, *capsys.readouterr()

    return run
