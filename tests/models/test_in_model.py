"""Attention inside real models: every architecture is right offline, and a planted mistake is found in its layer."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")

from attnbench.checking import oracle  # noqa: E402 - where there is transformers
from attnbench.cli import app  # noqa: E402
from attnbench.models import in_model  # noqa: E402
from attnbench.models.in_model import expect, judge  # noqa: E402
from attnbench.models.records import ModelSpec  # noqa: E402
from attnbench.workloads.masks import masks  # noqa: E402

SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = SMALL | LAYERS | {"num_key_value_heads": 2}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "moe_intermediate_size": 16}
LATENT |= {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT |= dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8)
RELATIVE = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
WIDTH = {"head_dim": 8}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGURATIONS = {
    "LlamaConfig": GROUPED,
    "Qwen3Config": GROUPED | WIDTH,
    "Gemma2Config": GROUPED | WIDTH | {"sliding_window": 8, "query_pre_attn_scalar": 24},
    "Gemma3TextConfig": GROUPED
    | WIDTH
    | {
        "num_hidden_layers": 3,
        "sliding_window": 8,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "MistralConfig": GROUPED | {"sliding_window": 8},
    "GptOssConfig": GROUPED
    | WIDTH
    | {"sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 2, "intermediate_size": 16},
    "Phi3Config": GROUPED | TOKENS | {"original_max_position_embeddings": 64},
    "DeepseekV3Config": GROUPED | LATENT,
    "ModernBertConfig": SMALL
    | TOKENS
    | {"num_hidden_layers": 3, "num_attention_heads": 4, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
    "BertConfig": SMALL | LAYERS,
    "T5Config": RELATIVE
    | {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48}
    | {"num_layers": 2, "num_decoder_layers": 2, "num_heads": 4},
    "ViTConfig": LAYERS | {"hidden_size": 32, "intermediate_size": 48, "image_size": 16, "patch_size": 4},
}
REFUSED = {"Gemma2Config": {"sdpa", "fused", "naive_loop"}, "GptOssConfig": {"sdpa"}}
"""They have no softcap, or no sinks."""


@pytest.fixture(scope="module", autouse=True)
def registered():
    transformers.logging.set_verbosity_error()
    in_model.register()


def invoke(*arguments):
    return CliRunner().invoke(app, arguments)


def spec(**fields):
    return ModelSpec(**({"config": "", "seq_len": 20} | fields))


def built(kind, **fields):
    model = in_model.build(spec(**fields), getattr(transformers, kind)(**CONFIGURATIONS[kind]))
    return model, expect(model)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_an_architecture_works_offline_and_honest_attentions_are_right_in_it(kind):
    model, expected = built(kind)
    reported = {name: judge(model, expected, name) for name in ("eager", "sdpa", "fused", "naive_loop", "einsum")}
    refused = {name for name, each in reported.items() if each.is_refused}
    assert refused == REFUSED.get(kind, set()), reported
    for name, each in reported.items():
        assert each.is_right or name in refused, each
        assert each.num_compared >= 30 or name in refused
    layers = [path for path in expected["whole"] if "gradient" not in path and path != "logits"]
    assert len(layers) >= 2
    assert any(path.startswith("gradient of") for path in expected["whole"])


def planted(tmp_path, body):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\ncalls = 0\n"
        "def mine(query, key, value, *, mask=None, scale=None, num_kv_heads=1):\n"
        "    global calls\n    calls += 1\n"
        "    key, value = (each.repeat_interleave(query.shape[1] // num_kv_heads, 1) for each in (key, value))\n"
        "    scores = query @ key.mT * scale\n"
        f"{body}\n"
        "    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)\n"
        "    return scores.softmax(-1).nan_to_num(0.0) @ value\n",
        encoding="utf-8",
    )
    return f"{file}:mine"


MISTAKES = {
    "none": ("    pass", None),
    "scale": ("    scores = scores * 1.01", "model.layers.0.self_attn"),
    "mask": ("    mask = None", "model.layers.0.self_attn"),
    "second layer": ("    scores = scores * (1.01 if calls % 2 == 0 else 1.0)", "model.layers.1.self_attn"),
    "gradient": (
        "    scores = scores + (scores - scores.detach()) * 0.01",
        "gradient of model.layers.1.input_layernorm.weight",
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found_in_the_first_layer_that_has_it(name, tmp_path):
    body, place = MISTAKES[name]
    model, expected = built("LlamaConfig")
    found = judge(model, expected, planted(tmp_path, body))
    assert not found.reason, found
    if place is None:
        assert found.is_right
    elif place.startswith("gradient"):
        assert found.differences
        assert all(each.place.startswith("gradient of ") for each in found.differences)
    else:
        assert found.differences[0].place == place


def test_padding_that_is_ignored_is_found_in_the_padded_batch_alone(tmp_path):
    model, expected = built("BertConfig", has_gradients=False)
    found = judge(model, expected, planted(tmp_path, "    mask = None"))
    assert {each.batch for each in found.differences} == {"padded"}
    assert found.differences[0].place == "bert.encoder.layer.0.attention.self"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "words"), [("GptOssConfig", "sinks"), ("T5Config", "a position bias"), ("Gemma2Config", "a softcap")]
)
def test_an_implementation_that_would_ignore_what_a_model_has_is_not_asked(kind, words, tmp_path):
    model, expected = built(kind, has_gradients=False)
    for attention in (planted(tmp_path, "    pass"), "torch_mha"):
        found = judge(model, expected, attention)
        assert found.is_refused, found
    assert judge(model, expected, planted(tmp_path, "    pass")).reason.startswith(f"the model has {words}: ")


def test_a_model_is_reduced_in_layers_where_asked_and_says_so():
    config = transformers.LlamaConfig(**CONFIGURATIONS["LlamaConfig"])
    made = in_model.build(spec(num_layers=1, has_gradients=False), config)
    assert (made.built.num_layers, made.built.all_layers) == (1, 2)
    layers = [path for path, _ in in_model.attention_modules(made.model)]
    assert layers == ["model.layers.0.self_attn"]


def test_a_model_that_cannot_fit_says_what_it_needs():
    huge = transformers.LlamaConfig(hidden_size=2**17, intermediate_size=2**19, num_attention_heads=1024)
    with pytest.raises(ValueError, match=r"one layer of it needs \d+ GiB"):
        in_model.build(spec(), huge)


def test_eager_attention_of_the_package_rounds_float64_to_float32():
    """docs/findings: its softmax is in float32 for every dtype."""
    model, expected = built("LlamaConfig", dtype="float64", has_gradients=False)
    found = judge(model, expected, "eager")
    assert found.differences[0].place == "model.layers.0.self_attn"
    assert 1e-9 < found.differences[0].error < 1e-5
    assert judge(model, expected, "sdpa").is_right


@pytest.mark.usefixtures("forked_workers")
class TestCommand:
    @pytest.fixture
    def config(self, tmp_path):
        transformers.LlamaConfig(**CONFIGURATIONS["LlamaConfig"]).save_pretrained(tmp_path / "tiny")
        return str(tmp_path / "tiny" / "config.json")

    def test_who_dies_costs_only_itself_and_times_of_the_right_are_compared(self, config, tmp_path):
        dying = planted(tmp_path, "    import os; os._exit(7)")
        result = invoke(
            *("model", config, "--attention", "sdpa", "--attention", dying, "--attention", "eager"),
            *("--seq-len", "16", "--budget", "0.5", "--json"),
        )
        assert result.exit_code == 1, result.output
        found = json.loads(result.stdout)
        assert found["judged"]["sdpa"]["num_compared"] == found["judged"]["eager"]["num_compared"] > 30
        assert "code 7" in found["judged"][dying]["reason"]
        assert [each["attention"] for each in found["timed"]] == ["sdpa", "eager"]
        assert found["timed"][1]["ratio"] > 0

    def test_the_answer_names_the_layer(self, config, tmp_path):
        wrong = planted(tmp_path, "    scores = scores * 1.1")
        result = invoke("model", config, "--attention", wrong, "--seq-len", "16", "--budget", "0", "--no-gradients")
        assert result.exit_code == 1, result.output
        assert "WRONG, first at model.layers.0.self_attn (whole batch): off by" in " ".join(result.output.split())
        assert "LlamaForCausalLM, 2 of 2 layers" in result.output

    def test_a_file_that_is_none_is_wrong_usage(self, tmp_path):
        (tmp_path / "config.json").write_text("{}", encoding="utf-8")
        result = invoke("model", str(tmp_path / "config.json"), "--budget", "0")
        assert "transformers cannot read" in str(result.exception)
        assert "none.json does not exist" in str(invoke("model", str(tmp_path / "none.json")).exception)


def test_a_models_mask_and_bias_are_joined_and_no_text_names_them():
    query, visible = torch.zeros(1, 2, 5, 5), torch.ones(1, 1, 5, 5, dtype=torch.bool)
    call = in_model.call_of(nn.Module(), query, query, query, visible, position_bias=query, is_causal=False)
    assert [part.name for part in call.rule.parts] == ["given", ""]
    assert not {"given", ""} & set(masks())
    calls = [in_model.call_of(nn.Module(), query, query, query, softcap=12.5, is_causal=each) for each in (True, False)]
    assert float(calls[1].rule.transform(torch.tensor(50.0))) == pytest.approx(12.5 * 0.9993293)
    assert calls[1].rule.arguments == (12.5,)  # which a function with a parameter softcap is passed
    candidate = in_model.Candidate("sdpa")
    assert [candidate.bound(call).rule.hides for call in calls] == [True, False]


def test_a_model_may_pass_its_mask_by_name_or_none():
    query, key, value = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    by_name, _ = in_model.reference_attention(oracle.attend)(
        nn.Module(), query, key, value, attention_mask=None, is_causal=False
    )
    by_position, _ = in_model.reference_attention(oracle.attend)(nn.Module(), query, key, value, None)
    torch.testing.assert_close(by_name, by_position)
