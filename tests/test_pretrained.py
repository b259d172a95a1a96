import json
import math
import os
import resource

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from model import GPT, AttentionConfig, ModelConfig
from model.families import FAMILIES, ORIGINAL, family_of, read_rotary, write_rotary
from model.pretrained import (
    check_pretrained,
    export_pretrained,
    load_pretrained,
    named_parts,
    read_pretrained_config,
)
from model.rope import RotaryConfig, frequencies
from tests.accuracy import assert_within_rule
from train.lora import LoraConfig, add_adapters

REFERENCE = AttentionConfig(implementation="reference")
ROTARY_SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}
GPT2_SIZES = {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
KINDS = {
    "gpt2": (transformers.GPT2Config, GPT2_SIZES),
    "gpt2_untied": (transformers.GPT2Config, {**GPT2_SIZES, "n_inner": 40, "tie_word_embeddings": False}),
    "llama2": (transformers.LlamaConfig, ROTARY_SIZES),
    "llama3": (transformers.LlamaConfig, {**ROTARY_SIZES, "rope_parameters": LLAMA3}),
    "smollm": (transformers.LlamaConfig, {**ROTARY_SIZES, "tie_word_embeddings": True}),
    "llama_with_biases": (
        transformers.LlamaConfig,
        {**ROTARY_SIZES, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2.5": (transformers.Qwen2Config, {**ROTARY_SIZES, "tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {**ROTARY_SIZES, "head_dim": 16, "rope_parameters": YARN}),
}


def theirs(kind: str, dtype: torch.dtype = torch.float32):
    """A small model of transformers, all of whose tensors are random: zeros and ones would hide mistakes."""
    make_config, values = KINDS[kind]
    model = transformers.AutoModelForCausalLM.from_config(make_config(**values), attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
    return model.to(dtype).eval()


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def folder(kind, tmp_path):
    theirs(kind).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def logits_and_gradients(model, tokens, named):
    output = model(tokens)
    logits = getattr(output, "logits", output)
    targets = tokens.roll(-1, 1).flatten()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets).backward()
    return {"logits": logits.detach()} | named(model)


def test_logits_and_gradients_are_as_accurate_as_those_of_transformers(kind, folder):
    tokens = torch.randint(100, (2, 33))
    ours = load_pretrained(folder, REFERENCE)
    family = FAMILIES[family_of(ours.config)]

    def their_gradients(model):
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    def our_gradients(model):
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        return dict(named_parts(gradients, family, model.config))

    same_dtype, truth = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        for dtype in (torch.float32, torch.float64)
    )
    actual = logits_and_gradients(ours, tokens, our_gradients)
    expected = logits_and_gradients(same_dtype, tokens, their_gradients)
    exact = logits_and_gradients(truth, tokens, their_gradients)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert_within_rule(name, value, expected[name], exact[name])


def test_all_values_of_a_model_are_loaded_and_none_is_drawn(
    folder, fresh_memory_is_nan, no_weights_are_drawn
):
    ours = load_pretrained(folder, REFERENCE)
    assert all(tensor.isfinite().all() for tensor in ours.parameters())
    assert ours.padding_bias[: ours.config.vocab_size].eq(0).all()
    assert ours.padding_bias[ours.config.vocab_size :].eq(float("-inf")).all()
    assert ours(torch.randint(100, (1, 3))).isfinite().all()


def test_weights_are_on_the_cpu_under_another_default_device(folder):
    expected = load_pretrained(folder, REFERENCE).state_dict()
    with torch.device("meta"):
        ours = load_pretrained(folder, REFERENCE).state_dict()
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_weights_are_float32_under_another_default_dtype(folder, other_default_dtype):
    expected = load_pretrained(folder, REFERENCE).state_dict()
    with other_default_dtype():
        ours = load_pretrained(folder, REFERENCE).state_dict()
    assert {tensor.dtype for tensor in ours.values()} == {torch.float32}
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_changes_no_bit_and_transformers_loads_it(kind, tmp_path, dtype):
    theirs(kind, dtype).save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs", REFERENCE)
    export_pretrained(ours, tmp_path / "ours", dtype=dtype)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name

    original, again = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=dtype)
        for name in ("theirs", "ours")
    )
    tokens = torch.randint(100, (1, 20))
    assert torch.equal(again(tokens).logits, original(tokens).logits)
    assert read_pretrained_config(tmp_path / "ours") == ours.config


