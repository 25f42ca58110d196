"""Presets and Hugging Face configurations: their layers as workloads in every phase, with the number of each."""

import json
import re
from pathlib import Path

import pytest

from attnbench.workloads import huggingface, models
from attnbench.workloads.workload import Workload

EVERY = models.names()


def parts(name, phase, **settings):
    """Return the label and (count, workload) of its layers, for each point."""
    given = {axis: [str(value)] for axis, value in settings.items()}
    return {label: [*found.values()] for label, found in models.attention(huggingface.load(name), phase, given)}


@pytest.mark.parametrize("name", EVERY)
def test_every_preset_cites_its_source_and_has_workloads_in_its_phases(name):
    model = models.preset(name)
    assert re.match(r"https://(github\.com|arxiv\.org)/\S+", model.source)
    assert model.summary
    assert model.phases
    for phase in model.phases:
        workloads = models.workloads(model, phase, {})
        labels = [label for label, _ in models.attention(model, phase, {})]
        trained = {workload.direction == "forward_backward" for workload in workloads}
        assert trained == {phase == "training"}
        assert len({*labels}) == len(labels)
        for workload in workloads:
            assert phase != "decode" or workload.seq_len == 1


def test_a_plain_decoder():
    (point,) = parts("llama-3.1-8b", "prefill", seq_len=2048).values()
    assert point == [
        (32, Workload(seq_len=2048, num_heads=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", mask="causal",
                      direction="inference"))
    ]  # fmt: skip
    assert list(parts("llama-3.1-8b", "prefill")) == ["prefill B=1 T=512", "prefill B=1 T=2048", "prefill B=1 T=8192"]
    decoded = parts("llama-3.1-8b", "decode")
    assert len(decoded) == 6
    ((count, workload),) = decoded["decode B=32 T=1 S=8192"]
    assert (count, workload.mask, workload.kv_len, workload.batch_size) == (32, "none", 8192, 32)
    ((_, trained),) = parts("llama-3.1-8b", "training")["training B=1 T=8192"]
    assert (trained.direction, trained.seq_len) == ("forward_backward", 8192)


@pytest.mark.parametrize(
    ("name", "label", "expected"),
    [
        ("gemma-3-27b", "prefill B=1 T=2048", ["52 sliding_window(1024)", "10 causal"]),
        ("gemma-3-27b", "prefill B=1 T=512", ["62 causal"]),
        ("gemma-3-1b", "decode B=1 T=1 S=1024", ["22 sliding_window_bottom_right(512)", "4 none"]),
        ("llama-4-scout", "decode B=1 T=1 S=32768", ["36 chunks_bottom_right(8192)", "12 none"]),
        ("llama-4-scout", "prefill B=1 T=16384", ["36 causal+chunks(8192)", "12 causal"]),
        ("gemma-2-27b", "prefill B=1 T=8192", ["23 sliding_window(4096)+softcap(50)", "23 causal+softcap(50)"]),
    ],
)
def test_layers_with_a_window_or_chunks_are_apart_where_these_hide_something(name, label, expected):
    lengths = {"seq_len": label.partition("T=")[2]} if label.startswith("prefill") else {}
    layers = parts(name, label.partition(" ")[0], **lengths)[label]
    assert [f"{count} {each.mask}" for count, each in layers] == expected


