"""One thread, and shape annotations that are executed."""

import jaxtyping
import torch

torch.set_num_threads(1)  # small tensors: threads only wait for each other
jaxtyping.install_import_hook(["attnzoo.kernels", "attnzoo.projections", "attnzoo.positions"], "beartype.beartype")
