"""Other people's code on these kernels: Hugging Face models, and F.scaled_dot_product_attention."""

import sys
from copy import deepcopy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

import kernels.sdpa
from kernels import hugging_face
from kernels.hugging_face_masks import filled_slots, read_rules
from kernels.reference import attention_reference
from tests.accuracy import assert_as_accurate_as_torch, assert_within_rule, random_qkv

transformers = pytest.importorskip("transformers")

SMALL = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 32}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
GPT2 = {"n_layer": 1, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 32}
CONFIGS = {
    # of its own weights attention is a plain mean, and queries hardly matter
    "gpt2": lambda: transformers.GPT2Config(**GPT2, initializer_range=0.1),
    "llama": lambda: transformers.LlamaConfig(**SMALL, **HEADS),
    "qwen": lambda: transformers.Qwen3Config(**SMALL, **HEADS),
    "mistral with a window": lambda: transformers.MistralConfig(**SMALL, **HEADS, sliding_window=9),
    "gpt-oss with sinks": lambda: transformers.GptOssConfig(
        **SMALL | {"num_hidden_layers": 2},
        **HEADS,
        sliding_window=9,
        num_local_experts=2,
        num_experts_per_tok=2,
        experts_implementation="eager",
    ),
}


@pytest.mark.parametrize(
    ("padding", "dtype"),
    [
        ("none", torch.float32),
        ("none", torch.float16),
        ("left", torch.float16),
        ("right", torch.float32),
        ("packed", torch.float16),
    ],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_hugging_face_models_are_as_accurate_as_with_sdpa(name, padding, dtype, device):
    """Logits and all gradients by the one rule: sdpa in the same dtype, and in float64 as the truth.

    In place of sdpa, which has no sinks, eager where there are some.

    The gradients as one, each tensor next to 1: alone, a bias of a few numbers may be exact by luck in sdpa.
    """
    theirs = "eager" if "sinks" in name else "sdpa"
    if (theirs, padding) == ("eager", "packed"):
        pytest.skip("transformers' eager GPT-OSS lets packed texts see each other")
    hugging_face.register()
    tokens = torch.randint(32, (2, 40), device=device)
    inputs, real = {}, torch.ones(2, 40, dtype=torch.bool, device=device)
    if padding == "packed":
        inputs["position_ids"] = (
            torch.cat([torch.arange(15), torch.arange(25)])[None].expand(2, -1).to(device)
        )
        inputs["use_cache"] = False
    elif padding != "none":
        real[0, :7] = padding == "right"
        real[0, 33:] = padding == "left"
        inputs["attention_mask"] = real.long()
    results = []
    for implementation, computed in (("nanoflash", dtype), (theirs, dtype), (theirs, torch.float64)):
        torch.manual_seed(0)
        config = CONFIGS[name]()
        config._attn_implementation = implementation
        model = transformers.AutoModelForCausalLM.from_config(config).eval().to(device)
        # the weights that `dtype` has, in each
        model = model.to(dtype).to(computed)
        logits = model(tokens, **inputs).logits[real]
        logits.square().sum().backward()
        named = ((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
        results.append({"logits": logits.detach()} | dict(named))
    ours, _, truth = results
    assert ours.keys() == truth.keys()
    assert_within_rule("logits", *(x.pop("logits") for x in results))
    scales = {name: 2.0 ** -x.abs().max().log2().ceil() for name, x in truth.items()}
    joined = (torch.cat([(x[name] * scales[name]).flatten() for name in truth]) for x in results)
    assert_within_rule("gradients", *joined)


@pytest.mark.parametrize("n_target", [6, 24, 30])
@pytest.mark.parametrize("side", ["left", "right"])
def test_targets_see_all_of_the_source_and_none_of_its_padding(side, n_target, device):
    """Cross attention, and the encoder's own, in which padding sees the text too."""
    hugging_face.register()
    source, target = (torch.randint(32, (3, n), device=device) for n in (24, n_target))
    mask = torch.ones_like(source)
    mask[0, :8] = side == "right"
    mask[0, 16:] = side == "left"
    outputs = []
    for implementation in ("sdpa", "nanoflash"):
        torch.manual_seed(0)
        sides = {
            f"{part}_{key}": n
            for part in ("encoder", "decoder")
            for key, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
        }
        config = transformers.BartConfig(vocab_size=32, d_model=64, max_position_embeddings=32, **sides)
        config._attn_implementation = implementation
        model = transformers.AutoModel.from_config(config).eval().to(device)
        result = model(source, attention_mask=mask, decoder_input_ids=target)
        outputs.append((result.last_hidden_state, result.encoder_last_hidden_state))
    for theirs, ours in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_packed_texts_of_models_with_sinks_are_kept_apart(device):
    """A sink is of each text, as of those in a row of their own."""
    hugging_face.register()
    config = CONFIGS["gpt-oss with sinks"]()
    config._attn_implementation = "nanoflash"
    model = transformers.AutoModelForCausalLM.from_config(config).to(device)
    tokens = torch.randint(32, (1, 40), device=device)
    positions = torch.cat([torch.arange(15), torch.arange(25)])[None].to(device)
    packed = model(tokens, position_ids=positions, use_cache=False).logits
    alone = [model(part).logits for part in tokens.split([15, 25], dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1))


@pytest.mark.parametrize("find", [hugging_face.of_mask, hugging_face.of_text])
def test_hugging_face_masks_with_holes_or_of_other_lengths_are_refused(find):
    x = torch.zeros(1, 3, 1, 8)
    with pytest.raises(
        ValueError, match="one unbroken run .* got several in row 1: use attn_implementation='eager'"
    ):
        find(torch.tensor([[1, 1, 0], [1, 0, 1]]), x.expand(2, -1, -1, -1), x.expand(2, -1, -1, -1))
    with pytest.raises(ValueError, match=r"shape \(B, Tk\) = \(1, 3\), got \(1, 4\): .*='eager' for"):
        find(torch.ones(1, 4), x, x)


@pytest.mark.parametrize("given", ["position_ids", "attention_mask"])
def test_hugging_face_masks_are_read_once_for_all_layers(given, device, monkeypatch):
    """Each reading waits for the GPU."""
    hugging_face.register()
    readings, names = (
        [],
        {"position_ids": ("of_causal_positions", "of_documents"), "attention_mask": ("of_mask",)},
    )
    for name in names[given]:
        find = getattr(hugging_face, name)
        read = partial(lambda find, *of: readings.append(find(*of)) or readings[-1], find)
        monkeypatch.setattr(hugging_face, name, read)
    config = transformers.LlamaConfig(**SMALL | {"num_hidden_layers": 3}, **HEADS)
    config._attn_implementation = "nanoflash"
    model = transformers.AutoModelForCausalLM.from_config(config).to(device)
    tokens = torch.randint(32, (1, 20), device=device)
    values = torch.arange(20, device=device)[None] if given == "position_ids" else torch.ones_like(tokens)
    if given == "attention_mask":
        values[:, :3] = 0
    first = model(tokens, **{given: values}, use_cache=False).logits
    assert len(readings) == 1
    # the next pass reads again what has changed in place, also past PyTorch's count of versions
    values.data[:, 12:] = torch.arange(8, device=device) if given == "position_ids" else 0
    assert not torch.equal(model(tokens, **{given: values}, use_cache=False).logits, first)
    assert len(readings) == 2
    with torch.inference_mode():
        model(tokens, **{given: values}, use_cache=False)
    model(tokens, **{given: values}, use_cache=False).logits.sum().backward()


@pytest.mark.parametrize("n_padding", [0, 4])
@pytest.mark.parametrize("name", ["llama", "mistral with a window"])
def test_the_empty_slots_of_a_static_cache_are_left_out(name, n_padding, device):
    hugging_face.register()
    tokens = torch.randint(32, (2, 12), device=device)
    mask = torch.ones_like(tokens)
    mask[0, :n_padding] = 0
    generated, logits = [], []
    for implementation in ("eager", "nanoflash"):
        torch.manual_seed(0)
        config = CONFIGS[name]()
        config._attn_implementation = implementation
        model = transformers.AutoModelForCausalLM.from_config(config).eval().to(device)
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        with torch.no_grad():
            logits.append(model(tokens, attention_mask=mask, past_key_values=cache, use_cache=True).logits)
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
        generated.append(
            model.generate(tokens, attention_mask=mask, cache_implementation="static", **options)
        )
    real = mask.bool()
    torch.testing.assert_close(logits[1][real], logits[0][real], rtol=1e-4, atol=1e-5)
    assert torch.equal(*generated)


# layers of the second are given no positions
@pytest.mark.parametrize("name", ["llama", "bigcode"])
def test_the_empty_slots_of_a_static_cache_are_left_out_without_a_mask(name, device):
    config = CONFIGS["llama"]() if name == "llama" else transformers.GPTBigCodeConfig(**GPT2)
    tokens, logits = torch.randint(32, (2, 12), device=device), []
    for implementation in ("eager", "nanoflash"):
        model = hugging_face_model(config, implementation).to(device)
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        with torch.no_grad():
            steps = [model(part, past_key_values=cache, use_cache=True).logits for part in tokens.split(7, 1)]
        logits.append(torch.cat(steps, 1))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)


def test_keys_behind_the_last_position_are_refused_where_no_mask_leaves_them_out(device):
    q, k = (torch.zeros(1, 4, n, 16, device=device) for n in (12, 32))
    positions = torch.arange(12, device=device)[None]
    with pytest.raises(ValueError, match=r"end at 11, but there are 32 keys.*ones of shape \(B, 12\)"):
        hugging_face.attention_forward(
            torch.nn.Module(), q, k, k, None, is_causal=True, position_ids=positions
        )
    # a cache that grows is always full
    model = hugging_face_model(CONFIGS["llama"](), "nanoflash").to(device)
    tokens = torch.randint(32, (1, 12), device=device)
    grown = model(tokens, use_cache=True).past_key_values
    model(tokens[:, :1], past_key_values=grown, use_cache=True)


def test_empty_slots_that_cannot_be_counted_are_asked_for():
    from transformers import masking_utils as masks

    causal, both_ways = masks.causal_mask_function, masks.bidirectional_mask_function

    def filled(rule, q_offset, kv_offset=0):
        return filled_slots(rule, 1, 8, q_offset, kv_offset)

    assert filled(causal, 4) == filled(causal, torch.tensor(4)) == 5
    # of a window the cache holds the end
    assert filled(causal, 20, kv_offset=13) == 8
    assert filled(causal, 20, kv_offset=15) == 6
    # a text that is looked at is whole
    assert filled(both_ways, 4) == 8

    # caught inside, as in test_rules_that_a_compiler_cannot_look_at_are_refused_there
    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x, q_offset):
        # with as many queries as keys there are no slots, wherever the queries are counted
        assert filled_slots(causal, 8, 8, q_offset, 0) == 8
        try:
            return x, filled(causal, q_offset), filled(both_ways, q_offset), ""
        except ValueError as error:
            return x, 0, 0, str(error)

    assert compiled(torch.zeros(1), 4)[1:] == (5, 8, "")
    assert (
        "must be given with a static cache in torch.compile" in compiled(torch.zeros(1), torch.tensor(4))[3]
    )


def test_values_narrower_than_keys_are_attended_to(device):
    config = transformers.DeepseekV3Config(
        **SMALL | {"num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.3},
        q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
        first_k_dense_replace=1, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
    )  # fmt: skip
    tokens = torch.randint(32, (2, 24), device=device)
    with torch.no_grad():
        eager, ours = (
            hugging_face_model(config, x).to(device)(tokens).logits for x in ("eager", "nanoflash")
        )
    torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)


def test_hugging_face_sequences_are_kept_apart_by_their_lengths(device):
    q, k, v = (torch.randn(1, n, 40, 16, device=device) for n in (4, 2, 2))
    ids = torch.tensor([[0] * 10 + [1] * 30], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 10, 40], device=device)
    module = torch.nn.Module()
    out, _ = hugging_face.attention_forward(
        module, q, k, v, None, is_causal=False, cu_seq_lens_q=starts, cu_seq_lens_k=starts
    )
    expected = attention_reference(*(x.transpose(1, 2) for x in (q, k, v)), causal=False, document_ids=ids)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_mask": torch.ones(2, 1, 8, 8)}, r"\(B, Tk\) = \(2, 8\), got \(2, 1, 8, 8\)"),
        (
            {"attention_mask": torch.ones(2, 7)},
            r"^attention_mask must be as long as .*, got length 7 for 8 queries and 8 keys: pass one of",
        ),
        ({"cu_seq_lens_q": torch.tensor([0, 8])}, "cu_seq_lens_k must be given with cu_seq_lens_q, got None"),
        ({"cu_seq_lens_k": torch.tensor([0, 8])}, "cu_seq_lens_q must be given with cu_seq_lens_k, got None"),
        # of continuous batching
        ({"cache": object()}, "^cache is not supported by nanoflash: use attn_implementation='eager'"),
    ],
)
def test_what_hugging_face_does_not_pass_by_itself_is_named(given, message):
    x = torch.zeros(2, 1, 8, 16)
    arguments = {"attention_mask": None, "is_causal": True} | given
    with pytest.raises(ValueError, match=message):
        hugging_face.attention_forward(torch.nn.Module(), x, x, x, **arguments)