@pytest.mark.parametrize("kind", ["gpt2", "llama2"], indirect=True)
def test_sharded_weights_are_read_and_written(folder, tmp_path):
    ours = load_pretrained(folder, REFERENCE)
    export_pretrained(ours, tmp_path / "shards", max_shard_bytes=20_000)
    assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) > 2
    again = load_pretrained(tmp_path / "shards", REFERENCE)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "shards")


@pytest.mark.parametrize("kind", ["gpt2"], indirect=True)
def test_shards_are_filled_up_to_their_limit_and_their_index_counts_bytes(folder, tmp_path):
    export_pretrained(load_pretrained(folder, REFERENCE), tmp_path / "out", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = [load_file(path) for path in sorted((tmp_path / "out").glob("model-*-of-*.safetensors"))]
    sizes = [[tensor.nbytes for tensor in shard.values()] for shard in shards]
    # a tensor that is larger has a file of its own
    assert all(shard and (sum(shard) <= 20_000 or len(shard) == 1) for shard in sizes)
    assert any(len(shard) > 2 for shard in sizes)
    assert index["metadata"]["total_size"] == sum(map(sum, sizes))
    assert sorted(index["weight_map"]) == sorted(name for shard in shards for name in shard)
    # what just fits goes into one
    for less, names in ((0, ["model.safetensors"]), (1, ["model-00001-of-00002.safetensors"])):
        exact = tmp_path / f"exact{less}"
        given = {"max_shard_bytes": sum(map(sum, sizes)) - less}
        export_pretrained(load_pretrained(folder, REFERENCE), exact, **given)
        assert sorted(path.name for path in exact.glob("*.safetensors"))[:1] == names
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["dtype"] == settings["torch_dtype"] == "float32"
    with safe_open(tmp_path / "out" / index["weight_map"]["transformer.wte.weight"], "pt") as file:
        # without it older transformers refuse the file
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("kind", ["gpt2"], indirect=True)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000], ids=["one file", "several"])
@pytest.mark.parametrize("masked", [0o022, 0o027])
def test_who_may_read_the_other_files_of_an_export_may_read_its_weights(
    folder, masked, max_shard_bytes, tmp_path
):
    ours, before = load_pretrained(folder, REFERENCE), os.umask(masked)
    try:
        export_pretrained(ours, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o666 & ~masked}


def test_a_folder_that_transformers_has_saved_to_twice_is_read_as_transformers_does(tmp_path):
    # the first time in several files: of these the index stays
    theirs("llama2").save_pretrained(tmp_path, max_shard_size="20KB")
    newest = theirs("llama2")
    newest.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists()
    embedding = load_pretrained(tmp_path, REFERENCE).token_embedding.weight[: newest.config.vocab_size]
    assert torch.equal(embedding, newest.model.embed_tokens.weight)


@pytest.mark.parametrize("kind", ["gpt2"], indirect=True)
def test_the_names_of_the_published_gpt2_are_read(folder):
    # openai-community/gpt2: no prefix, and the causal mask among the weights
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64) for i in range(2)}
    expected = load_pretrained(folder, REFERENCE).state_dict()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name, tensor in load_pretrained(folder, REFERENCE).state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("kind", ["llama2"], indirect=True)
def test_wrong_tensors_are_refused_by_name(folder):
    tensors = load_file(folder / "model.safetensors")
    wrong = dict(tensors)
    wrong["model.layers.1.self_attn.k_proj.weight"] = torch.zeros(8, 32)
    save_file(wrong, folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"layers.1.self_attn.k_proj.weight must have shape \(16, 32\).*\(8, 32\)"
    ):
        load_pretrained(folder, REFERENCE)
    with pytest.raises(ValueError, match="k_proj.weight must have shape"):
        check_pretrained(folder)
    wrong = {name: tensor for name, tensor in tensors.items() if "layers.0.mlp.up_proj" not in name}
    save_file({**wrong, "model.extra": torch.zeros(1)}, folder / "model.safetensors")
    message = "it lacks model.layers.0.mlp.up_proj.weight; it has surplus model.extra"
    with pytest.raises(ValueError, match=message):
        load_pretrained(folder, REFERENCE)


