"""The whole configuration of a run, composed of its groups, and the checks that span several of them."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

from data.prepare import DataConfig
from data.sources import RUNS
from data.tokenizer import is_tokenizer, load_tokenizer, same_tokens, without_surrogates
from model import AttentionConfig, ModelConfig
from model.attention import why_not_flash
from model.families import family_of
from model.gpt import has_fused_gelu
from model.recompute import RECOMPUTE
from train.bad_steps import BAD_STEP_ACTIONS, SpikeConfig
from train.c_compiler import check_c_compiler
from train.checkpoint import CheckpointConfig
from train.evaluate import EvaluationConfig
from train.free_name import first_free
from train.logger import LoggingConfig, WandbConfig, counted
from train.lora import LoraConfig
from train.optim import OptimConfig
from train.overrides import at_least, checked, one_of
from train.parallel import STRATEGIES
from train.sample import SampleConfig, check_seed, prompt_ids
from train.step import DTYPES
from train.weights import StartConfig, began_from, check_start, start_model, tokenizer_name
from train.whole_file import write_whole

PRECISIONS = tuple(DTYPES)
DEVICES = ("cuda", "cpu")
# leaves time for several beats of the watchdog, each of which takes some milliseconds
LEAST_HANG_SECONDS = 1.0
# Linux's limit on the bytes of a folder's name
LONGEST_NAME = 255


@dataclass(kw_only=True, slots=True)
class Config:
    # names the run folder runs/<name> and the wandb run
    name: str
    # seeds the weights, the order of the data, and dropout
    seed: int
    device: str
    # arithmetic of the matrix products; parameters and optimizer state stay float32
    precision: str
    # torch.compile of the model: a first step of half a minute, for 1558M on several GPUs of one, then 1.4
    # times as fast
    compile: bool
    # replay micro-batches as CUDA graphs if memory suffices and GPUs exchange nothing meanwhile: all of them
    # on one GPU, all but the last of each step with ddp (train/passes.py)
    cuda_graphs: bool
    # compute the head and the loss in our kernel, which never holds all logits; false: in PyTorch
    fused_loss: bool
    # in 16 bits on a GPU, fuse GELU and its gradient into the adjacent matrix products; false: apart
    fused_gelu: bool
    # keep the residual stream in `precision`, which halves its traffic; false: in float32
    low_precision_residual: bool
    # what the backward pass recomputes: none; selective: norms, GELU and sums; full: whole layers, a third
    # more arithmetic for a fraction of the memory
    recompute: str
    # bit-identical runs on a GPU too, also when resumed, at the price of slower kernels
    deterministic: bool
    # what each of several processes holds. ddp: all weights; fsdp: a share of weights, gradients and
    # optimizer state
    distributed: str
    # with fsdp: how many neighbouring processes share one copy of the weights; null: all of them
    shard_processes: int | None
    # with fsdp: gather the weights for each pass of each micro-batch; false: once per step, which exchanges
    # less but keeps 4 bytes per weight
    reshard_after_forward: bool
    # tokens per sequence: the only setting of context length
    seq_len: int
    # PoSE: training sequences use positions below this length, skipping a stretch; null: their own positions
    pose_seq_len: int | None
    # tokens between two updates of the weights, over all processes
    tokens_per_step: int
    # tokens that one process runs through the model at once, which bounds its memory
    tokens_per_microbatch: int
    # processes that share each sequence, so that it can be longer than one GPU's memory
    context_parallel: int
    # documents packed into a sequence do not attend to each other, and positions restart in each
    separate_documents: bool
    # the length of the run, rounded up to whole steps
    total_tokens: int
    # at the end, write the model as a Hugging Face folder to runs/<name>/hugging_face
    export: bool
    # at a loss or gradients that are not finite, stop the run or skip the step; the weights never see them
    on_bad_step: str
    # name a process without progress for this long, and end the run so that it can restart; 0: wait forever
    hang_seconds: float
    # a trace of a few steps, and on a GPU a snapshot of its memory (train/profiler.py)
    profile: bool
    start: StartConfig
    lora: LoraConfig
    model: ModelConfig
    attention: AttentionConfig
    data: DataConfig
    optim: OptimConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    spikes: SpikeConfig
    logging: LoggingConfig
    wandb: WandbConfig
    sample: SampleConfig

    def __post_init__(self):
        # surrogates stand for undecodable bytes of the command line; no picture or sample could hold them
        for key, text in (("name", self.name), ("sample.prompt", self.sample.prompt)):
            if without_surrogates(text) != text:
                raise ValueError(
                    f"{key} must be text in this machine's encoding, got {text!r}: use other letters, or "
                    "export LC_ALL=C.UTF-8"
                )
        # a tab, a line break or a terminal's commands would garble whatever prints the name
        if not self.name or self.name.startswith(".") or re.search(r"[/\x00-\x1f\x7f-\x9f]", self.name):
            raise ValueError(
                f"name must be a plain folder name, got {self.name!r}: choose one without / and control "
                "characters that begins with another character than a dot"
            )
        if (size := len(self.name.encode())) > LONGEST_NAME:
            raise ValueError(
                f"name must have at most {LONGEST_NAME} bytes, as a folder's has, got {size}: shorten it"
            )
        one_of("device", self.device, DEVICES)
        one_of("precision", self.precision, PRECISIONS)
        one_of("recompute", self.recompute, RECOMPUTE)
        one_of("distributed", self.distributed, STRATEGIES)
        if self.shard_processes is not None and (self.distributed != "fsdp" or self.shard_processes < 2):
            raise ValueError(
                f"shard_processes={self.shard_processes} must be at least 2, and needs distributed=fsdp, got "
                f"distributed={self.distributed}: use shard_processes=null for all processes"
            )
        if not self.reshard_after_forward and self.distributed != "fsdp":
            raise ValueError(
                f"reshard_after_forward=false needs distributed=fsdp, got {self.distributed}, where every "
                "process has all weights: leave it true"
            )
        one_of("on_bad_step", self.on_bad_step, BAD_STEP_ACTIONS)
        if self.spikes.action == "rollback" and self.checkpoint.every_steps == 0:
            raise ValueError(
                "spikes.action=rollback goes back to the last checkpoint, and checkpoint.every_steps=0 saves "
                "none before the end: use checkpoint.every_steps=500, or spikes.action=skip"
            )
        check_seed(self.seed)
        if self.hang_seconds and not self.hang_seconds >= LEAST_HANG_SECONDS:
            raise ValueError(
                f"hang_seconds must be at least {LEAST_HANG_SECONDS:g}, or 0 to wait forever, got "
                f"{self.hang_seconds}"
            )
        for field in (
            "seq_len",
            "tokens_per_step",
            "tokens_per_microbatch",
            "context_parallel",
            "total_tokens",
        ):
            at_least(field, getattr(self, field), 1)
        if self.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"seq_len={self.seq_len} exceeds the model's positions, model.max_seq_len="
                f"{self.model.max_seq_len}: lower seq_len, or raise model.max_seq_len"
            )
        self._check_context_parallel()
        self.optim.check_steps(self.steps)
        self.lora.check(self.start.weights, self.optim.algorithm)

    @property
    def folder(self) -> Path:
        return RUNS / self.name

    @property
    def steps(self) -> int:
        return -(-self.total_tokens // self.tokens_per_step)

    @property
    def microbatch(self) -> int:
        """Sequences that one process, or one group that shares them, runs through the model at once."""
        return self.tokens_per_microbatch * self.context_parallel // self.seq_len

    def _check_context_parallel(self) -> None:
        ranks = self.context_parallel
        if ranks == 1:
            _check_divides("tokens_per_microbatch", self.tokens_per_microbatch, "seq_len", self.seq_len)
            return
        # each process holds two pieces of each sequence
        _check_divides("seq_len", self.seq_len, f"2 * context_parallel={ranks}", 2 * ranks)
        if self.attention.sparse:
            name, unit = "2 * context_parallel * attention.block_size", 2 * ranks * self.attention.block_size
            _check_divides("seq_len", self.seq_len, name, unit)
        name = f"seq_len / context_parallel={ranks}"
        _check_divides("tokens_per_microbatch", self.tokens_per_microbatch, name, self.seq_len // ranks)
        if self.attention.implementation == "sdpa":
            raise ValueError(
                f"context_parallel={ranks} needs an attention that returns its lse: use attention=flash, "
                "or attention=reference on a CPU"
            )
        if self.model.dropout > 0.0:
            raise ValueError(
                f"context_parallel={ranks} has no dropout, got model.dropout={self.model.dropout}"
            )

    def check_pose(self) -> None:
        """Raises ValueError if pose_seq_len does not suit the model, which may come from start.weights."""
        if self.pose_seq_len is None:
            return
        name = f"pose_seq_len={self.pose_seq_len}"
        if self.model.rotary is None:
            raise ValueError(f"{name} needs rotary positions, the model has learned ones: leave it null")
        if self.pose_seq_len <= self.seq_len:
            raise ValueError(f"{name} must be above seq_len={self.seq_len}: raise it, or leave it null")
        if self.pose_seq_len > self.model.max_seq_len:
            raise ValueError(
                f"{name} exceeds the model's positions: raise model.max_seq_len={self.model.max_seq_len}"
            )
        if self.separate_documents or self.context_parallel > 1:
            raise ValueError(
                f"{name} places whole sequences on one process: use separate_documents=false and "
                f"context_parallel=1, got {self.separate_documents} and {self.context_parallel}"
            )

    def check_heads(self) -> None:
        """Raises ValueError if flash cannot run the model's heads; the model may come from start.weights."""
        reason = why_not_flash(self.model)
        if self.attention.implementation != "flash" or reason is None:
            return
        ways_out = f"use attention.implementation={'reference' if self.attention.sparse else 'sdpa'}"
        if self.start.weights is None:
            ways_out = f"change one of them, set model.head_dim, or {ways_out}"
        raise ValueError(f"attention.implementation=flash {reason}: {ways_out}")

    def check_processes(self, world_size: int) -> None:
        """Raises ValueError unless the processes divide into groups that share a sequence, or the weights."""
        for name, size in (
            ("context_parallel", self.context_parallel),
            ("shard_processes", self.shard_processes),
        ):
            if size is not None and world_size % size:
                raise ValueError(
                    f"{name}={size} must divide the {counted(world_size, 'process')}: "
                    f"start a multiple of {size} of them, or lower {name}"
                )

    def step_after(self, step: int, tokens_per_step: int) -> int:
        """The whole steps of this run that `step` steps of tokens_per_step tokens amount to.

        Raises ValueError if there is none: a run at step 0 would be a new one.
        """
        done = step * tokens_per_step
        if done < self.tokens_per_step:
            raise ValueError(
                f"the checkpoint is of step {step} of {tokens_per_step} tokens, less than one step of "
                f"tokens_per_step={self.tokens_per_step}: use tokens_per_step={done} or less, or a later "
                "checkpoint"
            )
        return done // self.tokens_per_step

    def check_first_step(self, step: int, *, is_own: bool) -> None:
        """Raises ValueError if a checkpoint of this step leaves nothing to train.

        step: counted in steps of this run's size. is_own: the run's own checkpoint may be of its last step.
        """
        if step > self.steps or (step == self.steps and not is_own):
            anew = ", or choose another name= for a new run" if is_own else ""
            raise ValueError(
                f"the checkpoint is of step {step}, but total_tokens={self.total_tokens} are {self.steps} "
                f"steps of tokens_per_step={self.tokens_per_step}: raise total_tokens above "
                f"{step * self.tokens_per_step}{anew}"
            )

    def accumulation(self, world_size: int) -> int:
        """Micro-batches per process and step. Raises ValueError if the budgets do not divide."""
        tokens_at_once = self.tokens_per_microbatch * world_size
        name = "tokens_per_microbatch" + (f" * {world_size} processes" if world_size > 1 else "")
        _check_divides("tokens_per_step", self.tokens_per_step, name, tokens_at_once)
        return self.tokens_per_step // tokens_at_once