def test_hugging_face_models_are_deterministic_where_pytorch_is_asked_to_be(device, monkeypatch):
    asked = []

    def attention(q, k, v, deterministic, **options):
        asked.append(deterministic)
        return q, None

    monkeypatch.setattr(hugging_face, "flash_attention", attention)
    x = torch.zeros(1, 1, 8, 16, device=device)
    for wanted in (True, False):
        torch.use_deterministic_algorithms(wanted)
        hugging_face.attention_forward(torch.nn.Module(), x, x, x, None, is_causal=True)
    assert asked == [True, False]


def test_hugging_face_models_that_take_no_flash_attention_are_refused():
    """They would compute it by themselves, and see what follows: the causal mask is left to our kernels."""
    hugging_face.register()
    config = transformers.XGLMConfig(
        d_model=32, num_layers=1, attention_heads=2, vocab_size=32, ffn_dim=32, max_position_embeddings=64
    )
    config._attn_implementation = "nanoflash"
    with pytest.raises(ValueError, match="XGLMForCausalLM.*attn_implementation='eager'"):
        transformers.XGLMForCausalLM(config)


def test_a_transformers_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.3.0")
    with pytest.raises(ImportError, match="needs transformers 5.4 or newer, got 5.3.0: upgrade it"):
        hugging_face.register()