@pytest.mark.parametrize("kind", ["llama2"], indirect=True)
@pytest.mark.parametrize(
    ("size", "message"),
    [
        (
            10**12,
            r"embed_tokens.weight must have shape \(1000000000000, 32\), as config.json says, got \(100,",
        ),
        (2**60, "config.json: no model is as large .*: copy it again from its model"),
        (2**63, "config.json: vocab_size must be a whole number, got 9223372036854775808: copy it again"),
    ],
)
def test_a_size_that_no_memory_holds_is_refused_before_memory_is_asked_for(folder, size, message):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    for load in (check_pretrained, lambda folder: load_pretrained(folder, REFERENCE)):
        with pytest.raises(ValueError, match=message):
            load(folder)


@pytest.mark.parametrize("kind", ["qwen2.5"], indirect=True)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "architecture MambaForCausalLM is not supported: GPT2LMHead",
        ),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported: 'silu' is"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported: False is"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope' is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
    ],
)
def test_what_we_lack_is_refused_by_key(folder, changes, message):
    path = folder / "config.json"
    values = {
        name: value for name, value in (json.loads(path.read_text()) | changes).items() if value is not None
    }
    path.write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        load_pretrained(folder, REFERENCE)


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("GPT2LMHeadModel", "activation_function", "relu"),
        ("GPT2LMHeadModel", "scale_attn_weights", False),
        ("GPT2LMHeadModel", "scale_attn_by_inverse_layer_idx", True),
        ("GPT2LMHeadModel", "reorder_and_upcast_attn", True),
        ("GPT2LMHeadModel", "add_cross_attention", True),
        ("LlamaForCausalLM", "pretraining_tp", 2),
        ("Qwen2ForCausalLM", "use_sliding_window", True),
        ("Qwen3ForCausalLM", "use_sliding_window", True),
        ("Qwen3ForCausalLM", "attention_bias", True),
    ],
)
def test_what_would_make_another_model_is_refused_by_key(architecture, key, value):
    with pytest.raises(ValueError, match=f"^config.json: {key}={value!r} is not supported: .* is$"):
        FAMILIES[architecture].read_config({key: value})


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gpt2", {"n_head": 5}, "n_embd=32 must be a multiple of n_head=5: copy it again from its model"),
        ("gpt2", {"n_layer": 0}, "n_layer must be at least 1, got 0: copy it again from its model"),
        ("gpt2", {"num_attention_heads": 8}, "n_head=4 and num_attention_heads=8 differ: leave out the one"),
        ("llama3", {"num_key_value_heads": 3}, "num_attention_heads=4 must be a multiple of num_key_value_h"),
        ("llama3", {"rope_parameters": LLAMA3 | {"rope_theta": 0}}, "rope_theta must be at least 1 and fini"),
        ("qwen2.5", {"layer_types": ["sliding_attention"]}, "layer_types='sliding_attention' is not support"),
    ],
    indirect=["kind"],
)
def test_settings_that_contradict_each_other_are_refused_by_their_keys(folder, changes, message):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=f"^config.json: {message}"):
        read_pretrained_config(folder)


@pytest.mark.parametrize(("key", "value"), [("partial_rotary_factor", 0.5), ("truncate", False)])
def test_a_rotation_of_another_kind_is_refused_by_key(key, value):
    with pytest.raises(ValueError, match=f"{key}={value} is not supported: "):
        read_rotary({"rope_parameters": YARN | {key: value}})


