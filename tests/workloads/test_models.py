"""Presets and Hugging Face configurations: their layers as workloads in every phase."""

import json
import re
from pathlib import Path

import pytest

from attnbench.units import grouped
from attnbench.workloads import huggingface, models
from attnbench.workloads.workload import Workload

EVERY = models.names()


def made(name, phase, **settings):
    """Return the workloads of a model in a phase, a list for each batch and lengths of a call."""
    given = {axis: [str(value)] for axis, value in settings.items()}
    workloads = models.workloads(huggingface.load(name), phase, given)
    return grouped(workloads, lambda each: (each.batch_size, each.seq_len, each.kv_len))


@pytest.mark.parametrize("name", EVERY)
def test_every_preset_cites_its_source_and_has_workloads_in_its_phases(name):
    model = models.preset(name)
    assert re.match(r"https://(github\.com|arxiv\.org)/\S+", model.source)
    assert model.summary
    assert model.phases
    for phase in model.phases:
        workloads = models.workloads(model, phase, {})
        trained = {workload.direction == "forward_backward" for workload in workloads}
        assert trained == {phase == "training"}
        assert len({*workloads}) == len(workloads)
        for workload in workloads:
            assert phase != "decode" or workload.seq_len == 1


def test_a_plain_decoder():
    ((point,),) = made("llama-3.1-8b", "prefill", seq_len=2048).values()
    assert point == Workload(
        seq_len=2048, num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", mask="causal", direction="inference"
    )
    assert list(made("llama-3.1-8b", "prefill")) == [(1, length, length) for length in (512, 2048, 8192)]
    decoded = made("llama-3.1-8b", "decode")
    assert len(decoded) == 6
    assert [each.mask for each in decoded[32, 1, 8192]] == ["none"]
    ((trained,),) = made("llama-3.1-8b", "training").values()
    assert (trained.direction, trained.seq_len) == ("forward_backward", 8192)


@pytest.mark.parametrize(
    ("name", "phase", "key_len", "expected"),
    [
        ("gemma-3-27b", "prefill", 2048, ["sliding_window(1024)", "causal"]),
        ("gemma-3-27b", "prefill", 512, ["causal"]),
        ("gemma-3-1b", "decode", 1024, ["sliding_window_bottom_right(512)", "none"]),
        ("llama-4-scout", "decode", 32768, ["chunks_bottom_right(8192)", "none"]),
        ("llama-4-scout", "prefill", 16384, ["causal+chunks(8192)", "causal"]),
        ("gemma-2-27b", "prefill", 8192, ["sliding_window(4096)+softcap(50)", "causal+softcap(50)"]),
    ],
)
def test_layers_with_a_window_or_chunks_are_apart_where_these_hide_something(name, phase, key_len, expected):
    lengths = {"seq_len": key_len} if phase == "prefill" else {}
    layers = made(name, phase, **lengths)[1, key_len if phase == "prefill" else 1, key_len]
    assert [each.mask for each in layers] == expected


def test_what_models_add_to_plain_attention():
    capped, _ = made("gemma-2-27b", "prefill", seq_len=8192)[1, 8192, 8192]
    assert capped.scale == 144**-0.5
    (latent,) = made("deepseek-v3", "decode")[1, 1, 8192]
    assert (latent.num_kv_heads, latent.head_dim, latent.value_dim, latent.layout) == (1, 576, 512, "value_in_key")
    assert latent.scale == pytest.approx(0.1352338, rel=1e-6)
    assert {each.sinks for each in made("gpt-oss-120b", "prefill", seq_len=512)[1, 512, 512]} == {"learned"}
    images = models.workloads(models.preset("sam-h"), "prefill", {})
    assert [(each.batch_size, each.mask) for each in images] == [(25, "additive"), (1, "additive")]
    cross = models.workloads(models.preset("sd-1.5"), "prefill", {})
    assert (4096, 77, 40) in {(each.seq_len, each.kv_len, each.head_dim) for each in cross}
    ((relative,),) = made("t5-small", "prefill").values()
    assert (relative.scale, relative.mask) == (1.0, "relative_buckets(32,128)")
    ((local, whole),) = made("modernbert", "prefill").values()
    assert (local.mask, whole.mask) == ("window(64,64)", "none")


def test_settings_take_the_place_of_what_a_model_has():
    ((workload,),) = made("smollm2-135m", "prefill", seq_len=64, dtype="float32", batch_size=4).values()
    assert (workload.dtype, workload.batch_size, workload.seq_len) == ("float32", 4, 64)
    with pytest.raises(ValueError, match="bert-base has no phase decode: choose among prefill, training"):
        made("bert-base", "decode")
    with pytest.raises(ValueError, match=r"model .?llama-3\.1-8\b.*llama-3\.1-8b"):
        huggingface.load("llama-3.1-8")