@pytest.mark.parametrize(
    ("name", "what_it_does"),
    [
        ("PegasusXForConditionalGeneration", "tells flash attention that it is not causal, which it is"),
        ("Aimv2TextModel", "tells flash attention that it is not causal, which it is"),
        ("MoonshineForConditionalGeneration", "tells flash attention that it is not causal, which it is"),
        ("LightGlueForKeypointMatching", "tells flash attention that it is causal, which it is not"),
        ("GPTJForCausalLM", "calls transformers' flash attention itself, past what is registered"),
        ("FalconForCausalLM", "calls transformers' flash attention itself, past what is registered"),
        ("BarkSemanticModel", "calls transformers' flash attention itself, past what is registered"),
    ],
)
def test_hugging_face_models_that_would_go_wrong_are_refused(name, what_it_does):
    hugging_face.register()
    kind = getattr(transformers, name)
    config = transformers.Aimv2TextConfig() if name == "Aimv2TextModel" else kind.config_class()
    config._attn_implementation = "nanoflash"
    with torch.device("meta"), pytest.raises(ValueError, match=f"^{name} {what_it_does}: use attn_impl"):
        kind(config)


def test_hugging_face_windows_that_look_ahead_are_refused(device):
    module, x = torch.nn.Module(), torch.zeros(1, 1, 8, 16, device=device)
    with pytest.raises(ValueError, match="sliding_window looks back only, got 4"):
        hugging_face.attention_forward(module, x, x, x, None, is_causal=False, sliding_window=4)
    hugging_face.attention_forward(module, x, x, x, None, is_causal=False, sliding_window=8)


