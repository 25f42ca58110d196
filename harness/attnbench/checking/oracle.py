"""The oracle: attention in float64, one batch row and head at a time; and textbook forms as yardsticks for errors.

The oracle shares no code with any implementation. Its gradients come from automatic differentiation. A yardstick is
correct code in the workload's own dtype: its error shows how large the error of correct code may be. Shapes as in the
contract; R is the number of chosen query rows. Source: https://arxiv.org/abs/1706.03762, section 3.2.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import msgspec
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attnbench.case import Inputs
from attnbench.contract import Weights
from attnbench.contract.bound_mask import widened
from attnbench.workloads.masks import Mask
from attnbench.workloads.workload import MATMUL_PRECISIONS, Workload

Heads = tuple[Tensor, Tensor, Tensor]
EVERY = slice(None)  # all batch rows, or all heads
FULL_CHECK_PAIRS = 2**22
"""With at most this many scores (B * H * T * S) the oracle computes every row; with more, those of `checked_rows`."""
PART_PAIRS = 2**25
"""With more scores (B * H * R * S), each batch row, head and block of rows is computed separately, to limit memory."""
MOST_PAIRS = 2**32
"""Beyond this many scores no textbook form is evaluated at every row: it would take minutes."""
SMALLEST_TILE = 16  # fewest rows of a tile; `checked_rows` draws one row of each tile
MOST_TILES = 512  # most tiles of one workload, so at long lengths tiles have more rows than SMALLEST_TILE


def on_host(workload: Workload) -> Workload:
    """Return the workload with device "cpu" if it has few scores, because the oracle is faster there; else unchanged.

    On a GPU, each of the oracle's thousands of small operations would be a kernel launch. With a
    `float32_matmul_precision` other than `highest` the workload stays on its device, because TF32 exists only there.
    """
    is_small = workload.num_scores <= FULL_CHECK_PAIRS and workload.float32_matmul_precision == MATMUL_PRECISIONS[0]
    return msgspec.structs.replace(workload, device="cpu") if is_small else workload


def checked_rows(workload: Workload, draws: torch.Generator) -> Tensor:
    """Choose the query rows to compare (R,), sorted: all or, at long lengths, edges and a random row of each tile."""
    query_len = workload.seq_len
    if workload.num_scores <= FULL_CHECK_PAIRS:
        return torch.arange(query_len)
    edges = [0, 1, 15, 16, 63, 64, 127, 128, 255, 256, query_len // 2, query_len - 2, query_len - 1]
    tile = max(SMALLEST_TILE, -(-query_len // MOST_TILES))
    starts = torch.arange(0, query_len, tile)
    random = starts + torch.randint(tile, starts.shape, generator=draws)  # each tile has one, so a lost tile shows
    return torch.tensor(sorted({min(max(0, row), query_len - 1) for row in [*edges, *random.tolist()]}))


@dataclass(frozen=True, kw_only=True)
class RowMask:
    """A mask at some query rows: their visible keys and score changes."""

    rule: Mask
    sizes: tuple[int, int, int]  # B, T, S
    num_heads: int
    rows: Tensor  # (R,) indices of the queries
    device: torch.device | str = "cpu"
    scale: float | None = None  # None: 1 / sqrt(K)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)  # sinks, and tensors of learned biases
    whole: "RowMask | None" = None  # the mask that this one is a `part` of
    batch: slice = field(default_factory=lambda: EVERY)
    heads: slice = field(default_factory=lambda: EVERY)

    def part(self, head: int, row: int | None = None) -> "RowMask":
        """Return the mask of one head in one batch row, or in all if `row` is None; it shares `seen` with this mask.

        A part returns itself.
        """
        if self.whole is not None:
            return self
        return replace(
            self,
            whole=self,
            batch=EVERY if row is None else slice(row, row + 1),
            heads=slice(head, head + 1),
        )

    def scale_for(self, head_dim: int) -> float:
        """Return the factor by which products of queries and keys of width `head_dim` are multiplied."""
        return head_dim**-0.5 if self.scale is None else self.scale

    @property
    def sinks(self) -> Tensor | None:
        """The score of each head's sink (H, 1, 1), or None without sinks."""
        return self.inputs["sinks"][self.heads, None, None] if "sinks" in self.inputs else None

    @property
    def queries(self) -> Tensor:
        """The index of each query (R, 1)."""
        return self.rows[:, None]

    @cached_property
    def keys(self) -> Tensor:
        """The index of each key (S,)."""
        return torch.arange(self.sizes[2], device=self.rows.device)

    @cached_property
    def seen(self) -> Tensor:
        """Whether each query sees each key (B, 1, R, S)."""
        return self.seen_under(self.rule) if self.whole is None else self.whole.seen[self.batch]

    def seen_under(self, rule: Mask) -> Tensor:
        """Return whether each query sees each key under another mask, `rule`: boolean (B, 1, R, S)."""
        return torch.from_numpy(rule.dense(*self.sizes, rows=self.rows.cpu().numpy()).copy())[:, None].to(self.device)

    def bias(self, part: Mask) -> Tensor:
        """Return the bias of an additive `part`: (H, R, S) in float64 or, if learned, (B, H, R, S) in its own dtype."""
        batch_size, query_len, key_len = self.sizes
        if part.is_learned:
            index = part.index(self.queries, self.keys, key_len - query_len, key_len)
            row = torch.arange(batch_size)[self.batch, None, None, None]
            head = torch.arange(self.num_heads)[self.heads, None, None]
            found: Tensor = part.looked_up(widened(self.inputs), (row, head, self.queries), index)
            return found
        per_head = torch.from_numpy(part.per_head(self.num_heads))[self.heads, None, None]
        bias: Tensor = part.bias(per_head, self.queries.cpu(), self.keys.cpu(), key_len - query_len)
        return bias.double().to(self.device)

    def change(self, scores: Tensor, part: Mask) -> Tensor:
        """Apply one part of the mask to the scores (B, H, R, S): add its bias, or transform them, as a softcap does."""
        return scores + self.bias(part).to(scores.dtype) if part.is_additive else part.transform(scores)

    def changed(self, scores: Tensor) -> Tensor:
        """Apply every part of the mask that changes the scores (B, H, R, S); keys are not hidden yet."""
        for part in self.rule.changes:
            scores = self.change(scores, part)
        return scores


