"""Checkpoints: which ones a run has, whether they are intact, and what they hold, read without running code.

A checkpoint is a folder step_<step> with one safetensors shard per process that wrote it, and
checkpoint.json. That file is written last, so a folder without it is unfinished; it holds everything but the
tensors, and the size and CRC-32 of every shard.
"""

import os
import re
import sys
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from data.prepare import identity, spelled_out
from data.tokenizer import TOKENIZERS, load_tokenizer, shard_mark
from train.overrides import at_least
from train.strict_json import from_json

# torch.distributed.checkpoint warns about every save and load by a single process
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

FORMAT_VERSION = 2
MARKER = "checkpoint.json"
# keys that every marker has
NEEDED = {"step": int, "shards": dict}
# eight digits, or more from step 100,000,000 on
STEP_FOLDER = re.compile(r"step_([0-9]{8,})")
# bytes that are read, written and checksummed at once
PIECE = 1 << 24
# model settings that a run may change when it resumes
FREE_MODEL_KEYS = ("dropout",)
# what fixes the stream of tokens, and must not change: the order of the sequences, and how many a step takes
ORDER_KEYS = ("seed", "seq_len")
STREAM_KEYS = (*ORDER_KEYS, "tokens_per_step")
# what a token attends to and its position: with other values the same weights are another function
FUNCTION_KEYS = ("separate_documents", "pose_seq_len")
# what is said of a checkpoint that was chosen a moment before, or named
REMOVED = (
    ": a run removes all but its newest checkpoints (checkpoint.keep_last), give the command again, or name "
    "one that is there"
)
# shards that this process has read and found intact
_verified: set[tuple[str, int, int]] = set()


@dataclass(kw_only=True, slots=True)
class CheckpointConfig:
    # steps between checkpoints; the last step is always saved; 0 for the last one only
    every_steps: int
    # the run keeps its newest `keep_last` checkpoints, all at multiples of `keep_every_steps` (0: none), and
    # with keep_best the one with the lowest validation loss; it removes the others
    keep_last: int
    keep_every_steps: int
    keep_best: bool
    # auto: continue from the run's newest intact checkpoint, if any; never: start a new run, and refuse a
    # folder that holds one; otherwise the folder of a checkpoint to start from, once: a run that started
    # there and was stopped later continues from its own
    resume: str

    def __post_init__(self):
        self.resume = os.path.expanduser(self.resume)
        at_least("checkpoint.every_steps", self.every_steps, 0)
        at_least("checkpoint.keep_every_steps", self.keep_every_steps, 0)
        at_least("checkpoint.keep_last", self.keep_last, 1)


def step_folder(folder: Path, step: int) -> Path:
    """Where a run's checkpoint of this step is."""
    return folder / f"step_{step:08d}"


