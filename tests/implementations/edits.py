"""Edits of our implementations' texts, each of which plants a mistake, and what it must be named as. Data alone."""

from dataclasses import dataclass, field

from attnbench.workloads.workload import Workload

BOTH = {"direction": "forward_backward"}
GROUPED = {"num_heads": 4, "num_kv_heads": 2}
MODULE = {"scope": "module", "num_heads": 3}
TILES = {"seq_len": 16}
BY_TILES = ("TILE = 256", "TILE = 8")
"""Not a mistake: `chunked` in tiles so small that a short length has several."""

HIDING = "scores = scores.masked_fill(mask.hidden, -torch.inf)"
SOFTMAX = "softmax_with_sinks(scores, sinks)"
HEAD_SOFTMAX = "softmax_with_sinks(scores, None if mask.sinks is None else mask.sinks[number])"
SCALED = "* mask.scale_for(query.shape[-1])"
EXPLICIT = "mask.explicit(query.dtype)"
MASKED = f"attn_mask=None if mask.is_causal else {EXPLICIT}"
EACH_HEAD = "head(x, context, mask, self.dropout) for head in self.heads"
ALL_TILES = "for keys in tiles(key.shape[-2])"
QUERY_ROWS = "query.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)"
KEY_ROWS = "key.unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)"
VALUE_ROWS = "value.unflatten(-1, (self.num_kv_heads, self.value_dim)).transpose(1, 2)"
PACKED_ROWS = "torch.cat([weights.query, weights.key, weights.value])"
PACKED_BIASES = "torch.cat([weights.query_bias, weights.key_bias, weights.value_bias])"
GROUPS = "groups = (key.shape[1], query.shape[1] // key.shape[1])"


@dataclass(frozen=True, kw_only=True)
class Edit:
    """A change of an implementation's text; what it must be named as, at a workload where it shows."""

    file: str
    changed: dict[str, str]
    names: tuple[str, ...]
    axes: dict[str, object] = field(default_factory=dict)
    reported: str = ""

    @property
    def workload(self) -> Workload:
        sizes = {"seq_len": 11, "num_heads": 2, "head_dim": 8, "direction": "inference"}
        return Workload(**(sizes | self.axes))


def edit(file, changed, names, axes=None, reported=""):
    return Edit(file=file, changed=changed, names=tuple(names.split()), axes=axes or {}, reported=reported)