TWO_EXPERTS = {"num_experts_per_tok": 1, "experts_implementation": "eager", "head_dim": 16}
LEFT_TO_THE_MASK = {
    "phimoe": lambda: transformers.PhimoeConfig(
        **SMALL, **HEADS | TWO_EXPERTS, num_local_experts=2, sliding_window=9
    ),
    # the first layer sees all
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **SMALL | {"num_hidden_layers": 2},
        **HEADS | TWO_EXPERTS,
        num_experts=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["full_attention", "sliding_attention"],
    ),
}


@pytest.mark.parametrize("name", LEFT_TO_THE_MASK)
def test_windows_that_hugging_face_layers_leave_to_the_mask_are_kept(name, device):
    tokens = torch.randint(32, (2, 24), generator=torch.Generator().manual_seed(0)).to(device)
    ours, eager = (
        hugging_face_model(LEFT_TO_THE_MASK[name](), implementation).to(device)
        for implementation in ("nanoflash", "eager")
    )
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, eager(tokens).logits, rtol=1e-4, atol=1e-5)


def test_packed_texts_are_kept_apart_where_layers_are_given_no_positions(device):
    ctrl = hugging_face_model(
        transformers.CTRLConfig(vocab_size=32, n_positions=32, n_embd=64, dff=64, n_layer=1, n_head=4),
        "nanoflash",
    ).to(device)
    tokens = torch.randint(32, (2, 24), generator=torch.Generator().manual_seed(0)).to(device)
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None].to(device)
    with torch.no_grad():
        packed = ctrl(tokens, position_ids=positions, use_cache=False).logits
        alone = ctrl(tokens[:, 10:], use_cache=False).logits
    torch.testing.assert_close(packed[:, 10:], alone, rtol=1e-4, atol=1e-5)