def step_folders(folder: Path) -> list[Path]:
    """The folders of checkpoints, finished or not, in the order of their steps."""
    found = (STEP_FOLDER.fullmatch(path.name) for path in folder.glob("step_*"))
    return [folder / name[0] for name in sorted(filter(None, found), key=lambda name: int(name[1]))]


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints of a run, oldest first; their shards may still be damaged."""
    return [path for path in step_folders(folder) if (path / MARKER).exists()]


def folders_of(path: Path) -> tuple[Path, Path]:
    """The folders of a checkpoint: that of its name and, where it was moved and linked, that of its data."""
    return path.parent.resolve(), path.resolve().parent


def lies_in(path: Path, folder: Path) -> bool:
    """Whether a checkpoint is one of those in a folder, by its name or by its data."""
    return folder.resolve() in folders_of(path)


def readable_checkpoints(folder: Path) -> dict[Path, dict]:
    """The finished checkpoints of a run that read_checkpoint can read, oldest first, with what it returns."""
    infos = {}
    for path in list_checkpoints(folder):
        with suppress(ValueError):
            infos[path] = read_checkpoint(path)
    return infos


def newest_checkpoint(
    folder: Path, skipped: list[Path] | None = None, mark: Callable[[], None] | None = None
) -> Path | None:
    """The newest intact checkpoint, or None if none is finished; damaged ones are named and skipped.

    skipped: a list to which damaged ones are added. mark: as in verify_checkpoint. Raises ValueError if all
    finished ones are damaged: a run must not silently start over.
    """
    found = list_checkpoints(folder)
    for path in reversed(found):
        try:
            verify_checkpoint(path, mark)
            return path
        except ValueError as error:
            print(f"skipped: {error}", file=sys.stderr, flush=True)
            if skipped is not None:
                skipped.append(path)
    if found:
        raise ValueError(
            f"{folder}: all {len(found)} checkpoints are damaged (named above): "
            "move them away to start over, or choose another name="
        )
    return None


def find_checkpoint(
    folder: Path, resume: str, skipped: list[Path] | None = None, mark: Callable[[], None] | None = None
) -> Path | None:
    """The checkpoint to continue from, or None for a new run.

    skipped: a list to which the run's damaged ones are added. mark: as in verify_checkpoint. Raises
    ValueError if the checkpoint that resume names is damaged, or all that were found.
    """
    own = newest_checkpoint(folder, skipped, mark)
    if resume in ("auto", "never") or (own and is_saved_by(read_checkpoint(own), resume)):
        return own
    verify_checkpoint(Path(resume), mark)
    return Path(resume)


def refuse_other_run(folder: Path, resume: str, config: dict) -> None:
    """Raises ValueError, before any long work, if training in this folder would mix with or undo another run.

    folder: of checkpoints, which need not exist yet; a path that cannot become one is refused too.
    """
    run = folder.parent
    # a link that leads nowhere is the system's to tell: its disk may come back, and torchrun tries again
    if run.is_file():
        raise ValueError(
            f"{run} is a file, and name={run.name} needs a folder: move it away, or choose another name="
        )
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise ValueError(
            f"{folder} is a file, or a link that leads nowhere, and checkpoints would have no place: move it "
            "away, or mount the disk that it leads to"
        )
    finished = list_checkpoints(folder)
    if resume == "never" and finished:
        raise ValueError(
            f"checkpoint.resume=never, but {folder} holds {len(finished)} checkpoints: "
            "choose another name=, or checkpoint.resume=auto to continue"
        )
    if not finished and (summary := run / "summary.json").exists():
        raise ValueError(
            f"{summary} is of a finished run whose checkpoints are gone, and a new one would write over its "
            "files: choose another name=, or move the folder away"
        )
    found = readable_checkpoints(folder)
    newest, newest_info = list(found.items())[-1] if found else (None, None)
    if newest and (resume == "auto" or is_saved_by(newest_info, resume)):
        # the run continues from its own checkpoint, whatever became of the one that it started from
        if resume != "auto":
            # check_fits would compare them too, and advise the checkpoint.resume= that is given already
            _refuse_other_steps(newest_info, newest, folder, config)
        check_fits(newest_info, newest, config, same_run=True)
    elif resume not in ("auto", "never"):
        if not Path(resume).is_dir():
            raise ValueError(
                f"checkpoint.resume must be auto, never or a checkpoint's folder, got {resume!r}: no such "
                "folder"
            )
        if not Path(resume, MARKER).is_file():
            below = list_checkpoints(Path(resume, "checkpoints")) or list_checkpoints(Path(resume))
            instead = below[-1] if below else "a folder .../step_00000500 that holds one"
            raise ValueError(
                f"checkpoint.resume={resume} is not a checkpoint, it has no {MARKER}: give {instead}"
            )
        info = read_checkpoint(Path(resume))
        check_fits(info, Path(resume), config, same_run=False)
        _refuse_other_steps(info, Path(resume), folder, config)
        _refuse_to_replace(found, folder, resume, info["step"])


def is_saved_by(info: dict, resume: str) -> bool:
    """Whether a checkpoint in a run's folder was saved by a launch with this checkpoint.resume."""
    return spelled_out(info["resume"]) == spelled_out(resume)


def _refuse_other_steps(info: dict, path: Path, folder: Path, config: dict) -> None:
    old, new = info["config"]["tokens_per_step"], config["tokens_per_step"]
    # the metrics, checkpoints and left-out batches of one folder count steps of one size
    if old != new and lies_in(path, folder):
        raise ValueError(
            f"tokens_per_step is {old} in {path} and {new} in the configuration, and a run counts its steps "
            f"in one: choose another name= to go on from there with checkpoint.resume={path}, or "
            f"tokens_per_step={old}"
        )