def test_a_scaling_may_be_named_as_in_old_files():
    old = {"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 2.0}}
    rotary = read_rotary(old)
    assert (rotary.scaling, rotary.factor) == ("linear", 2.0)


def test_a_factor_of_attention_that_is_written_goes_before_one_of_two_scales_and_one_scale_makes_none():
    scales = {"mscale": 0.7, "mscale_all_dim": 1.4}
    plain = {key: value for key, value in YARN.items() if key not in {*scales, "attention_factor"}}
    by_scales, written, one = (
        read_rotary(ROTARY_SIZES | {"rope_parameters": plain | more}).attention_factor
        for more in (scales, {**scales, "attention_factor": 1.25}, {"mscale": 0.7})
    )
    log = math.log(YARN["factor"])
    assert by_scales == pytest.approx((0.07 * log + 1) / (0.14 * log + 1))
    assert written == 1.25
    assert one == read_rotary(ROTARY_SIZES | {"rope_parameters": plain}).attention_factor


ROTARY = RotaryConfig(base=1e4)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"qk_norm": True}, "GPT2LMHeadModel needs model.qk_norm=False, it is True"),
        ({"n_kv_head": 2}, "GPT2LMHeadModel needs model.n_kv_head=4, it is 2"),
        ({"mlp": "swiglu"}, "GPT2LMHeadModel needs model.mlp=gelu, it is swiglu"),
        (
            {"rotary": ROTARY, "norm": "layer"},
            "LlamaForCausalLM needs model.norm=rms, it is layer",
        ),
        (
            {"rotary": ROTARY, "norm": "rms", "mlp": "gelu"},
            "needs model.mlp=swiglu, it is gelu",
        ),
        (
            {
                "rotary": ROTARY,
                "norm": "rms",
                "mlp": "swiglu",
                "qk_norm": True,
                "bias": "qkv",
            },
            "Qwen3ForCausalLM needs model.bias=none, it is qkv",
        ),
    ],
)
def test_a_model_that_no_family_holds_is_refused_by_what_does_not_fit(shape, message):
    sizes = {"n_layer": 1, "n_head": 4, "n_embd": 64, "vocab_size": 10, "max_seq_len": 8, "dropout": 0.0}
    with pytest.raises(ValueError, match=message):
        family_of(ModelConfig(**sizes, **shape))


@pytest.mark.parametrize("kind", ["gpt2", "llama2", "qwen2.5", "qwen3"], indirect=True)
def test_a_model_that_sees_what_follows_is_refused(folder):
    path = folder / "config.json"
    causal = json.loads(path.read_text())
    for read in (load_pretrained, lambda folder, _: check_pretrained(folder)):
        path.write_text(json.dumps(causal | {"is_causal": False}))
        with pytest.raises(ValueError, match="is_causal=False is not supported: True is"):
            read(folder, REFERENCE)
        path.write_text(json.dumps(causal | {"is_causal": True}))
        read(folder, REFERENCE)