def test_a_models_own_packed_sequences_are_kept_apart_and_padding_beside_them_is_refused():
    from transformers import masking_utils as masks

    hugging_face.register()
    config = transformers.LlamaConfig(**SMALL, **HEADS, attn_implementation="nanoflash")
    numbers = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])

    def mask_of(padding):
        return masks.create_bidirectional_mask(
            config,
            torch.zeros(2, 4, 64),
            padding,
            and_mask_function=masks.packed_sequence_mask_function(numbers),
        )

    for nothing in (None, torch.ones(2, 4, dtype=torch.int64)):
        assert torch.equal(hugging_face.of_documents(mask_of(nothing), None, None), numbers.int())
    with pytest.raises(
        ValueError, match="has padding beside packed sequences.*use attn_implementation='eager'"
    ):
        mask_of(torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]))


def test_images_that_see_all_of_themselves_are_refused_and_text_without_any_is_not(device):
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config={**SMALL, **HEADS, "sliding_window": 9, "layer_types": ["sliding_attention"]},
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4, image_token_index=31, boi_token_index=29, eoi_token_index=30,
    )  # fmt: skip
    models = [
        hugging_face_model(config, implementation, transformers.AutoModelForImageTextToText).to(device)
        for implementation in ("nanoflash", "eager")
    ]
    tokens = torch.randint(28, (2, 24), generator=torch.Generator().manual_seed(0)).to(device)
    is_image = torch.zeros_like(tokens)
    with torch.no_grad():
        ours, eager = (model(tokens, token_type_ids=is_image).logits for model in models)
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
        is_image[:, 4:8] = 1
        with pytest.raises(ValueError, match="follows blockwise_overlay, which nanoflash does not compute"):
            models[0](tokens, token_type_ids=is_image)