def _refuse_to_replace(found: dict[Path, dict], folder: Path, resume: str, step: int) -> None:
    others = [path for path, info in found.items() if not is_saved_by(info, resume)]
    if others and not lies_in(Path(resume), folder):
        # only the newest few are kept: new checkpoints would displace those of the run that was here
        raise ValueError(
            f"checkpoint.resume={resume} is of another run than {others[-1]}, which checkpoints from there "
            "would replace: choose another name=, or move the folder away"
        )
    # later checkpoints of another attempt would count as newer, and those saved now would be removed
    later = [path for path in others if found[path]["step"] > step]
    if later:
        raise ValueError(
            f"checkpoint.resume={resume} goes back to step {step}, but {later[-1]} is later and not of a run "
            "that started there: choose another name=, or move the later checkpoints away"
        )


def read_checkpoint(path: Path) -> dict:
    """What a checkpoint holds besides tensors.

    "step", "val_loss" of that step (None if not measured or not finite), and of the run "resume", "config",
    "corpus" (data.manifest.corpus_digest), "tokenizer" (data.tokenizer.shard_mark), "end_of_text", "left_out"
    (numbers of batches) and the state of its parts. Raises ValueError if there is no readable checkpoint.
    """
    try:
        info = from_json((path / MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not path.exists():
            raise ValueError(f"{path} is not there{REMOVED}") from None
        raise ValueError(f"{path} is not a checkpoint: it has no {MARKER}") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {MARKER} is not JSON ({error})") from None
    if not isinstance(info, dict) or info.get("format") != FORMAT_VERSION:
        raise ValueError(f"{path} is not a nanoflash checkpoint of format {FORMAT_VERSION}")
    lacking = [key for key, kind in NEEDED.items() if not isinstance(info.get(key), kind)]
    if lacking:
        raise ValueError(f"{path} is damaged: {MARKER} lacks {', '.join(lacking)}")
    return info


def verify_checkpoint(path: Path, mark: Callable[[], None] | None = None) -> None:
    """Raises ValueError that names the first shard that is missing, truncated or altered.

    mark: called behind each piece that is read: a large checkpoint may take many minutes. A shard that this
    process has found intact is not read again until its file changes.
    """
    for name, expected in read_checkpoint(path)["shards"].items():
        shard = path / name
        if not shard.exists():
            raise ValueError(f"{path} is damaged: {name} is missing")
        size, checksum = shard.stat().st_size, 0
        if size != expected["bytes"]:
            raise ValueError(f"{path} is damaged: {name} has {size} bytes, not {expected['bytes']}")
        known = (str(shard.resolve()), shard.stat().st_mtime_ns, expected["crc32"])
        if known in _verified:
            continue
        with shard.open("rb") as file:
            while piece := file.read(PIECE):
                checksum = zlib.crc32(piece, checksum)
                if mark:
                    mark()
        if checksum != expected["crc32"]:
            raise ValueError(f"{path} is damaged: {name} has another checksum than when it was written")
        _verified.add(known)


def run_tensors(weights: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Every tensor of a run by the name it has in a checkpoint: model.<weight>, optimizer.<weight>.<key>.

    Names depend on neither the order of the weights nor the number of processes: any layout can read them.
    """
    tensors = {f"model.{name}": value for name, value in weights.state_dict().items()}
    if optimizer is not None:
        for name, parameter in weights.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def load_tensors(path: Path, weights: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Loads the weights, and the optimizer's state if given, from a checkpoint; each process reads its part.

    Raises ValueError for shards that are not safetensors or lack a tensor, and if its run removes the
    checkpoint meanwhile.
    """
    # this import takes a second: a refused command should not wait for it
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(path))
    try:
        # for a file that is not there dcp.load prints a traceback
        saved = reader.read_metadata().state_dict_metadata
        if optimizer is not None:
            _make_places(saved, weights, optimizer)
        with torch.no_grad():
            dcp.load(run_tensors(weights, optimizer), storage_reader=reader)
    except (SafetensorError, dcp.CheckpointException, FileNotFoundError) as error:
        if not (path / MARKER).exists():
            raise ValueError(f"{path} was removed while it was read{REMOVED}") from error
        reason = str(error).splitlines()[-1]
        raise ValueError(f"{path} is damaged or of another program: {reason}") from error


def _make_places(saved: dict, weights: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Creates empty state tensors to load into: a new optimizer has none before its first step."""
    for name, parameter in weights.named_parameters():
        prefix = f"optimizer.{name}."
        for key in (key for key in saved if key.startswith(prefix)):
            size, dtype = saved[key].size, saved[key].properties.dtype
            if size == parameter.shape:
                place = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                place = torch.empty(size, dtype=dtype, device=parameter.device)
            optimizer.state[parameter][key.removeprefix(prefix)] = place


def reads_on(info: dict, config: dict, corpus: str) -> bool:
    """Whether a run continues in the text of a checkpoint: the same sequences in the same order.

    info: what read_checkpoint returned. corpus: corpus_digest of the run's text.
    """
    then = info["config"]
    same_order = all(then[key] == config[key] for key in ORDER_KEYS)
    # older checkpoints do not record it, and fit any
    return same_order and info.get("corpus", corpus) == corpus


def check_fits(info: dict, path: Path, config: dict, *, same_run: bool, corpus: str | None = None) -> None:
    """Raises ValueError that names each key in which a checkpoint differs from the configuration.

    Always compared: the model, the tokenizer, and what the optimizer's state belongs to. same_run also
    compares the weights that the run started from, what fixes the stream of tokens, and what the layers see
    of it: a run that resumes by itself must not change these unnoticed. corpus: corpus_digest of the text,
    once it is prepared.
    """
    # older checkpoints lack these keys: they knew one algorithm, and no adapters or patterns
    before = {"start": {}, "lora": {**config["lora"], "rank": 0}, "separate_documents": False}
    saved = before | info["config"]
    for group, usual in (("optim", {"algorithm": "adamw"}), ("attention", {"patterns": ["dense"]})):
        saved[group] = usual | saved.get(group, {})
    always = [("model", key) for key in config["model"] if key not in FREE_MODEL_KEYS]
    always += [("data", "tokenizer"), ("optim", "algorithm"), ("lora", "rank")]
    if config["lora"]["rank"]:
        always += [("lora", "alpha"), ("lora", "embeddings_and_norms")]
    compared = list(always)
    if same_run:
        compared += [("start", "weights"), *(("", key) for key in (*STREAM_KEYS, *FUNCTION_KEYS))]
        compared += [("attention", "patterns")]
        if config["start"]["weights"] is not None and config["model"].get("rotary") is None:
            # of rotary positions the model holds what it was extended by
            compared.append(("start", "positions"))
            # whatever checkpoint it goes on from, they are extended already
            always.append(("start", "positions"))
            saved["start"] = {"positions": config["start"]["positions"], **saved["start"]}
        if any(pattern != "dense" for pattern in config["attention"]["patterns"]):
            # a pattern is made of blocks, whose size therefore matters
            compared += [("attention", "block_size")]
        compared += [("data", key) for key in identity(config["data"]) if key != "tokenizer"]
    differences, fits_by_path = [], same_run
    for group, key in compared:
        old = (saved[group] if group else saved).get(key)
        new = (config[group] if group else config)[key]
        if (group, key) == ("data", "tokenizer"):
            old, new = _tokenizers(info, old, new, same_run=same_run)
        if spelled_out(old) != spelled_out(new):
            name = f"{group}.{key}" if group else key
            differences.append(f"{name} is {old} in the checkpoint and {new} in the configuration")
            fits_by_path &= (group, key) not in always
    # older checkpoints do not record it, and fit any
    if same_run and corpus is not None and info.get("corpus", corpus) != corpus:
        differences.append(
            f"{config['data']['folder']} holds other tokens than the checkpoint was trained on"
        )
    if differences:
        way_out = "choose another name= for a new run"
        way_out += "," if same_run else " without checkpoint.resume=,"
        way_out += " or the checkpoint's own values"
        if fits_by_path:
            way_out += f", or checkpoint.resume={path} to go on with these on purpose"
            if saved["tokens_per_step"] != config["tokens_per_step"]:
                way_out += ", under another name="
        raise ValueError(f"{path} does not fit this run: {'; '.join(differences)}: {way_out}")


def _tokenizers(info: dict, old: str, new: str, *, same_run: bool) -> tuple[str, str]:
    """What to compare for two values of data.tokenizer: folders may move, and only the tokens count."""
    if "tokenizer" not in info:
        # older checkpoints do not record it; the shards of the same text reveal another tokenizer
        are_folders = not {old, new} & set(TOKENIZERS)
        return (new, new) if same_run and are_folders else (old, new)
    then, now = info["tokenizer"], shard_mark(new)
    if then == now and "end_of_text" in info and new not in TOKENIZERS:
        # the tokenizer.json is the same, but the end of text is named in another file beside it
        then = f"end of text {info['end_of_text']}"
        now = f"end of text {load_tokenizer(new).end_of_text}"
    return (new, new) if then == now else (f"{old} ({then})", f"{new} ({now})")
