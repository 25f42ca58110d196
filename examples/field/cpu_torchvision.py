"""Make torchvision importable with a torch without CUDA: its kernels do not load there, and it asks for two of them.

Attention needs neither. Import this before a package that imports torchvision.
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
    import torchvision  # noqa: F401 - for whoever imports it next
