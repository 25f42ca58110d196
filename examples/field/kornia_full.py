import cpu_torchvision  # noqa: F401 - comes first
from kornia.feature.loftr.loftr_module.linear_attention import FullAttention

from attnbench.contract.adapters import adapt

kornia_full = adapt(FullAttention(), layout="bthk", masks=("none",))
