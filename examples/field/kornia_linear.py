import cpu_torchvision  # noqa: F401 - comes first
from kornia.feature.loftr.loftr_module.linear_attention import LinearAttention

from attnbench.contract.adapters import adapt

kornia_linear = adapt(LinearAttention(), layout="bthk", approximate=True)