@pytest.mark.parametrize(
    "scaling",
    [
        {},
        {"rope_type": "linear", "factor": 2.0},
        {key: value for key, value in YARN.items() if key != "rope_theta"},
        {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
    ],
    ids=["default", "linear", "yarn", "llama3"],
)
def test_what_a_scaling_of_theirs_does_not_read_changes_nothing(scaling):
    published = {"rope_theta": 1e6, "max_position_embeddings": 64, "rope_scaling": scaling}
    idle = {"factor": 8.0, "beta_fast": 16.0, "low_freq_factor": 2.0, "mscale": 0.7, "mscale_all_dim": 0.7}
    own = {"yarn": ("beta_fast", "mscale", "mscale_all_dim"), "llama3": ("low_freq_factor",)}
    for name in own.get(scaling.get("rope_type"), ()):
        del idle[name]
    more = {**published, "rope_scaling": idle | scaling}
    assert read_rotary(more) == read_rotary(published)


@pytest.mark.parametrize("kind", ["gpt2", "smollm"], indirect=True)
def test_a_head_that_config_json_ties_must_be_the_embedding(folder):
    tensors = load_file(folder / "model.safetensors")
    embedding = next(tensor for name, tensor in tensors.items() if "wte" in name or "embed" in name)
    save_file(tensors | {"lm_head.weight": embedding.clone()}, folder / "model.safetensors")
    load_pretrained(folder, REFERENCE)
    save_file(tensors | {"lm_head.weight": embedding + 1}, folder / "model.safetensors")
    message = "lm_head.weight is not the embedding, .*: set tie_word_embeddings to false"
    with pytest.raises(ValueError, match=message):
        load_pretrained(folder, REFERENCE)


@pytest.mark.parametrize("scaling", [YARN, LLAMA3], ids=["yarn", "llama3"])
def test_a_longest_sequence_beside_the_scaling_goes_before_the_one_in_it(scaling):
    published = {**ROTARY_SIZES, "rope_parameters": scaling, "original_max_position_embeddings": 24}
    rotary = read_rotary(published)
    assert rotary.original_seq_len == 24 != scaling["original_max_position_embeddings"]
    # transformers writes into the scaling that it is given
    theirs = transformers.LlamaConfig(**published | {"rope_parameters": dict(scaling)})
    torch.testing.assert_close(frequencies(rotary, 8)[0].float(), LlamaRotaryEmbedding(theirs).inv_freq)


def test_linear_scaling_has_its_longest_original_sequence_only_where_it_is_written():
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    assert read_rotary({**ROTARY_SIZES, "rope_parameters": rope}).original_seq_len is None
    known = {ORIGINAL: 16}
    for published in ({"rope_parameters": rope, **known}, {"rope_parameters": rope | known}):
        rotary = read_rotary(ROTARY_SIZES | published)
        assert rotary.original_seq_len == 16
        written = write_rotary(rotary, 8)
        assert read_rotary(ROTARY_SIZES | written) == rotary
        # transformers would warn of it there
        assert ORIGINAL not in written["rope_scaling"]


def test_two_scalings_that_differ_are_refused():
    plain = {"rope_type": "default", "rope_theta": 1e6}
    with pytest.raises(ValueError, match="rope_scaling and rope_parameters differ: put all into rope_param"):
        read_rotary({**ROTARY_SIZES, "rope_parameters": plain, "rope_scaling": YARN})
    # as written for old and new versions of transformers at once
    old = {key: value for key, value in YARN.items() if key != "rope_theta"}
    both = {"rope_theta": 1e6, "rope_parameters": YARN, "rope_scaling": old}
    assert read_rotary(both) == read_rotary({"rope_parameters": YARN})


@pytest.mark.parametrize("kind", ["gpt2"], indirect=True)
def test_folders_without_a_model_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="config.json: no such file"):
        load_pretrained(tmp_path, REFERENCE)
    (folder / "model.safetensors").write_bytes(b"none")
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        load_pretrained(folder, REFERENCE)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds neither model.safetensors nor model.safetensors.index.json"):
        load_pretrained(folder, REFERENCE)


@pytest.mark.parametrize("kind", ["llama3"], indirect=True)
def test_weights_that_were_cut_short_are_found_before_they_are_read(folder):
    check_pretrained(folder)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])
    with pytest.raises(
        ValueError, match="is not a readable safetensors file .*: copy it again from its model"
    ):
        check_pretrained(folder)