def test_what_models_add_to_plain_attention():
    ((_, capped), _) = parts("gemma-2-27b", "prefill", seq_len=8192)["prefill B=1 T=8192"]
    assert capped.scale == 144**-0.5
    ((_, latent),) = parts("deepseek-v3", "decode")["decode B=1 T=1 S=8192"]
    assert (latent.num_kv_heads, latent.head_dim, latent.value_dim, latent.layout) == (1, 576, 512, "value_in_key")
    assert latent.scale == pytest.approx(0.1352338, rel=1e-6)
    assert {each.sinks for _, each in parts("gpt-oss-120b", "prefill", seq_len=512)["prefill B=1 T=512"]} == {"learned"}
    images = [(count, each.batch_size, each.mask) for count, each in next(iter(parts("sam-h", "prefill").values()))]
    assert images == [(28, 25, "additive"), (4, 1, "additive")]
    cross = [
        (count, each.seq_len, each.kv_len, each.head_dim)
        for count, each in next(iter(parts("sd-1.5", "prefill").values()))
    ]
    assert (5, 4096, 77, 40) in cross
    assert sum(count for count, *_ in cross) == 32
    ((_, relative),) = parts("t5-small", "prefill").popitem()[1]
    assert (relative.scale, relative.mask) == (1.0, "relative_buckets(32,128)")
    (_, local), (_, whole) = parts("modernbert", "prefill").popitem()[1]
    assert (local.mask, whole.mask) == ("window(64,64)", "none")


def test_settings_take_the_place_of_what_a_model_has():
    made = parts("smollm2-135m", "prefill", seq_len=64, dtype="float32", batch_size=4)
    ((_, workload),) = made["prefill B=4 T=64"]
    assert (workload.dtype, workload.batch_size, workload.seq_len) == ("float32", 4, 64)
    with pytest.raises(ValueError, match="bert-base has no phase decode: choose among prefill, training"):
        parts("bert-base", "decode")
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


FIELDS = {"num_hidden_layers": 6, "num_attention_heads": 8, "hidden_size": 512, "max_position_embeddings": 4096}


def test_a_configuration_is_read_without_transformers(configuration):
    path = configuration(
        **FIELDS,
        model_type="gemma3_text",
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=30.0,
        sliding_window=128,
        layer_types=["sliding_attention"] * 4 + ["full_attention"] * 2,
        dtype="float16",
    )
    model = huggingface.load(path)
    assert (model.name, model.context, model.kind, model.dtype) == ("some-model", 4096, "decoder", "float16")
    local, full = parts(path, "prefill", seq_len=1024)["prefill B=1 T=1024"]
    assert [count for count, _ in (local, full)] == [4, 2]
    assert local[1].mask == "sliding_window(128)+softcap(30)"
    assert (full[1].num_heads, full[1].num_kv_heads, full[1].head_dim, full[1].scale) == (8, 2, 32, 0.25)
    assert huggingface.load(str(Path(path).parent)) == model


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"model_type": "strange"},
            r"\(strange\) does not say its heads \(num_attention_heads, n_head, .*\); layers \(num_hidden",
        ),
        (
            {"model_type": "x", "num_attention_heads": 4},
            r"layers \(num_hidden_layers, .*head width \(head_dim, .*hidden_size",
        ),
        (FIELDS | {"layer_types": ["linear_attention"] * 6}, "layers of the kind linear_attention are not known"),
        (FIELDS | {"is_encoder_decoder": True}, "an encoder with a decoder: of these there are presets alone"),
    ],
)
def test_what_is_not_known_says_which_fields_were_looked_for(configuration, fields, message):
    with pytest.raises(ValueError, match=message):
        huggingface.load(configuration(**fields))


def test_a_file_that_is_no_configuration(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the configuration .*: No such file"):
        huggingface.load(str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(ValueError, match="is no configuration"):
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
        of_preset = parts(preset, phase)
        assert {label: sorted(each, key=str) for label, each in parts(str(tmp_path), phase, dtype=dtype).items()} == {
            label: sorted(each, key=str) for label, each in of_preset.items()
        }


def test_there_are_the_presets_of_26_families_and_all_have_text_in_the_list():
    assert len(EVERY) == 29
    assert {"llama-3.1-8b", "gpt-oss-120b", "deepseek-v3", "sam-h", "sd-1.5", "whisper-large", "t5-small"} <= set(EVERY)
    assert models.summarised(models.preset("gemma-3-27b")) == "62 x 32/16/128"