def row_mask(
    workload: Workload, rows: Tensor, device: torch.device | str = "cpu", inputs: Mapping[str, Tensor] | None = None
) -> RowMask:
    """Create the workload's mask at the query rows `rows` (R,); without `inputs` it has no sinks or learned biases."""
    operands = {name: tensor for name, tensor in (inputs or {}).items() if name in workload.operands}
    return RowMask(
        rule=workload.mask_rule,
        sizes=(workload.batch_size, workload.seq_len, workload.kv_len),
        num_heads=workload.num_heads,
        rows=rows,
        device=device,
        scale=workload.scale or None,
        inputs=operands,
    )


def product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply matrices (..., I, J) and (..., J, K); on the CPU, half precision is summed in float32, then rounded.

    GPUs sum like this, too. On processors without half-precision instructions, `@` takes up to ten times as long.
    """
    if torch.finfo(left.dtype).bits < 32 and left.is_cpu:  # noqa: PLR2004 - float32's
        return (left.float() @ right.float()).to(left.dtype)
    return left @ right


def attend(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """Compute the oracle: query rows (B, H, R, K), key (B, G, S, K), value (B, G, S, V) -> context (B, H, R, V).

    Query head h reads key/value head h // (H / G). A row that sees no key gives 0.
    """
    num_heads, readers = query.shape[1], query.shape[1] // key.shape[1]
    results = []
    for head in range(num_heads):
        own, of_key, of_value = mask.part(head), key[:, head // readers], value[:, head // readers]  # (B,S,K), (B,S,V)
        scores = query[:, head] @ of_key.mT * mask.scale_for(query.shape[-1])  # (B,R,S)
        scores = own.changed(scores[:, None])[:, 0].where(own.seen[:, 0], -math.inf)
        largest = scores.max(dim=-1, keepdim=True).values.clamp(min=torch.finfo(scores.dtype).min)
        if own.sinks is not None:
            largest = torch.maximum(largest, own.sinks[0])
        powers = (scores - largest).exp()
        total = powers.sum(dim=-1, keepdim=True)
        if own.sinks is not None:
            total = total + (own.sinks[0] - largest).exp()
        weights = powers / total.where(total > 0, 1.0)
        results.append(weights @ of_value)  # (B,R,V)
    return torch.stack(results, dim=1)


def textbook(query: Tensor, key: Tensor, value: Tensor, mask: RowMask, *, detaches: bool = False) -> Tensor:
    """Compute the plain textbook form for all heads at once, each step rounded to the inputs' dtype: a yardstick.

    Shapes are those of `attend`. The gradient of the row maximum is 0 except for roundings, which go to the key with
    the maximum. With `detaches` no gradient flows through the maximum, as in code that detaches it.
    """
    weights = _softmax(_masked_scores(query, key, mask), mask, detaches=detaches)
    return product(weights, _all_heads(value, query))


def scattered(query: Tensor, key: Tensor, value: Tensor, mask: RowMask, *, seed: int) -> Tensor:
    """Compute the textbook form with random signs in its backward pass, so that the terms of a gradient do not cancel.

    The size of these gradients is the size of their terms. Roundings are proportional to it, even if the terms of the
    right gradient nearly cancel, as they do when all scores are shifted.
    """
    value, signs = _all_heads(value, query), torch.empty(0)

    def signed(scores: Tensor) -> Tensor:
        nonlocal signs
        draws = torch.Generator().manual_seed(seed)
        signs = torch.randint(2, scores.shape, generator=draws).to(scores) * 2 - 1
        mirrored = signs * scores
        return torch.where(scores.isfinite(), mirrored + (scores - mirrored).detach(), scores)  # -inf hides a key

    weights = _softmax(_masked_scores(query, key, mask, signed), mask)
    of_value = product(signs * weights.detach(), value)
    return product(weights, value.detach()) + of_value - of_value.detach()


def recomputed(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Tensor:
    """Compute the textbook form with FlashAttention's backward pass: a yardstick that rounds at other steps.

    The backward pass uses an output O that is perturbed twice. Each number is changed by one rounding, because other
    code sums in another order. Each row is changed by one rounding of its logsumexp, in float32 at least, because other
    code merges parts of a row by their logsumexp. With weights P, dP = dO V^T and D = rowsum(dO * O), the gradient of
    the scores is P * (dP - D). A sink is an additional key with value 0.

    Source: https://arxiv.org/abs/2307.08691, algorithm 2.
    """
    scores, value, sinks = _masked_scores(query, key, mask), _all_heads(value, query), mask.sinks
    logsumexp = scores.detach().logsumexp(dim=-1, keepdim=True)
    if sinks is not None:
        logsumexp = torch.logaddexp(logsumexp, sinks.detach())
    weights = (scores - logsumexp).exp().nan_to_num(0.0)
    attended = product(weights, value)
    out = attended.detach()
    draws = torch.Generator().manual_seed(0)
    of_numbers, of_rows = (
        torch.randint(2, shape, generator=draws).to(out.device) * 2 - 1 for shape in (out.shape, logsumexp.shape)
    )
    wide = torch.finfo(torch.promote_types(out.dtype, torch.float32)).eps
    share = torch.finfo(out.dtype).eps / 2 * of_numbers + wide * logsumexp.abs().nan_to_num(posinf=0.0) * of_rows
    along = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        along = along + (sinks - logsumexp).exp()
    form = attended - along * (out * (1 + share)).to(out.dtype)
    return out + (form - form.detach()).nan_to_num(0.0)


def _all_heads(tensor: Tensor, query: Tensor) -> Tensor:
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def _masked_scores(
    query: Tensor, key: Tensor, mask: RowMask, change: Callable[[Tensor], Tensor] = lambda scores: scores
) -> Tensor:
    """Compute masked scores: (B, H, R, K), (B, G, S, K) -> (B, H, R, S); `change` is applied before keys are hidden."""
    scores = product(query, _all_heads(key, query).transpose(-2, -1)) * mask.scale_for(query.shape[-1])
    return change(mask.changed(scores)).masked_fill(~mask.seen, -math.inf)


def _softmax(scores: Tensor, mask: RowMask, *, detaches: bool = True) -> Tensor:
    """Compute weights (B, H, R, S) from masked scores; 0 for a query that sees no key. `detaches`: as in `textbook`."""
    num_keys = scores.shape[-1]
    if mask.sinks is not None:
        scores = torch.cat([scores, mask.sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    largest = scores.max(dim=-1, keepdim=True).values.clamp(min=torch.finfo(scores.dtype).min)
    powers = (scores - (largest.detach() if detaches else largest)).exp()
    total = powers.sum(dim=-1, keepdim=True)
    return (powers / total.where(total > 0, 1.0))[..., :num_keys]


def project(x: Tensor, context: Tensor, weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """Project tokens (B, T, D) and context (B, S, D) to query (B, H, T, K), key (B, G, S, K) and value (B, G, S, V)."""

    def through(tokens: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        projected = product(tokens[:, None], weight.mT)  # (B,1,T,D) and (H,D,K)
        return projected if bias is None else projected + bias[None, :, None, :]

    return (
        through(x, weights.query, weights.query_bias),
        through(context, weights.key, weights.key_bias),
        through(context, weights.value, weights.value_bias),
    )


Form = Callable[[Tensor, Tensor, Tensor, RowMask], Tensor]
YARDSTICKS: tuple[Form, ...] = (textbook, recomputed)  # correct forms that round differently
OF_MOVED: tuple[Form, ...] = (partial(textbook, detaches=True), recomputed)  # yardsticks on inputs moved by a rounding

# Three seeds, because the gradients of one may be small by chance.
SCATTERED: tuple[Form, ...] = tuple(partial(scattered, seed=seed) for seed in range(3))


def weights(attend: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """Recover the weights (B, H, T, S) of `attend`, a function from values (B, G, S, V) to a context (B, H, T, V).

    Attention is linear in its values: if column j of the values is 1 at one key and 0 elsewhere, column j of the
    context is the weight of that key. So each call of `attend` recovers the weights of V keys. `like` has the shape,
    dtype and device of the values.
    """
    key_len, width = like.shape[-2:]
    columns = []
    for start in range(0, key_len, width):
        count = min(width, key_len - start)
        unit = torch.zeros_like(like)
        unit[:, :, torch.arange(start, start + count), torch.arange(count)] = 1.0
        columns.append(attend(unit)[..., :count])
    return torch.cat(columns, dim=-1)


def answer(  # noqa: PLR0913, PLR0917 - a call, and what is changed
    workload: Workload,
    inputs: Inputs,
    rows: Tensor,
    form: Form = attend,
    on_step: Callable[[], object] = lambda: None,
    change: Callable[[RowMask], RowMask] = lambda mask: mask,
) -> Tensor:
    """Compute a workload's output at the query rows `rows` (R,), with the oracle or another form.

    The output has the dtype and device of `inputs`. `change` alters the mask. `on_step` is called before each part of
    the work. Scope `attention`: (B, H, R, V). Scope `module`: (B, R, D), or (B, R, H*V) without an output projection.
    """
    query, key, value = heads(workload, inputs, rows)
    mask = change(row_mask(workload, rows, query.device, inputs.tensors))
    attended = in_parts(form, query, key, value, mask, on_step)
    return attended if workload.scope == "attention" else output(attended, inputs.weights)


def in_parts(  # noqa: PLR0913, PLR0917 - a form, its operands, and a callback
    form: Form, query: Tensor, key: Tensor, value: Tensor, mask: RowMask, on_step: Callable[[], object]
) -> Tensor:
    """Compute a form (B, H, R, V); with more than PART_PAIRS scores, one batch row, head and block of rows at a time.

    `on_step` is called before each part, in the forward pass and again in the backward pass, which recomputes the
    part's scores (T. Chen et al., https://arxiv.org/abs/1604.06174). Forms that may mix heads are not split.
    """
    batch_size, num_heads, num_rows, _ = query.shape
    if (
        form not in {attend, *SCATTERED, *YARDSTICKS, *OF_MOVED}
        or batch_size * num_heads * num_rows * key.shape[2] <= PART_PAIRS
    ):
        on_step()
        return form(query, key, value, mask)

    def attended(query: Tensor, key: Tensor, value: Tensor, part: RowMask) -> Tensor:
        on_step()
        return form(query[:, None], key[:, None], value[:, None], part)

    readers = num_heads // key.shape[1]
    blocks: list[Tensor] = []
    for start in range(0, num_rows, max(1, PART_PAIRS // key.shape[2])):
        rows, results = slice(start, start + max(1, PART_PAIRS // key.shape[2])), list[Tensor]()
        own = replace(mask, rows=mask.rows[rows])
        for row, head in itertools.product(range(batch_size), range(num_heads)):
            at, group = slice(row, row + 1), head // readers
            part = query[at, head, rows], key[at, group], value[at, group], own.part(head, row)
            if torch.is_grad_enabled():
                results.append(checkpoint(attended, *part, use_reentrant=False, preserve_rng_state=False))
            else:
                results.append(attended(*part))
        blocks.append(torch.cat(results).view(batch_size, num_heads, -1, value.shape[-1]))
    return torch.cat(blocks, dim=2)


def output(attended: Tensor, weights: Weights) -> Tensor:
    """Join the heads, then apply the output projection if there is one: (B, H, R, V) -> (B, R, D), or (B, R, H*V)."""
    merged = attended.permute(0, 2, 1, 3).flatten(2)
    if weights.out is None:
        return merged
    projected = product(merged, weights.out.T)
    return projected if weights.out_bias is None else projected + weights.out_bias


def heads(workload: Workload, inputs: Inputs, rows: Tensor, project: Callable[..., Heads] = project) -> Heads:
    """Return query rows (B, H, R, K), key (B, G, S, K) and value (B, G, S, V) as the scores need them.

    They are inputs or, in scope `module`, projections; `rotary` rotates query and key. A query that `at_rows` has
    already reduced to `rows` is not reduced again.
    """
    if workload.scope == "attention":
        query, key, value = inputs.tensors["query"], inputs.tensors["key"], inputs.tensors["value"]
        query = query if query.shape[2] < workload.seq_len else query[:, :, rows]
    else:
        x = inputs.tensors["x"]
        query, key, value = project(x[:, rows], inputs.tensors.get("context", x), inputs.weights)
    return in_place(workload, rows, (query, key, value))


def in_place(workload: Workload, rows: Tensor, heads: Heads, sign: int = 1) -> Heads:
    """Return query (B, H, R, K) and key (B, G, S, K), rotated if the workload has `rotary`, and the unchanged value.

    `rows` (R,) has the positions of the query rows. `sign` -1 rotates them back. No tensor is changed in place.
    """
    query, key, value = heads
    if workload.rotary == "none":
        return heads
    turn = partial(rotated, base=workload.rotary_base, is_interleaved=workload.rotary.startswith("inter"), sign=sign)
    return turn(query, rows), turn(key, torch.arange(workload.kv_len)), value


def rotated(heads: Tensor, places: Tensor, base: float, *, is_interleaved: bool, sign: int = 1) -> Tensor:
    """Rotate each pair of columns of a query or key (B, H, T, K) by an angle in proportion to the token's position.

    `places` (T,) are the positions. With `is_interleaved` a pair is two neighbouring columns; otherwise it is column j
    of the first half and column j of the second half.

    Source: RoFormer, https://arxiv.org/abs/2104.09864, section 3.2.2.
    """
    num_pairs = heads.shape[-1] // 2
    dtype = torch.promote_types(heads.dtype, torch.float32)  # angles in half precision are off by radians
    angles = sign * places.to(dtype)[:, None] * base ** -(torch.arange(num_pairs, dtype=dtype) / num_pairs)  # (T,K/2)
    return by_angles(heads, angles, is_interleaved=is_interleaved)


def by_angles(heads: Tensor, angles: Tensor, *, is_interleaved: bool) -> Tensor:
    """Rotate each pair of columns of (B, H, T, K) by the angles (T, K/2).

    With `is_interleaved` a pair is two neighbouring columns; otherwise it is column j of each half.
    """
    cos, sin = (each.to(heads) for each in (angles.cos(), angles.sin()))
    one, other = (heads[..., 0::2], heads[..., 1::2]) if is_interleaved else heads.chunk(2, dim=-1)
    pairs = one * cos - other * sin, other * cos + one * sin
    return torch.stack(pairs, dim=-1).flatten(-2) if is_interleaved else torch.cat(pairs, dim=-1)


def at_rows(workload: Workload, inputs: Inputs, rows: Tensor) -> Inputs:
    """Reduce the query to the rows `rows` (R,) in scope `attention`; return the inputs unchanged in scope `module`."""
    if workload.scope == "module":
        return inputs
    query = inputs.tensors["query"]
    return replace(inputs, tensors=inputs.tensors | {"query": query.index_select(2, rows.to(query.device))})


def score_bound(workload: Workload, inputs: Inputs, rows: Tensor) -> float:
    """Return a bound on the scores that get weight: the longest query times the longest key, scaled (Cauchy-Schwarz).

    The mask's changes are then applied in order: a bias adds the largest absolute value of its row maxima over visible
    keys, and a softcap transforms the bound.
    """
    query, key, _ = heads(workload, inputs, rows)
    bound = query.norm(dim=-1).max() * key.norm(dim=-1).max() * workload.score_scale
    mask = row_mask(workload, rows, query.device, inputs.tensors)
    for part in mask.rule.changes:
        if not part.is_additive:
            bound = part.transform(bound)
            continue
        best = torch.zeros_like(bound)
        for place in itertools.product(range(mask.num_heads), range(query.shape[0])):  # one by one, to limit memory
            one = mask.part(*place)
            of_rows = one.bias(part).masked_fill(~one.seen[0, 0], -math.inf).amax(dim=-1).abs()  # (..., R)
            best = torch.maximum(best, of_rows.where(of_rows.isfinite(), 0.0).max())
        bound = bound + best
    return float(bound)