def test_models_that_see_both_ways_are_as_accurate_as_eager_or_refused(device):
    tokens = torch.randint(3, 28, (2, 24), generator=torch.Generator().manual_seed(0)).to(device)

    def both(config, kind, **inputs):
        models = [
            hugging_face_model(config, implementation, kind).to(device)
            for implementation in ("nanoflash", "eager")
        ]
        with torch.no_grad():
            return [model(tokens, **inputs)[0] for model in models]

    # as EmbeddingGemma
    two_layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    embedding = transformers.Gemma3TextConfig(
        **SMALL | two_layers, **HEADS, use_bidirectional_attention=True, sliding_window=100
    )
    torch.testing.assert_close(*both(embedding, transformers.AutoModel), rtol=1e-4, atol=1e-5)
    embedding.sliding_window = 9
    with pytest.raises(ValueError, match="follows _bidirectional_window_overlay"):
        both(embedding, transformers.AutoModel)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    paligemma = transformers.PaliGemmaConfig(
        text_config={"model_type": "gemma", **SMALL, **HEADS},
        vision_config={"model_type": "siglip_vision_model", **vision, "image_size": 28, "patch_size": 14},
        image_token_index=31, projection_dim=64,
    )  # fmt: skip
    kind = transformers.AutoModelForImageTextToText
    prefix = torch.zeros_like(tokens)
    torch.testing.assert_close(*both(paligemma, kind, token_type_ids=prefix), rtol=1e-4, atol=1e-5)
    suffix = prefix.clone()
    suffix[:, 8:] = 1
    with pytest.raises(ValueError, match="the mask of this model follows blockwise_overlay, which nanoflash"):
        both(paligemma, kind, token_type_ids=suffix)


def hugging_face_model(config, implementation: str, kind=None):
    """A model with the same random weights for every implementation."""
    hugging_face.register()
    torch.manual_seed(0)
    kind = transformers.AutoModelForCausalLM if kind is None else kind
    return kind.from_config(deepcopy(config), attn_implementation=implementation).eval()


def test_rules_of_masks_are_read_or_named():
    from transformers import masking_utils as masks

    causal, numbers = masks.causal_mask_function, torch.tensor([[0, 0, 1, 1]])
    packed = masks.packed_sequence_mask_function(numbers)
    no_images, images = masks.blockwise_overlay(numbers - 2), masks.blockwise_overlay(numbers - 1)
    for rule, documents in (
        (causal, None),
        (masks.bidirectional_mask_function, None),
        (masks.sliding_window_causal_mask_function(2), None),
        (masks.or_masks(causal, no_images), None),
        # four keys are at most three apart
        (masks.sliding_window_bidirectional_mask_function(3), None),
        (masks.and_masks(causal, packed), numbers),
        (masks.or_masks(masks.and_masks(packed, causal), no_images), numbers),
    ):
        assert read_rules(rule, 4, are_causal=True, is_own=False) is documents
    for rule, name in (
        (masks.or_masks(causal, images), "blockwise_overlay"),
        (masks.or_masks(causal, packed), "packed_sequence_mask_function"),
        (masks.and_masks(packed, packed), "and_masks"),
        (masks.packed_sequence_mask_function(-numbers), "packed_sequence_mask_function"),
        (masks.sliding_window_bidirectional_mask_function(2), "sliding_window_bidirectional_overlay"),
        (masks.and_masks(causal, lambda batch, head, q, k: k >= 0), "test_rules_of_masks"),
        (partial(causal), "partial"),
    ):
        with pytest.raises(ValueError, match=f"^the mask of this model follows {name}.* use attn_impl"):
            read_rules(rule, 4, are_causal=True, is_own=False)
    # layers that hide nothing may follow what shows all, as one image does, but text without any does not
    one_image, text = (masks.blockwise_overlay(torch.full_like(numbers, number)) for number in (0, -1))
    assert read_rules(masks.or_masks(packed, one_image), 4, are_causal=False, is_own=False) is None
    assert read_rules(masks.or_masks(packed, text), 4, are_causal=False, is_own=False) is numbers


