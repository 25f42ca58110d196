"""The full attention of kornia's LoFTR: (B, T, H, K) and a mask each for queries and keys."""

import torch
from kornia.feature.loftr.loftr_module.linear_attention import FullAttention

from attnbench.contract import Attention, Implementation, repeat_heads


class Loftr(Attention):
    with_query_mask = True

    def attend(self, query, key, value, mask):
        heads = (query, repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1]))
        keys = None if mask.visible is None else mask.visible[:, 0, 0].expand(len(query), -1)
        queries = torch.ones(len(query), query.shape[2], dtype=torch.bool) if self.with_query_mask else None
        swapped = [tensor.transpose(1, 2) for tensor in heads]
        return FullAttention()(*swapped, q_mask=queries, kv_mask=keys).transpose(1, 2)


class LoftrKeysAlone(Loftr):
    with_query_mask = False


def unsupported(workload):
    return None if workload.mask_rule.name in {"none", "padding"} else "it takes a mask of keys alone"


kornia_loftr = Implementation(build=Loftr, source="", unsupported=unsupported)
kornia_loftr_keys_alone = Implementation(build=LoftrKeysAlone, source="", unsupported=unsupported)
