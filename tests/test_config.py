from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from kernels import epilogue_library
from model import GPT, AttentionConfig, ModelConfig
from model.gpt import has_fused_gelu
from model.pretrained import export_pretrained
from train.config import check_machine, parse, write_config
from train.weights import StartConfig, run_attention, start_positions

CONF = Path(__file__).resolve().parent.parent / "conf"
GROUPS = ("model", "data", "optim", "attention", "experiment")
# values that only the user knows
NEEDED = {
    "text": ["data.paths=[README.md]"],
    "finetune_long": ["data.paths=[README.md]", "start.weights=null"],
    "example_long": ["start.weights=null"],
}


def composed(*overrides: str):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", list(overrides))


def choices():
    return [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


@pytest.mark.parametrize(("group", "choice"), choices())
def test_every_shipped_config_composes_and_parses(group, choice):
    config = parse(composed(f"{group}={choice}", *NEEDED.get(choice, [])))
    assert config.steps > 0
    assert config.accumulation(world_size=1) > 0


def test_every_file_of_conf_is_in_a_group_that_is_tested():
    files = {path.relative_to(CONF).as_posix() for path in CONF.rglob("*.yaml")}
    assert files == {"config.yaml"} | {f"{group}/{choice}.yaml" for group, choice in choices()}


def test_dense_attention_is_flash_in_every_layer():
    assert composed("attention=dense") == composed("attention=flash")
    assert not parse(composed("attention=dense")).attention.sparse


def test_a_model_that_no_family_holds_is_refused_before_it_is_trained_to_be_exported():
    config = parse(composed("experiment=laptop", "export=true", "+model.norm=rms"))
    with pytest.raises(ValueError, match="norm"):
        check_machine(config)


def test_blocks_of_a_pattern_must_fill_the_pieces_of_shared_sequences():
    overrides = ["attention=window", "context_parallel=4", "model=llama", "tokens_per_microbatch=32768"]
    with pytest.raises(
        ValueError, match=r"seq_len=1536 must be a multiple of 2 \* .*block_size=1024: .*=2048"
    ):
        parse(composed(*overrides, "seq_len=1536"))
    assert parse(composed(*overrides, "seq_len=2048")).attention.sparse


def test_patterns_of_ones_own_are_one_override():
    attention = parse(composed('attention.patterns=["window(64) | sinks(4)", dense]')).attention
    assert attention.patterns == ["window(64) | sinks(4)", "dense"]


@pytest.mark.parametrize("path", sorted((CONF / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_experiment_is_global_on_its_first_line(path):
    assert path.read_text().splitlines()[0] == "# @package _global_"


def test_sequence_length_is_one_dial():
    config = parse(composed("seq_len=8192"))
    assert (config.seq_len, config.model.max_seq_len, config.microbatch) == (8192, 8192, 4)
    assert config.accumulation(world_size=1) == 4


def test_accumulation_follows_from_the_budgets_and_the_number_of_processes():
    config = parse(composed("tokens_per_step=524288", "tokens_per_microbatch=32768"))
    assert [config.accumulation(world_size) for world_size in (1, 2, 4, 8)] == [16, 8, 4, 2]


def test_processes_that_share_sequences_take_more_of_them_at_once():
    config = parse(composed("context_parallel=4", "seq_len=131072", "tokens_per_microbatch=32768"))
    assert config.microbatch == 1
    assert config.accumulation(world_size=4) == 1


def export_small(folder: Path, vocab_size: int, n_embd: int = 8) -> None:
    config = ModelConfig(
        n_layer=1, n_head=1, n_embd=n_embd, vocab_size=vocab_size, max_seq_len=64, dropout=0.0
    )
    export_pretrained(GPT(config, AttentionConfig(implementation="sdpa")), folder)


def test_a_run_from_weights_has_their_shape_with_room_for_its_sequences(tmp_path):
    llama = parse(composed("model=llama", "seq_len=64")).model
    config = replace(llama, n_layer=1, n_embd=96, mlp_width=64, vocab_size=500)
    export_pretrained(GPT(config, AttentionConfig(implementation="sdpa")), tmp_path / "weights")
    overrides = ["seq_len=256", f"start.weights={tmp_path / 'weights'}", "start.positions=yarn"]
    parsed = parse(composed(*overrides))
    model = parsed.model
    assert (model.n_layer, model.n_embd, model.vocab_size, model.max_seq_len) == (1, 96, 500, 256)
    # by which refuse_idle_overrides tells whether positions are extended at all
    assert start_positions(parsed.start) == 64
    assert start_positions(replace(parsed.start, weights=str(tmp_path / "gone"))) == 0
    assert start_positions(replace(parsed.start, weights=None)) == 0
    assert (model.rotary.scaling, model.rotary.factor, model.rotary.original_seq_len) == ("yarn", 4.0, 64)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["start.weights=nowhere"],
            "^start.weights: nowhere does not exist: give a run's folder, a checkpoint",
        ),
        (
            ["start.weights=Qwen/Qwen2.5-0.5B"],
            "^start.weights: Qwen/.* hf download NAME --local-dir FOLDER",
        ),
        (["start.weights=empty"], "^start.weights: empty holds neither config.json, .* nor a checkpoint"),
        (
            ["start.weights=learned", "experiment=finetune_long", "data.paths=[empty]"],
            "^start.positions=yarn is for rotary positions, .*: use start.positions=repeat or interpolate",
        ),
        (["start.weights=learned", "start.rotary_base=5e5"], "^start.rotary_base=500000.0: .* leave it out"),
    ],
)
def test_weights_that_cannot_be_started_from_are_refused_by_key_value_and_way_out(
    overrides, message, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    export_small(Path("learned"), 500)
    with pytest.raises(ValueError, match=message):
        parse(composed(*overrides))


def test_a_script_runs_a_model_whose_heads_flash_cannot_take_by_what_can(tmp_path):
    export_small(tmp_path / "weights", 500, n_embd=12)
    assert run_attention(tmp_path / "weights", "", "cuda").implementation == "sdpa"
    message = "^attention=flash needs model.head_dim to be a multiple of 8 .*got 12 .* use attention=sdpa"
    with pytest.raises(ValueError, match=message):
        run_attention(tmp_path / "weights", "flash", "cuda")


def test_the_run_is_rounded_up_to_whole_steps():
    assert parse(composed("total_tokens=300000", "tokens_per_step=131072")).steps == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+colour=red", "colour is no key: python -m train --help lists them"),
        ("+model.n_layers=3", r"model.n_layers is no key; did you mean model.n_layer\?"),
        ("data.paths=my_text", r"data.paths must be a list: write 'data.paths=\[my_text\]'"),
        (
            "experiment=finetune_long",
            "start.weights must name a Hugging Face folder, runs/NAME or a checkpoint",
        ),
        ("seq_len=long", "seq_len: Value 'long' of type 'str' could not be converted to Integer"),
        ("seq_len=-5", "^seq_len must be at least 1, got -5"),
        ("model.n_layer=1.5", "model.n_layer: Value '1.5' of type 'float' could not be converted to Integer"),
        ("total_tokens=1e6", "total_tokens: Value '1000000.0' .*: write a whole number, .* as 1_000_000$"),
        ("data=text", "data.paths must name files or folders"),
        ("device=tpu", "device must be one of cuda, cpu, got 'tpu'"),
        ("precision=fp8", "precision must be one of bf16, fp16, fp32, got 'fp8'"),
        ("attention.implementation=fast", "attention.implementation must be one of flash, sdpa, reference"),
        ("seed=null", "^seed must not be null: give it a value, or leave it out$"),
        ("data.paths=null", "^data.paths must not be null: give it a value, or leave it out$"),
        (
            "wandb=null",
            "^wandb must be a group of keys with values, got None: change .* wandb.mode, leave it",
        ),
        (
            "lora=3",
            "^lora must be a group of keys with values, got 3: change .*, such as lora.rank, leave",
        ),
        ("seed=-1", "^seed must be from 0 to 18446744073709551615, got -1"),
        (f"seed={10**23}", f"^seed must be from 0 to 18446744073709551615, got {10**23}"),
        ("attention.patterns=['window(0)']", r"attention.patterns: window\(0\): n must be at least 1, got 0"),
        ("total_tokens=0", "total_tokens must be at least 1, got 0"),
        ("name=a/b", "name must be a plain folder name, got 'a/b': choose one without / and control char"),
        ("name=", "name must be a plain folder name, got '': choose"),
        (
            "name=.a",
            "name must be a plain folder name, got '.a': .* begins with another character than a dot$",
        ),
        ('name="a\nb"', r"name must be a plain folder name, got 'a\\nb': choose one without / and control"),
        ('name="a\x1b[2J"', r"name must be a plain folder name, got 'a\\x1b\[2J': choose one without / and"),
        ('name="a\udcc3"', r"name must be text in this machine's encoding, got .*: use other letters"),
        (
            'sample.prompt="caf\udce9"',
            r"^sample.prompt must be text in this machine's encoding, got .*: use other letters",
        ),
        (f'name="{128 * chr(228)}"', "name must have at most 255 bytes, as a folder's has, got 256: shorten"),
        ("optim.schedule=linear", "optim.schedule must be one of cosine, wsd, got 'linear'"),
        ("optim.beta2=1.0", r"optim.beta2 must be in \[0, 1\), got 1.0"),
        (
            ["spikes.action=rollback", "checkpoint.every_steps=0"],
            "back to the last checkpoint, and checkpoint.every_steps=0 saves none .* use checkpoint.every",
        ),
        ("logging.every_steps=0", "logging.every_steps must be at least 1, got 0"),
        ("wandb.mode=on", "wandb.mode must be one of offline, online, disabled"),
        ("sample.top_p=2", r"sample.top_p must be in \(0, 1\] or null, got 2"),
        (
            "context_parallel=3",
            r"seq_len=1024 must be a multiple of 2 \* context_parallel=3=6: the nearest are seq_len=1020",
        ),
        (
            ["context_parallel=2", "attention=sdpa"],
            "context_parallel=2 needs an attention that returns its lse: use attention=flash",
        ),
        ("start.positions=stretch", "start.positions must be one of none, linear, ntk, yarn, repeat, interp"),
        # no comparison finds a nan
        ("optim.weight_decay=nan", "optim.weight_decay must be at least 0 and finite, got nan"),
        ("optim.gradient_clip=nan", "optim.gradient_clip must be at least 0 and finite, got nan"),
        ("optim.learning_rate=nan", "optim.learning_rate must be at least 0 and finite, got nan"),
        ("optim.learning_rate=inf", "optim.learning_rate must be at least 0 and finite, got inf"),
        ("sample.temperature=nan", "sample.temperature must be at least 0 and finite, got nan"),
        ("spikes.z_score=nan", "spikes.z_score must be above 0, got nan"),
        ("hang_seconds=nan", "hang_seconds must be at least 1, or 0 to wait forever, got nan"),
        ("hang_seconds=1e-9", "hang_seconds must be at least 1, or 0 to wait forever, got 1e-09"),
        ("spikes.window=100000000000000000000", "spikes.window must be from 2 to 1048576, got 100000000000"),
        ("spikes.window=1", "spikes.window must be from 2 to 1048576, got 1"),
        ("checkpoint.keep_last=0", "checkpoint.keep_last must be at least 1, got 0"),
        ("checkpoint.every_steps=-1", "checkpoint.every_steps must be at least 0, got -1"),
        ("checkpoint.keep_every_steps=-1", "checkpoint.keep_every_steps must be at least 0, got -1"),
        ("evaluation.tokens=0", "evaluation.tokens must be at least 1, got 0"),
        ("evaluation.every_steps=-1", "evaluation.every_steps must be at least 0, got -1"),
        ("optim.final_learning_rate_ratio=1.5", r"optim.final_learning_rate_ratio must be in \[0, 1\], got"),
        ("optim.warmup_steps=-1", "optim.warmup_steps must be at least 0 and finite, got -1"),
        ("tokens_per_step=0", "^tokens_per_step must be at least 1, got 0"),
        ("tokens_per_microbatch=0", "^tokens_per_microbatch must be at least 1, got 0"),
        ("context_parallel=0", "^context_parallel must be at least 1, got 0"),
        ("reshard_after_forward=false", "reshard_after_forward=false needs distributed=fsdp, got ddp"),
        (["context_parallel=2", "model.dropout=0.1"], "context_parallel=2 has no dropout, got model.dropout"),
        ("+model.n_kv_head=5", "model.n_head=12 must be a multiple of model.n_kv_head=5"),
        (
            ["+model.head_dim=9", "+model.rotary.base=100", "attention=sdpa"],
            "model.rotary turns pairs of channels, got model.head_dim=9",
        ),
        ("+model.norm=batch", "model.norm must be one of layer, rms, got 'batch'"),
        ("start.rotary_base=nan", "start.rotary_base must be at least 1 and finite, or null, got nan"),
        ("start.rotary_base=inf", "start.rotary_base must be at least 1 and finite, or null, got inf"),
        ("start.rotary_base=0", "start.rotary_base must be at least 1 and finite, or null, got 0"),
        ("+model.rotary.base=nan", "model.rotary.base must be at least 1 and finite, got nan"),
        ("model.max_seq_len=512", "seq_len=1024 exceeds the model's positions, model.max_seq_len=512"),
        ("seq_len=65536", "the nearest is tokens_per_microbatch=65536"),
        (
            "tokens_per_microbatch=5000",
            "tokens_per_microbatch=5000 must be a multiple of seq_len=1024: "
            "the nearest are tokens_per_microbatch=4096 or tokens_per_microbatch=5120",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_key_value_and_way_out(override, message):
    with pytest.raises(ValueError, match=message):
        parse(composed(*([override] if isinstance(override, str) else override)))


def test_budgets_that_do_not_divide_over_the_processes_name_the_nearest_that_do():
    config = parse(composed())
    message = (
        r"tokens_per_step=131072 must be a multiple of tokens_per_microbatch \* 3 processes=98304: "
        "the nearest are tokens_per_step=98304 or tokens_per_step=196608"
    )
    with pytest.raises(ValueError, match=message):
        config.accumulation(world_size=3)


def test_flash_without_a_gpu_is_refused_with_the_change_to_make():
    config = parse(composed("device=cpu"))
    with pytest.raises(ValueError, match=r"flash runs on a GPU, got device=cpu: use .*implementation=sdpa"):
        check_machine(config)
    config = parse(composed("device=cpu", "attention=window"))
    with pytest.raises(ValueError, match=r"flash runs on a GPU, got device=cpu: use .*=reference"):
        check_machine(config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.n_embd=100", "model.n_head=10"], "got 10 of model.n_embd=100 and model.n_head=10: change"),
        (["model.n_embd=2048", "model.n_head=4"], "got 512 of .*: .* set model.head_dim, or use .*=sdpa"),
        (["+model.head_dim=12", "attention=window"], "got 12 of model.n_embd=768 .* or use .*=reference"),
    ],
)
def test_heads_that_flash_cannot_take_are_refused_before_the_run_by_the_keys_that_make_them(
    overrides, message
):
    needed = "attention.implementation=flash needs model.head_dim to be a multiple of 8 from 8 to 256, "
    with pytest.raises(ValueError, match=f"^{needed}{message}"):
        parse(composed(*overrides))
    assert parse(composed(*overrides, "attention=reference")).model.head_dim in (10, 12, 512)


def test_the_fused_loss_without_a_gpu_is_refused_with_the_change_to_make():
    config = parse(composed("experiment=laptop", "fused_loss=true"))
    with pytest.raises(ValueError, match="fused_loss=true runs on a GPU, got device=cpu: use fused_loss=fal"):
        check_machine(config)


def test_gelu_inside_of_products_without_its_library_is_refused_with_the_ways_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(epilogue_library, "is_installed", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ValueError, match=r"fused_gelu=true needs quack-kernels .* use fused_gelu=false"):
        check_machine(parse(composed("device=cuda")))


@pytest.mark.parametrize(
    ("capability", "hip", "fused"),
    [
        ((8, 0), None, False),
        ((8, 9), None, False),
        ((9, 0), "7.2", False),
        ((9, 0), None, True),
        ((12, 0), None, True),
    ],
)
def test_gelu_is_inside_of_products_where_the_library_has_them(monkeypatch, capability, hip, fused):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(epilogue_library, "is_installed", lambda: True)
    assert has_fused_gelu(torch.device("cuda")) is fused
    assert not has_fused_gelu(torch.device("cpu"))


def test_a_model_for_another_vocabulary_is_refused():
    config = parse(composed("experiment=laptop", "data.tokenizer=bytes"))
    message = "model.vocab_size=50257, but data.tokenizer=bytes has 257 tokens: use model.vocab_size=257"
    with pytest.raises(ValueError, match=message):
        check_machine(config)


def test_a_prompt_beyond_the_positions_is_refused_before_the_run_and_not_after_it():
    given = ["experiment=laptop", "data.tokenizer=bytes", "model.vocab_size=257", "seq_len=32"]
    given += ["tokens_per_step=512", "tokens_per_microbatch=512", f"sample.prompt={'a' * 32}"]
    message = "sample.prompt: the prompt has 33 tokens, the model 32 positions: shorten it, or use sample.to"
    with pytest.raises(ValueError, match=message):
        check_machine(parse(composed(*given)))
    check_machine(parse(composed(*given, "sample.tokens=0")))


def test_a_tilde_in_front_of_weights_and_checkpoints_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse(composed('checkpoint.resume="~/a"')).checkpoint.resume == str(tmp_path / "a")
    start = StartConfig(weights="~/b", positions="none", rotary_base=None)
    assert start.weights == str(tmp_path / "b")


def test_a_written_config_parses_to_the_same_run(tmp_path):
    config = parse(composed("experiment=laptop"))
    write_config(config, tmp_path, first_step=0)
    assert parse(OmegaConf.load(tmp_path / "config.yaml")) == config


def test_a_resumed_run_with_other_settings_keeps_the_first_config_file(tmp_path):
    write_config(parse(composed("total_tokens=1000")), tmp_path, first_step=0)
    before = (tmp_path / "config.yaml").read_text()
    write_config(parse(composed("total_tokens=2000")), tmp_path, first_step=7)
    assert (tmp_path / "config.yaml").read_text() == before
    assert parse(OmegaConf.load(tmp_path / "config_from_step_7.yaml")).total_tokens == 2000
    (tmp_path / "config_from_step_7_copy.yaml").write_text("mine")
    # back to the first ones is a change too
    again = write_config(parse(composed("total_tokens=1000")), tmp_path, first_step=9)
    assert again.name == "config_from_step_9.yaml"
    assert again.read_text() == before
    assert write_config(parse(composed("total_tokens=1000")), tmp_path, first_step=12) == again
    # from an older checkpoint, as the newest is damaged: what held there holds, and no longer what came later
    for number in (1, 2):
        older = write_config(parse(composed("total_tokens=2000")), tmp_path, first_step=8)
        assert older.name == "config_from_step_7.yaml"
        assert (tmp_path / f"config_from_step_9_undone_{number}.yaml").read_text() == before
        assert not again.exists()
        assert write_config(parse(composed("total_tokens=1000")), tmp_path, first_step=9) == again
    assert (tmp_path / "config_from_step_7_copy.yaml").read_text() == "mine"


def test_a_config_file_of_another_encoding_is_kept_beside_the_settings_of_a_resumed_run(tmp_path):
    latin = "name: é\n".encode("latin-1")
    (tmp_path / "config.yaml").write_bytes(latin)
    assert write_config(parse(composed()), tmp_path, first_step=7).name == "config_from_step_7.yaml"
    assert (tmp_path / "config.yaml").read_bytes() == latin


def test_half_of_the_text_may_be_for_validation():
    assert parse(composed("data.validation_fraction=0.5")).data.validation_fraction == 0.5


def test_fp16_on_a_cpu_is_refused():
    with pytest.raises(ValueError, match="precision=fp16 needs a GPU, got device=cpu"):
        check_machine(parse(composed("experiment=laptop", "precision=fp16")))


def test_skipped_positions_of_shared_sequences_are_refused():
    given = [
        "model=llama", "attention=reference", "model.dropout=0.0", "model.max_seq_len=1024",
        "pose_seq_len=1024", "seq_len=512", "tokens_per_microbatch=1024", "context_parallel=2",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="context_parallel=1, got False and 2"):
        parse(composed(*given))


def test_dropout_of_a_run_from_weights_is_the_runs_own(tmp_path):
    export_small(tmp_path / "weights", 257)
    for dropout in (0.0, 0.25):
        given = ["seq_len=64", f"start.weights={tmp_path / 'weights'}", f"model.dropout={dropout}"]
        assert parse(composed(*given)).model.dropout == dropout


def test_weights_may_have_more_tokens_than_the_tokenizer_and_not_fewer(tmp_path):
    given = [
        "experiment=laptop", "data.tokenizer=bytes", "seq_len=32", "tokens_per_step=512",
        "tokens_per_microbatch=512", "sample.tokens=0",
    ]  # fmt: skip
    export_small(tmp_path / "more", 300)
    check_machine(parse(composed(*given, f"start.weights={tmp_path / 'more'}")))
    export_small(tmp_path / "fewer", 200)
    with pytest.raises(ValueError, match="fewer has 200 tokens, data.tokenizer=bytes 257: use data.tok"):
        check_machine(parse(composed(*given, f"start.weights={tmp_path / 'fewer'}")))