@pytest.mark.parametrize("kind", ["gpt2"], indirect=True)
def test_json_that_is_damaged_or_wrong_is_named_with_its_file(folder, tmp_path):
    export_pretrained(load_pretrained(folder, REFERENCE), tmp_path / "out", max_shard_bytes=20_000)
    index = tmp_path / "out" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = content["weight_map"]
    files["transformer.wpe.weight"] = next(
        file for file in files.values() if file != files["transformer.wpe.weight"]
    )
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="lacks wpe.weight, which model.safetensors.index.json"):
        load_pretrained(tmp_path / "out", REFERENCE)
    for name in ("model.safetensors.index.json", "config.json"):
        (tmp_path / "out" / name).write_text("{")
        with pytest.raises(ValueError, match=f"{name} is not JSON"):
            load_pretrained(tmp_path / "out", REFERENCE)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gpt2", {"n_layer": None}, "n_layer must be a whole number, got None"),
        ("gpt2", {"n_layer": "1"}, "n_layer must be a whole number, got '1'"),
        ("gpt2", {"n_layer": True}, "n_layer must be a whole number, got True"),
        ("gpt2", {"n_head": 2.0}, r"n_head must be a whole number, got 2\.0"),
        ("gpt2", {"n_inner": "wide"}, "n_inner must be a whole number or null, got 'wide'"),
        ("gpt2", {"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon must be a number, got '1e-5'"),
        ("gpt2", {"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ("gpt2", {"tie_word_embeddings": 0}, "tie_word_embeddings must be true or false, got 0"),
        ("gpt2", {"architectures": 3}, "architecture 3 is not supported"),
        ("gpt2", {"architectures": [["a"]]}, r"architecture \['a'\] is not supported"),
        ("llama3", {"rope_parameters": [1]}, r"rope_parameters must be an object or null, got \[1\]"),
        ("llama3", {"rope_parameters": LLAMA3 | {"factor": "8"}}, "rope_parameters.factor must be a number"),
        (
            "llama3",
            {"rope_parameters": LLAMA3 | {"factor": 10**400}},
            "no model has such a value .int too large to convert to float.: copy it again",
        ),
    ],
    indirect=["kind"],
)
def test_a_value_of_another_type_is_refused_by_file_and_key(folder, changes, message):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    for read in (read_pretrained_config, check_pretrained):
        with pytest.raises(ValueError, match=f"^{path}: {message}"):
            read(folder)


@pytest.mark.parametrize("rope_type", ["linear", "yarn", "llama3"])
def test_null_is_refused_by_key_and_way_out_where_a_number_is_read(rope_type):
    scaling = {**YARN, "rope_type": rope_type}
    assert read_rotary({"rope_parameters": {**scaling, "rope_type": "default", "factor": None}}).factor == 1.0
    for key, way_out in (
        ("factor", f"rope_type='{rope_type}' needs how many times longer than in pretraining"),
        ("rope_theta", "write the model's, or leave it out for 10000"),
    ):
        with pytest.raises(ValueError, match=f"config.json: {key} must be a number, got None: {way_out}"):
            read_rotary({"rope_parameters": scaling | {key: None}})
    with pytest.raises(ValueError, match="config.json: rope_theta must be a number, got None: write the"):
        read_rotary({"rope_theta": None})


@pytest.mark.parametrize("kind", ["gpt2"], indirect=True)
def test_json_of_another_kind_is_named_with_its_file(folder, tmp_path):
    export_pretrained(load_pretrained(folder, REFERENCE), tmp_path / "out", max_shard_bytes=20_000)
    for text in ("{}", '{"weight_map": []}', '{"weight_map": {"transformer.wpe.weight": 3}}'):
        (tmp_path / "out" / "model.safetensors.index.json").write_text(text)
        with pytest.raises(
            ValueError, match=r"index\.json has no weight_map of names.*: copy it again from its"
        ):
            check_pretrained(tmp_path / "out")
    for name in ("model.safetensors.index.json", "config.json"):
        (tmp_path / "out" / name).write_text("[]")
        with pytest.raises(ValueError, match=f"out/{name} must hold an object, got list: copy it again"):
            check_pretrained(tmp_path / "out")


@pytest.mark.parametrize("kind", ["llama2"], indirect=True)
def test_export_overwrites_nothing_and_names_what_fits_no_family(folder, tmp_path):
    ours = load_pretrained(folder, REFERENCE)
    with pytest.raises(ValueError, match="is not empty: choose a new folder"):
        export_pretrained(ours, folder)
    ours.config.mlp = "gelu"
    with pytest.raises(ValueError, match="LlamaForCausalLM needs model.mlp=swiglu, it is gelu"):
        export_pretrained(GPT(ours.config, REFERENCE), tmp_path / "new")


def test_heads_that_do_not_add_up_to_the_channels_fit_no_gpt2():
    size = {"n_layer": 1, "vocab_size": 64, "max_seq_len": 8, "dropout": 0.0}
    assert family_of(ModelConfig(n_head=3, n_embd=99, head_dim=33, **size)) == "GPT2LMHeadModel"
    with pytest.raises(ValueError, match="GPT2LMHeadModel needs model.n_embd=99, it is 100"):
        family_of(ModelConfig(n_head=3, n_embd=100, head_dim=33, **size))


def test_channels_that_no_heads_divide_are_refused_for_llama_alone(tmp_path):
    size = {"n_layer": 1, "n_head": 3, "n_embd": 32, "head_dim": 16, "vocab_size": 64, "max_seq_len": 8}
    kind = {"dropout": 0.0, "rotary": {"base": 1e4}, "norm": "rms", "mlp": "swiglu"}
    with pytest.raises(ValueError, match="Llama.* model.n_embd to be a multiple of model.n_head=3, it is 32"):
        family_of(ModelConfig(**size, **kind, bias="none"))
    for out, options in (("qwen2", {"bias": "qkv"}), ("qwen3", {"bias": "none", "qk_norm": True})):
        model, tokens = GPT(ModelConfig(**size, **kind, **options), REFERENCE), torch.arange(8)[None]
        export_pretrained(model, tmp_path / out)
        read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / out)
        torch.testing.assert_close(read(tokens).logits, model(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2"], indirect=True)
@pytest.mark.parametrize(
    ("max_shard_bytes", "room"),
    [(10**9, 1000), (1, 14_000), (10**9, 300_000)],
    ids=["weights", "a later shard", "config.json"],
)
def test_an_export_that_a_full_disk_ends_names_its_folder_and_leaves_nothing(
    folder, tmp_path, max_shard_bytes, room
):
    ours, ids = load_pretrained(folder, REFERENCE), {"eos_token_id": [0] * 100_000}
    (tmp_path / "mine").mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for out in (tmp_path / "new" / "folder", tmp_path / "mine"):
        # no file can be longer: the write that would fails like one to a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            with pytest.raises(OSError, match=rf"{out} was not written \(.*File too large.*\): make room"):
                export_pretrained(ours, out, token_ids=ids, max_shard_bytes=max_shard_bytes)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "new").exists()
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize("kind", ["gpt2"], indirect=True)
def test_other_files_of_an_export_may_lie_in_folders_which_go_with_it_if_it_fails(folder, tmp_path):
    ours = load_pretrained(folder, REFERENCE)
    export_pretrained(ours, tmp_path / "out", files={"a/b/c.txt": b"x"})
    assert (tmp_path / "out" / "a" / "b" / "c.txt").read_bytes() == b"x"
    # a folder cannot be written to as a file
    with pytest.raises(OSError, match="was not written"):
        export_pretrained(ours, tmp_path / "new", files={"a/b/c.txt": b"x", "a/b": b"x"})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["gpt2"], indirect=True)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"files": {"a.txt": "x"}}, r"files: a.txt must be bytes, got str: call .encode\(\)"),
        ({"token_ids": {"eos_token_id": b"x"}}, "token_ids must be what JSON holds, got .*eos_token_id"),
        ({"dtype": torch.int8}, "dtype must be floating-point, got torch.int8"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_anything_is_written(folder, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        export_pretrained(load_pretrained(folder, REFERENCE), tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["gpt2"], indirect=True)
def test_a_model_with_adapters_is_not_exported_before_they_are_merged(folder, tmp_path):
    ours = load_pretrained(folder, REFERENCE)
    add_adapters(ours, LoraConfig(rank=2, alpha=1.0, embeddings_and_norms=False))
    with pytest.raises(ValueError, match="has no blocks.0.attention.qkv.weight: if it has adapters, merge"):
        export_pretrained(ours, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_two_mscales_give_the_attention_factor_of_transformers():
    published = {**ROTARY_SIZES, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}
    _, factor = frequencies(read_rotary(published), 8)
    known = LlamaRotaryEmbedding(transformers.LlamaConfig(**published)).attention_scaling
    assert factor == pytest.approx(known, rel=1e-12)
    assert factor > 1.01


@pytest.mark.parametrize("family", FAMILIES)
def test_what_config_json_leaves_out_is_as_in_transformers(family):
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    sizes |= {"vocab_size": 90, "max_position_embeddings": 32}
    if family == "GPT2LMHeadModel":
        sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 90, "n_positions": 32}
    ours = FAMILIES[family].read_config(sizes)
    theirs = getattr(transformers, family).config_class(**sizes)
    assert ours.tied_head == theirs.tie_word_embeddings
    if family == "GPT2LMHeadModel":
        assert ours.norm_eps == theirs.layer_norm_epsilon
        return
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 64)
    assert ours.rotary.base == theirs.rope_parameters["rope_theta"]