def test_rules_that_a_compiler_cannot_look_at_are_refused_there():
    from transformers import masking_utils as masks

    blocks = torch.tensor([[0, 0, 1, 1]])
    made_before = masks.or_masks(masks.causal_mask_function, masks.blockwise_overlay(blocks))

    # caught inside: after an error that leaves a compiled function, torch 2.13 looks at every call of
    # Python's until the process ends
    @torch.compile(backend="eager", fullgraph=True)
    def masked(x, kind):
        rule = masks.causal_mask_function
        if kind == "window":
            rule = masks.sliding_window_causal_mask_function(2)
        elif kind == "images":
            rule = masks.or_masks(rule, masks.blockwise_overlay(blocks))
        elif kind == "images of before":
            rule = made_before
        try:
            assert read_rules(rule, 4, are_causal=True, is_own=kind == "own") is None
        except ValueError as error:
            return x, str(error)
        return x, ""

    for kind in ("causal", "window"):
        assert masked(torch.zeros(1), kind)[1] == ""
    for kind in ("images", "images of before", "own"):
        error = masked(torch.zeros(1), kind)[1]
        assert "follows rules that cannot be looked at inside torch.compile" in error


@pytest.mark.parametrize("heads_first", [True, False])
def test_scaled_dot_product_attention_gives_what_the_compiler_expects(heads_first, device):
    q, k, v = (torch.randn(2, n, 40, 16, device=device).half() for n in (4, 2, 2))
    if not heads_first:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    out, lse, *_, seed, offset, _ = ours = kernels.sdpa.sdpa_forward(q, k, v, 0.1)
    expected = torch.ops.aten._scaled_dot_product_flash_attention(*(x.to("meta") for x in (q, k, v)), 0.1)
    assert [describe(x) for x in ours] == [describe(x) for x in expected]
    gradients = kernels.sdpa.sdpa_backward(q, q, k, v, out, lse, None, None, 40, 40, 0.1, False, seed, offset)
    assert [describe(x) for x in gradients] == [describe(torch.empty_like(x)) for x in (q, k, v)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_scaled_dot_product_attention_is_as_accurate_as_the_definition(dropout_p, scale, causal, device):
    q, k, v, dout = (torch.randn(1, n, 40, 16, device=device).half() for n in (2, 1, 1, 2))
    out, lse, *_, seed, offset, _ = kernels.sdpa.sdpa_forward(q, k, v, dropout_p, causal, scale=scale)
    gradients = kernels.sdpa.sdpa_backward(
        dout, q, k, v, out, lse, None, None, 40, 40, dropout_p, causal, seed, offset, scale=scale
    )
    options = {"causal": causal, "softmax_scale": scale, "dropout_p": dropout_p}
    options["dropout_seed"] = int(seed.view(torch.int64)[0])

    def definition(dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = attention_reference(*(x.transpose(1, 2) for x in inputs), **options).transpose(1, 2)
        return out.detach(), *torch.autograd.grad(out, inputs, dout.to(dtype))

    of_both = definition(torch.float16), definition(torch.float64)
    for name, x, pt, ref in zip(("out", "dq", "dk", "dv"), (out, *gradients), *of_both, strict=True):
        assert_within_rule(name, x, pt, ref)


def describe(x):
    return (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x


def test_scaled_dot_product_attention_refuses_what_it_cannot_compute(device):
    x = torch.zeros(1, 1, 8, 16, device=device)
    with pytest.raises(ValueError, match="dropout_p must be at least 0 and at most 0.9961, got 1.0"):
        kernels.sdpa.sdpa_forward(x, x, x, 1.0)
    with pytest.raises(ValueError, match="scale must be positive and finite, got -1.0"):
        kernels.sdpa.sdpa_forward(x, x, x, scale=-1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scaled_dot_product_attention_runs_on_our_kernels(dtype, causal, device):
    q, k, v = random_qkv(2, 200, 200, 4, 4, 64, dtype, device)
    calls = []

    def sdpa(q, k, v, return_lse, causal):
        if q.dtype == torch.float64:
            return attention_reference(q, k, v, causal=causal, return_lse=True)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(*heads_first, is_causal=causal)
        calls.append(out.grad_fn)
        # PyTorch returns no lse: take it, and its gradients, from the definition
        _, lse = attention_reference(q, k, v, causal=causal, return_lse=True)
        return out.transpose(1, 2), lse

    activate_flash_attention_impl("nanoflash")
    try:
        assert_as_accurate_as_torch(sdpa, q, k, v, causal=causal)
    finally:
        restore_flash_attention_impl()
    assert calls


def test_a_mask_is_read_again_where_a_layer_may_be_of_another_pass_or_its_values_others():
    readings, mask, x = [], torch.ones(1, 9), torch.zeros(1, 9, 1, 8)

    def ask(layer: int, k=x, find=lambda *given: readings.append(given)):
        module = torch.nn.Module()
        module.layer_idx = layer
        hugging_face.once(module, mask, find, x, k)
        return len(readings)

    def other(*given):
        readings.append(given)

    assert [ask(0), ask(1), ask(2)] == [1, 1, 1]
    # a model of a single layer, or one whose passes end early
    assert [ask(2), ask(3)] == [2, 2]
    mask[0, 0] = 0
    assert [ask(4), ask(5)] == [3, 3]
    assert [ask(6, x[:, 1:]), ask(7)] == [4, 5]
    assert ask(8, find=other) == 6


def test_what_the_kernels_do_not_compute_for_a_layer_is_refused_by_name():
    x = torch.zeros(2, 1, 8, 16)
    for name in ("softcap", "position_bias", "output_attentions"):
        with pytest.raises(ValueError, match=f"^{name} is not supported by nanoflash"):
            hugging_face.attention_forward(torch.nn.Module(), x, x, x, None, is_causal=True, **{name: 1.0})


def test_positions_of_rows_that_end_apart_are_read():
    q, k = torch.zeros(2, 3, 1, 16), torch.zeros(2, 12, 1, 16)
    positions = torch.tensor([[9, 10, 11], [6, 7, 8]])
    # the second row has padding on its left
    assert hugging_face.of_causal_positions(positions, q, k) is None
    with pytest.raises(ValueError, match="position_ids end at 10"):
        hugging_face.of_causal_positions(positions - 1, q, k)


@pytest.mark.parametrize(("n_keys", "is_all"), [(4, True), (5, False)])
def test_gemmas_window_to_both_sides_hides_what_is_as_far_as_its_number(n_keys, is_all):
    overlay = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")._bidirectional_window_overlay
    rule = overlay(4)
    assert all(rule(0, 0, 0, key) for key in range(n_keys)) == is_all
    if is_all:
        assert read_rules(rule, n_keys, are_causal=False, is_own=False) is None
    else:
        with pytest.raises(ValueError, match="follows _bidirectional_window_overlay"):
            read_rules(rule, n_keys, are_causal=False, is_own=False)


def test_one_row_of_positions_serves_every_text():
    q = k = torch.zeros(2, 4, 1, 16)
    ids = hugging_face.of_positions(torch.tensor([[0, 1, 0, 1]]), q, k)
    assert ids.tolist() == [[0, 0, 1, 1]] * 2


@pytest.mark.parametrize("value", [True, "all", "vision"])
def test_a_model_may_look_both_ways_over_all_of_a_text_and_not_over_a_part(value):
    masks = pytest.importorskip("transformers.masking_utils")
    overlay = pytest.importorskip("transformers.models.gemma3.modeling_gemma3")._bidirectional_window_overlay
    make = hugging_face.mask_interface(masks.flash_attention_mask)
    given = {"mask_function": masks.or_masks(masks.causal_mask_function, overlay(9))}
    given |= {"batch_size": 1, "q_length": 4, "kv_length": 4}
    given["config"] = SimpleNamespace(use_bidirectional_attention=value)
    if value == "vision":
        with pytest.raises(ValueError, match="the mask of this model follows"):
            make(**given)
    else:
        assert make(**given) is None