@pytest.fixture
def configuration(tmp_path, monkeypatch):
    """Write a configuration, to be read without transformers, and return its path."""
    monkeypatch.setattr(huggingface, "find_spec", lambda _: None)

    def written(**fields):
        place = tmp_path / "some-model"
        place.mkdir()
        (place / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        return str(place / "config.json")

    return written


FIELDS = {"num_attention_heads": 8, "hidden_size": 512, "max_position_embeddings": 4096}


def test_a_configuration_is_read_without_transformers(configuration):
    fields = FIELDS | {"model_type": "gemma3_text", "dtype": "float16", "num_key_value_heads": 2, "head_dim": 32}
    fields |= {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 30.0, "sliding_window": 128}
    path = configuration(**fields, layer_types=["sliding_attention"] * 4 + ["full_attention"] * 2)
    model = huggingface.load(path)
    assert (model.name, model.context, model.kind, model.dtype) == ("some-model", 4096, "decoder", "float16")
    ((local, full),) = made(path, "prefill", seq_len=1024).values()
    assert local.mask == "sliding_window(128)+softcap(30)"
    assert (full.num_heads, full.num_kv_heads, full.head_dim, full.scale) == (8, 2, 32, 0.25)
    assert huggingface.load(str(Path(path).parent)) == model


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "strange"},
            r"\(strange\) has no heads \(num_attention_heads, n_head, .*\) and no head width \(head_dim, .*hidden_size",
        ),
        ({"model_type": "x", "num_attention_heads": 4}, r"has no head width \(head_dim, .*hidden_size"),
        (FIELDS | {"layer_types": ["linear_attention"] * 6}, "layers of kind linear_attention cannot be measured"),
        (FIELDS | {"is_encoder_decoder": True}, "an encoder with a decoder: only presets have these"),
    ],
)
def test_what_is_not_known_says_which_fields_were_looked_for(configuration, fields, message):
    with pytest.raises(ValueError, match=message):
        huggingface.load(configuration(**fields))


def test_a_file_that_is_no_configuration(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the configuration .*: No such file"):
        huggingface.load(str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ValueError, match="is not a model's config"):
        huggingface.load(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("kind", "preset", "phases"),
    [
        ("Llama4TextConfig", "llama-4-scout", ("prefill", "decode", "training")),
        ("GptOssConfig", "gpt-oss-120b", ("prefill", "decode", "training")),
        ("ModernBertConfig", "modernbert", ("prefill",)),
        ("BertConfig", "bert-base", ("prefill", "training")),
        ("ViTConfig", "vit-b-16", ("prefill",)),
    ],
)
def test_the_defaults_of_transformers_are_the_presets(tmp_path, kind, preset, phases):
    """The package's default configuration of these architectures is that model: both ways give the same."""
    transformers = pytest.importorskip("transformers")
    getattr(transformers, kind)().save_pretrained(tmp_path)
    dtype = models.preset(preset).dtype
    for phase in phases:
        assert {*models.workloads(huggingface.load(str(tmp_path)), phase, {"dtype": [dtype]})} == {
            *models.workloads(models.preset(preset), phase, {})
        }


def test_there_are_the_presets_of_26_families_and_all_have_text_in_the_list():
    assert len(EVERY) == 29
    assert {"llama-3.1-8b", "gpt-oss-120b", "deepseek-v3", "sam-h", "sd-1.5", "whisper-large", "t5-small"} <= set(EVERY)
    assert models.summarised(models.preset("gemma-3-27b")) == "62 x 32/16/128"


REFUSED = {"gemma-2-9b": "softcap", "gemma-2-27b": "softcap", "llama-4-scout": "chunks"}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("batch", [{"batch": ["2q6_3q1kv9k"]}, {}])
def test_a_phase_of_a_decoder_may_have_pages_and_what_is_no_batch_is_refused(name, phase, batch):
    model = models.preset(name)
    settings = {**batch, "page_size": ["16"]}
    if phase not in model.phases:
        return
    reason = "encoder" if model.kind == "encoder" else REFUSED.get(name)
    if reason:
        with pytest.raises(ValueError, match=rf"^{name} cannot have a batch of requests: .*{reason}.*another model"):
            models.workloads(model, phase, settings)
        return
    made = models.workloads(model, phase, settings)
    windows = {layer.window for layer in model.layers if phase in layer.phases} - {0}
    assert all(each.requests and each.page_size == 16 for each in made)
    found = {each.window for each in made} - {0}
    assert found == windows if batch else found <= windows  # usual lengths may be shorter than a window


def test_a_window_as_long_as_every_request_is_left_out():
    made = models.workloads(models.preset("mistral-7b"), "decode", {"batch": ["16q1kv1k"]})
    assert [each.window for each in made] == [0]
