"""Make torchvision importable with a torch without CUDA, where its import fails because two operators are missing.

Attention needs neither operator. Import this before a package that imports torchvision.
"""

import sys

import torch

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"

try:
    import torchvision
except RuntimeError:  # operator torchvision::nms does not exist
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", SCHEMA)
    import torchvision  # noqa: F401 - for the package that imports it next
