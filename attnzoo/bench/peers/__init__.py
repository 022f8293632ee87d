"""Other people's attention, each as the same thing: a kernel (q, k, v) -> out, or a whole module."""

import importlib
import warnings
from importlib.util import find_spec

from attnzoo.bench.peers.peer import Peer
from attnzoo.errors import OptionError
from attnzoo.options import choice

CATALOGUE = {
    "dense": ("of_torch:Dense", "torch"),
    "sdpa": ("of_torch:Sdpa", "torch"),
    "sdpa-repeat": ("of_torch:SdpaRepeat", "torch"),
    "flex": ("of_torch:Flex", "torch"),
    "nn-mha": ("of_torch:MultiheadAttention", "torch"),
    "hf-longformer": ("of_transformers:Longformer", "transformers"),
    "hf-bigbird": ("of_transformers:BigBird", "transformers"),
    "local-attention": ("of_local_attention:LocalAttention", "local_attention"),
    "x-transformers": ("of_x_transformers:Attend", "x_transformers"),
}
"""Where each peer's adapter is, and the package that it needs."""


def check(name: str) -> str:
    """The name of a peer whose package is there; imports nothing.

    Raises:
        OptionError: no peer has the name, or its package is missing.
    """
    package = CATALOGUE[choice("against", name, CATALOGUE)][1]
    if find_spec(package) is None:
        package = package.replace("_", "-")
        raise OptionError(f"{name} needs the package {package}, which is missing: pip install 'attnzoo[bench]'")
    return name


def find(name: str) -> type[Peer]:
    """The adapter of a peer."""
    module, _, attribute = CATALOGUE[check(name)][0].partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a package warns of as it is imported is its own affair
        return getattr(importlib.import_module(f"attnzoo.bench.peers.{module}"), attribute)