EDITS = [
    edit("naive_loop", {"products * scale": "products"}, "no_scale"),
    edit("naive_loop", {".masked_fill(hidden, -torch.inf)": ""}, "mask_ignored", {"mask": "causal"}),
    edit(
        "naive_loop",
        {"key[b, h // group_size], value[b, h // group_size]": "key[b, h % key.shape[1]], value[b, h % key.shape[1]]"},
        "kv_heads_interleaved",
        GROUPED,
    ),
    edit("naive_loop", {", value[b, h // group_size]": ", value[b, 0]"}, "value_head_order"),
    edit(
        "naive_loop",
        {"view(batch_size, num_heads, query_len, -1)": "view(batch_size, query_len, num_heads, -1).transpose(1, 2)"},
        "merged_without_transpose",
        MODULE,
    ),
    edit("module_list", {EACH_HEAD: EACH_HEAD + "[::-1]"}, "output_head_order", MODULE),
    edit(
        "module_list",
        {f"torch.cat([{EACH_HEAD}], dim=-1)": f"torch.stack([{EACH_HEAD}], dim=-1).flatten(2)"},
        "merged_feature_by_feature",
        MODULE,
    ),
    edit(
        "module_list",
        {"self.key(context), self.value(context)": "self.value(context), self.key(context)"},
        "projections_in_wrong_order",
        MODULE,
        reported="query, value and key",
    ),
    edit("module_list", {"merged if self.out is None else self.out(merged)": "merged"}, "no_output_projection", MODULE),
    edit("module_list", {HEAD_SOFTMAX: "scores.softmax(dim=-2)"}, "softmax_over_queries", {"mask": "prefix(3)"}),
    edit("fused", {HIDING: "scores = scores * ~mask.hidden"}, "mask_multiplied", {"mask": "causal"}),
    edit(
        "fused",
        {"scores = mask.adjust(scores)": "pass", HIDING: f"{HIDING}\n            scores = mask.adjust(scores)"},
        "softcap_after_mask",
        {"mask": "causal+softcap(3)"},
    ),
    edit(
        "chunked",
        {"grad if rate is None else grad.mul_(rate)": "grad"},
        "softcap_without_derivative",
        TILES | BOTH | {"mask": "sliding_window(3)+softcap(2)"},
    ),
    edit(
        "module_list",
        {"mask.adjust(scores, heads=number)": "mask.adjust(scores, heads=0)"},
        "bias_head_order",
        {"mask": "additive", "num_heads": 3},
    ),
    edit(
        "naive_loop",
        {"heads=head, queries": "heads=(head + 1) % num_heads, queries"},
        "bias_head_order",
        {"mask": "causal+alibi", "num_heads": 3},
    ),
    edit("fused", {HIDING: HIDING.replace("-torch.inf", "-10.0")}, "mask_too_weak", {"mask": "sliding_window(3)"}),
    edit(
        "fused",
        {"query, key, value = self.qkv(x)": "key, query, value = self.qkv(x)"},
        "projections_in_wrong_order query_key_swapped",  # the same, as long as no query is masked
        MODULE,
        reported="key, query and value",
    ),
    edit(
        "fused",
        {
            QUERY_ROWS: "query.reshape(len(query), self.num_heads, -1, self.head_dim)",
            KEY_ROWS: "key.reshape(len(key), self.num_kv_heads, -1, self.head_dim)",
            VALUE_ROWS: "value.reshape(len(value), self.num_kv_heads, -1, self.value_dim)",
        },
        "viewed_not_transposed",
        MODULE,
    ),
    edit(
        "fused",
        {
            QUERY_ROWS: "query.unflatten(-1, (self.head_dim, self.num_heads)).permute(0, 3, 1, 2)",
            KEY_ROWS: "key.unflatten(-1, (self.head_dim, self.num_kv_heads)).permute(0, 3, 1, 2)",
            VALUE_ROWS: "value.unflatten(-1, (self.value_dim, self.num_kv_heads)).permute(0, 3, 1, 2)",
        },
        "split_feature_by_feature",
        MODULE,
    ),
    edit("fused", {"torch.cat(given)}": "0 * torch.cat(given)}"}, "no_input_biases", MODULE),
    edit(
        "einsum",
        {
            GROUPS: "groups = (query.shape[1] // key.shape[1], key.shape[1])",
            "bgrtk,bgsk->bgrts": "brgtk,bgsk->brgts",
            "bgrts,bgsv->bgrtv": "brgts,bgsv->brgtv",
        },
        "kv_heads_interleaved",
        GROUPED | {"num_heads": 6},
    ),
    edit("einsum", {SOFTMAX: "scores.softmax(dim=1)"}, "softmax_over_heads"),
    edit("einsum", {SOFTMAX: "scores.sigmoid()"}, "sigmoid_for_softmax"),
    edit(
        "einsum",
        {SOFTMAX: "scores.relu()"},
        "",
        reported="No known mistake explains it. Its weights, seen from outside",
    ),
    edit(
        "einsum",
        {
            "query + self.query_bias[:, None], key + self.key_bias[:, None], value + self.value_bias[:, None]": (
                "query, key, value"
            )
        },
        "no_input_biases",
        MODULE | BOTH,
    ),
    edit("bmm", {SCALED: "/ query.shape[-1]"}, "scaled_by_width"),
    edit("bmm", {SCALED: "/ (sizes[1] * query.shape[-1]) ** 0.5"}, "scaled_by_embedding"),
    edit("bmm", {"query, key.transpose(1, 2)": "key, query.transpose(1, 2)"}, "query_key_swapped", {"mask": "causal"}),
    edit(
        "bmm",
        {
            "repeat_heads(key, sizes[1])": "key.repeat(1, sizes[1] // key.shape[1], 1, 1)",
            "repeat_heads(value, sizes[1])": "value.repeat(1, sizes[1] // value.shape[1], 1, 1)",
        },
        "kv_heads_interleaved",
        GROUPED | BOTH,
    ),
    edit("chunked", {"total.mul_(rescale)": "total"}, "sum_not_rescaled", TILES, reported="tiles of 8 keys"),
    edit(
        "chunked",
        {"(previous - maximum).exp_()": "torch.ones_like(maximum)"},
        "maximum_not_rescaled",
        TILES,
        reported="tiles of 8 keys",
    ),
    edit("chunked", {ALL_TILES: "for keys in [*tiles(key.shape[-2])][1:]"}, "tile_dropped", TILES, reported="0 to 7"),
    edit(
        "chunked",
        {ALL_TILES: "for keys in [*tiles(key.shape[-2])][:-1]"},
        "last_partial_tile_dropped",
        {"seq_len": 19},
        reported="the 3 keys 16 to 18",
    ),
    edit(
        "chunked",
        {ALL_TILES: "for keys in [*tiles(key.shape[-2]), slice(0, TILE)]"},
        "tile_counted_twice",
        TILES,
        reported="0 to 7",
    ),
    edit("chunked", {".sub_(correction[..., rows, :])": ""}, "gradient_row_sums", TILES | BOTH),
    edit(
        "chunked",
        {"grad_value[..., keys, :] +=": "grad_value[..., keys, :] ="},
        "gradient_tile_lost",
        TILES | BOTH,
    ),
    edit(
        "chunked",
        {"return grad_query,": "return math.sqrt(query.shape[-1]) * grad_query,"},
        "query_gradient_factor",
        TILES | BOTH,
    ),
    edit(
        "chunked",
        {"return grad_query, grad_key,": "return grad_query, math.sqrt(query.shape[-1]) * grad_key,"},
        "key_gradient_factor",
        TILES | BOTH | {"mask": "causal"},
    ),
    edit(
        "chunked",
        {"grad_value, grad_sinks": "torch.zeros_like(value), grad_sinks"},
        "value_gradient_zero",
        TILES | BOTH | {"mask": "padding", "batch_size": 2},
    ),
    edit("sdpa", {"dropout_p=self.dropout": "dropout_p=0.1"}, "dropout_in_evaluation"),
    edit("sdpa", {"scale=mask.scale": "scale=1.0"}, "no_scale", GROUPED),
    edit("sdpa", {"scale=mask.scale": "scale=query.shape[-1] ** 0.5"}, "multiplied_by_root", BOTH),
    edit("sdpa", {EXPLICIT: "mask.hidden"}, "mask_inverted", {"mask": "sliding_window(3)"}),
    edit(
        "sdpa",
        {MASKED: "attn_mask=None", "is_causal=mask.is_causal": "is_causal=not mask.is_none"},
        "top_left_for_bottom_right",
        {"mask": "causal_bottom_right", "kv_len": 15},
    ),
    edit(
        "sdpa",
        {EXPLICIT: "mask.bias(query.dtype).mul(query.shape[-1] ** -0.5)"},
        "changed_before_scale",
        {"mask": "causal+additive"},
    ),
    edit("sdpa_math", {EXPLICIT: "mask.visible"}, "bias_ignored", {"mask": "causal+alibi"}),
    edit("sdpa_math", {EXPLICIT: "mask.bias(query.dtype).flip(1)"}, "bias_head_order", {"mask": "causal+alibi"}),
    edit("sdpa_math", {MASKED: "attn_mask=None"}, "padding_ignored", {"mask": "padding", "batch_size": 2}),
    edit("sdpa_math", {"is_causal=mask.is_causal": "is_causal=False"}, "mask_ignored", {"mask": "causal"}),
    edit("sdpa_math", {EXPLICIT: "mask.visible.to(query.dtype)"}, "mask_added_as_number", {"mask": "prefix(3)"}),
    edit(
        "sdpa_math",
        {"                value,": "                value.roll(-1, dims=2),"},
        "key_position_order value_position_order",
    ),
    edit(
        "sdpa_flash",
        {EXPLICIT: "mask.visible[:1]"},
        "first_rows_mask_for_all",
        {"mask": "padding", "batch_size": 2},
    ),
    edit(
        "sdpa_flash",
        {MASKED: "attn_mask=None", "is_causal=mask.is_causal": "is_causal=not mask.is_none"},
        "top_left_for_bottom_right",
        {"mask": "causal_bottom_right", "kv_len": 19},
    ),
    edit("sdpa_flash", {"                key,": "                key.detach(),"}, "key_gradient_zero", BOTH),
    edit(
        "torch_mha",
        {
            PACKED_ROWS: "torch.cat([weights.value, weights.query, weights.key])",
            PACKED_BIASES: "torch.cat([weights.value_bias, weights.query_bias, weights.key_bias])",
        },
        "projections_in_wrong_order",
        MODULE,
        reported="value, query and key",
    ),
    edit(
        "torch_mha",
        {PACKED_ROWS: "torch.stack([weights.query, weights.key, weights.value], dim=1).flatten(0, 1)"},
        "packed_read_in_thirds",
        MODULE | {"bias": "out", "num_heads": 2},
    ),
    edit("torch_mha", {'.bias": weights.out_bias}': '.bias": weights.out_bias * 0}'}, "no_output_bias", MODULE),
    edit("torch_mha", {'.weight": weights.out,': '.weight": weights.out.T,'}, "output_projection_transposed", MODULE),
    edit("torch_mha", {"hidden[0, 0]": "~hidden[0, 0]"}, "mask_inverted", MODULE | {"mask": "sliding_window(3)"}),
    edit(
        "sdpa_mask",
        {"else mask.visible & everywhere": "else mask.hidden & everywhere"},
        "mask_inverted",
        {"mask": "sliding_window(3)"},
    ),
    edit("sdpa_mask", {"scale=mask.scale": "scale=1.0"}, "no_scale", GROUPED),
    edit(
        "sdpa_bias",
        {'"causal_bottom_right": bias.causal_lower_right': '"causal_bottom_right": bias.causal_upper_left'},
        "top_left_for_bottom_right",
        {"mask": "causal_bottom_right", "kv_len": 15},
    ),
    edit("sdpa_bias", {"scale=mask.scale": "scale=1.0"}, "no_scale", {"mask": "causal"}),
    edit(
        "torch_mha_weights",
        {'packed("in_proj_{}",': 'packed("in_proj_{}", "vqk",'},
        "projections_in_wrong_order",
        MODULE,
        reported="value, query and key",
    ),
    edit(
        "torch_mha_weights", {"hidden[0, 0]": "~hidden[0, 0]"}, "mask_inverted", MODULE | {"mask": "sliding_window(3)"}
    ),
]