def parse(cfg: DictConfig) -> Config:
    """The composed configuration as checked dataclasses.

    Raises ValueError that names the key, its value and the change to make: unknown keys, wrong types,
    missing values, and whatever the dataclasses refuse.
    """
    if isinstance(seq_len := OmegaConf.select(cfg, "seq_len"), int):
        # model.max_seq_len follows seq_len, and would be refused in its place
        at_least("seq_len", seq_len, 1)
    config = checked(cfg, Config)
    if config.start.weights is not None:
        longest = max(config.seq_len, config.pose_seq_len or 0)
        config.model = start_model(config.start, longest, config.model.dropout, config.folder)
    config.check_pose()
    config.check_heads()
    config.lora.check_rank(config.model)
    return config


def check_machine(config: Config) -> None:
    """Raises ValueError, before any long work starts, for what this machine or the tokenizer cannot do."""
    # sdpa has no block masks
    instead = "reference" if config.attention.sparse else "sdpa"
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device=cuda, but torch sees no GPU: use experiment=laptop in place of any other, or device=cpu "
            f"precision=fp32 compile=false fused_loss=false attention.implementation={instead}"
        )
    if config.attention.implementation == "flash" and config.device != "cuda":
        raise ValueError(
            f"attention.implementation=flash runs on a GPU, got device={config.device}: "
            f"use attention.implementation={instead}"
        )
    if config.fused_loss and config.device != "cuda":
        raise ValueError(f"fused_loss=true runs on a GPU, got device={config.device}: use fused_loss=false")
    if config.fused_gelu and config.device == "cuda":
        # refuses a card that could fuse GELU if only the library were installed
        has_fused_gelu(torch.device("cuda"))
    uses_triton = config.attention.implementation == "flash" or config.fused_loss or config.compile
    if config.device == "cuda" and uses_triton:
        check_c_compiler()
    if config.precision == "fp16" and config.device == "cpu":
        raise ValueError("precision=fp16 needs a GPU, got device=cpu: use precision=fp32 or bf16")
    if config.export:
        # refuses now what could not be exported at the end
        family_of(config.model)
    _check_tokenizer(config)


def _check_tokenizer(config: Config) -> None:
    """Raises ValueError for a tokenizer that does not suit the model, and for a prompt that is too long."""
    weights, vocab_size = config.start.weights, config.model.vocab_size
    tokenizer = load_tokenizer(config.data.tokenizer)
    if weights is None:
        if vocab_size != tokenizer.vocab_size:
            raise ValueError(
                f"model.vocab_size={vocab_size}, but data.tokenizer={config.data.tokenizer} has "
                f"{tokenizer.vocab_size} tokens: use model.vocab_size={tokenizer.vocab_size}"
            )
    else:
        if began_from(weights, config.folder) is None:
            check_start(config.start)
            own = tokenizer_name(weights)
            if is_tokenizer(own) and not same_tokens(tokenizer, load_tokenizer(own)):
                raise ValueError(
                    f"start.weights={weights} reads the tokens of {own}, not those of "
                    f"data.tokenizer={config.data.tokenizer}: use data.tokenizer={own}"
                )
        # published weights may have room for more tokens than their tokenizer has
        if vocab_size < tokenizer.vocab_size:
            raise ValueError(
                f"{weights} has {vocab_size} tokens, data.tokenizer={config.data.tokenizer} "
                f"{tokenizer.vocab_size}: use data.tokenizer=FOLDER, a folder with the tokenizer.json of "
                "these weights"
            )
    if config.sample.tokens:
        try:
            prompt_ids(tokenizer, config.sample.prompt, config.model)
        except ValueError as error:
            raise ValueError(f"sample.prompt: {error}, or use sample.tokens=0 for no sample") from error


def write_config(config: Config, folder: Path, first_step: int) -> Path:
    """Writes folder/config.yaml, or config_from_step_<first_step>.yaml beside it if a resumed run differs.

    Files of later steps are renamed: resuming from before them has undone those steps. Returns the file that
    holds these settings.
    """
    text = OmegaConf.to_yaml(OmegaConf.create(asdict(config)))
    path = folder / "config.yaml"
    if first_step > 0 and path.exists():
        # find the settings of the steps before first_step
        settings = {0: path}
        for changed in sorted(folder.glob("config_from_step_*.yaml")):
            step = changed.stem.removeprefix("config_from_step_")
            # a user's copy beside them has a name that does not end in a number
            if step.isdecimal() and int(step) > first_step:
                _set_aside(changed)
            elif step.isdecimal():
                settings[int(step)] = changed
        path = settings[max(settings)]
        # as bytes: an older file may be in another encoding
        if path.read_bytes() != text.encode():
            path = folder / f"config_from_step_{first_step}.yaml"
    write_whole(path, text)
    return path


def _set_aside(path: Path) -> None:
    """Renames config_from_step_9.yaml to config_from_step_9_undone_1.yaml, or the next that is free."""
    path.rename(first_free(lambda number: path.with_stem(f"{path.stem}_undone_{number}")))


def _check_divides(name: str, value: int, divisor_name: str, divisor: int) -> None:
    if value % divisor:
        below, above = value // divisor * divisor, -(-value // divisor) * divisor
        nearest = (
            f"nearest is {name}={above}" if below == 0 else f"nearest are {name}={below} or {name}={above}"
        )
        raise ValueError(f"{name}={value} must be a multiple of {divisor_name}={divisor}: the {nearest}")
