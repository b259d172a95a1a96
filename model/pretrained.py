"""Models in and out: Hugging Face folders of config.json and safetensors, read and written without pickle."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from stat import S_IMODE

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from model.attention import AttentionConfig
from model.config import ModelConfig
from model.families import FAMILIES, Family, family_of
from model.gpt import GPT

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# name of each file where there are several
NUMBERED = f"model-{5 * '[0-9]'}-of-{5 * '[0-9]'}.safetensors"
# the most bytes of one file; more weights go to several files, as in transformers
MAX_SHARD_BYTES = 5_000_000_000
# the types of values in config.json, and the keys whose values must have them
WHOLE_NUMBERS = """
    n_layer n_head n_embd n_positions vocab_size num_hidden_layers num_attention_heads hidden_size
    intermediate_size max_position_embeddings
"""
NUMBERS_IF_ANY = """
    rope_theta factor beta_fast beta_slow attention_factor mscale mscale_all_dim low_freq_factor
    high_freq_factor
"""
KINDS = {
    "a whole number": (int, WHOLE_NUMBERS),
    "a whole number or null": (
        int | None,
        "n_inner num_key_value_heads head_dim original_max_position_embeddings",
    ),
    "a number": (int | float, "layer_norm_epsilon rms_norm_eps"),
    "a number or null": (int | float | None, NUMBERS_IF_ANY),
    "an object or null": (dict | None, "rope_parameters rope_scaling"),
    "true or false": (bool, "tie_word_embeddings"),
}
# the largest size that PyTorch counts
LARGEST_SIZE = 2**63 - 1
# their head, which may have been saved beside an embedding that is tied to it
HEAD = "lm_head.weight"
# our tables that are padded to whole tiles
PADDED = ("token_embedding.weight", "head.weight")


def read_pretrained_config(folder: Path | str) -> ModelConfig:
    """The configuration of the model in a Hugging Face folder. Raises ValueError for what we cannot hold."""
    return _read_config(Path(folder))[1]


def load_pretrained(folder: Path | str, attention: AttentionConfig) -> GPT:
    """The model in a Hugging Face folder (GPT-2, Llama 2 or 3, Qwen 2.5 or 3, or SmolLM), on the CPU.

    Parameters are float32, whatever the file holds. Raises ValueError for another architecture, for a setting
    that changes the model in a way we do not support, for missing, surplus or misshapen tensors, all by name,
    and for a head that config.json ties to the embedding but that differs from it.
    """
    folder = Path(folder)
    # before memory is asked for: a damaged size may be that of a model which nobody could hold
    family, config, files = _check_headers(folder)
    model = GPT.empty(config, attention)
    state = model.state_dict()
    # safetensors would read to a default device
    with torch.device("cpu"):
        for part, tensor in _matched(folder, family, config, files, state):
            part.copy_(tensor[:])
    for ours in PADDED:
        if ours in state:
            state[ours][config.vocab_size :].zero_()
    if config.tied_head:
        _check_tied(folder, family, files, model.head_weight[: config.vocab_size])
    return model


def check_pretrained(folder: Path | str) -> None:
    """Raises ValueError for a folder that load_pretrained would refuse, from its files' headers alone.

    So values are not compared: a head that config.json ties to the embedding passes whatever it holds.
    """
    _check_headers(Path(folder))


def export_pretrained(
    model: GPT,
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    token_ids: dict[str, int | list[int] | None] | None = None,
    files: dict[str, bytes] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a folder that `transformers` loads: config.json and safetensors, in this dtype.

    token_ids: entries of config.json that do not follow from the model, such as eos_token_id. files: others
    to write beside them, by path in the folder.
    Raises ValueError for a model that no family can hold, for weights that dtype makes infinite, for what is
    to be written beside them but cannot be, and for a folder that is not empty; OSError if it cannot be
    written, and then leaves nothing behind.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be floating-point, got {dtype}: use torch.float32 or torch.bfloat16")
    for name, content in (files or {}).items():
        if not isinstance(content, bytes):
            raise ValueError(f"files: {name} must be bytes, got {type(content).__name__}: call .encode()")
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: choose a new folder, nothing is overwritten")
    config = model.config
    architecture = family_of(config)
    family = FAMILIES[architecture]
    tensors = {
        name: _cast(name, part, dtype) for name, part in named_parts(model.state_dict(), family, config)
    }
    theirs = {"architectures": [architecture], **family.write_config(config), **(token_ids or {})}
    theirs["dtype"] = theirs["torch_dtype"] = str(dtype).removeprefix("torch.")
    try:
        text = json.dumps(theirs, indent=2) + "\n"
    except TypeError as error:
        raise ValueError(f"token_ids must be what JSON holds, got {token_ids}: {error}") from error
    others = {folder / name: content for name, content in (files or {}).items()}
    folders = {folder, *folder.parents, *(parent for path in others for parent in path.parents)}
    # the innermost first
    made = sorted((x for x in folders if not x.exists()), key=lambda x: len(x.parts), reverse=True)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _write_tensors(folder, tensors, max_shard_bytes)
        (folder / "config.json").write_text(text, encoding="utf-8")
        for path, content in others.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    # save_file's error on a full disk is not an OSError
    except (OSError, SafetensorError) as error:
        for path in (*weight_files(folder), folder / "config.json", *others):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        for path in made:
            # what another process put there meanwhile stays
            with suppress(OSError):
                path.rmdir()
        raise OSError(
            f"{folder} was not written ({error}): make room there, or choose another folder"
        ) from error


def _cast(name: str, part: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = part.to("cpu", dtype, copy=True).contiguous()
    largest = part.abs().max()
    if largest.isfinite() and not tensor.isfinite().all():
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"{name} has values up to {largest:.3g}, of which {kind} makes infinity: use precision=bf16 or "
            "fp32"
        )
    return tensor


def weight_files(folder: Path) -> list[Path]:
    """The files in a folder to which an export has written its weights."""
    return [path for pattern in (WEIGHTS, INDEX, NUMBERED) for path in folder.glob(pattern)]


def named_parts(
    state: dict[str, Tensor], family: Family, config: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of theirs, by name, as a view of ours; state: parameters, or anything of their shapes."""
    for ours, source in family.tensors(config):
        if ours not in state:
            raise ValueError(f"the model has no {ours}: if it has adapters, merge them first (train/lora.py)")
        tensor = state[ours][: config.vocab_size] if ours in PADDED else state[ours]
        for name, part in zip(source.names, tensor.split(source.rows or tensor.shape[0]), strict=True):
            yield name, part.T if source.transposed else part


def _check_headers(folder: Path) -> tuple[Family, ModelConfig, dict[str, Path]]:
    """What config.json says, and the file of each tensor; raises as check_pretrained."""
    family, config = _read_config(folder)
    files = _find_tensors(folder, family)
    try:
        with torch.device("meta"):
            model = GPT(config, AttentionConfig(implementation="reference"))
    # more numbers than can be counted
    except RuntimeError as error:
        raise ValueError(
            f"{folder / 'config.json'}: no model is as large ({error}): copy it again from its model"
        ) from error
    for _ in _matched(folder, family, config, files, model.state_dict()):
        pass
    return family, config, files


def _matched(
    folder: Path, family: Family, config: ModelConfig, files: dict[str, Path], state: dict[str, Tensor]
) -> Iterator[tuple[Tensor, object]]:
    """Each part of ours with the slice of a file, not read yet, that belongs there. Raises ValueError.

    files: from `_find_tensors`.
    """
    _check_names(folder, family, config, files)
    for name, part in named_parts(state, family, config):
        with _open(files[name]) as file:
            tensor = _slice(file, files[name], name, family)
            if tensor.get_shape() != list(part.shape):
                raise ValueError(
                    f"{folder}: {name} must have shape {tuple(part.shape)}, as config.json says, "
                    f"got {tuple(tensor.get_shape())}"
                )
            yield part, tensor


def _read_config(folder: Path) -> tuple[Family, ModelConfig]:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a Hugging Face model is a folder with config.json in it")
    theirs = _read_json(path)
    names = theirs.get("architectures") or ["none"]
    name = str(names[0] if isinstance(names, list) else names)
    if name not in FAMILIES:
        raise ValueError(f"{path}: architecture {name} is not supported: {', '.join(FAMILIES)} are")
    family = FAMILIES[name]
    _check_types(path, theirs)
    try:
        return family, family.read_config(theirs)
    except KeyError as error:
        raise ValueError(f"{path}: {error.args[0]} is missing") from None
    except (TypeError, OverflowError) as error:
        raise ValueError(
            f"{path}: no model has such a value ({error}): copy it again from its model"
        ) from error


def _check_types(path: Path, theirs: dict, group: str = "") -> None:
    """Raises ValueError for the first value of theirs, nested ones included, that has a wrong type."""
    for kind, (types, keys) in KINDS.items():
        for key in theirs.keys() & set(keys.split()):
            value = theirs[key]
            # a bool is an int to Python
            is_wrong = not isinstance(value, types) or (isinstance(value, bool) and types is not bool)
            # a number of another kind may be any that a float holds
            is_size = isinstance(value, int) and kind.startswith("a whole number")
            if is_wrong or (is_size and abs(value) > LARGEST_SIZE):
                raise ValueError(
                    f"{path}: {group}{key} must be {kind}, got {value!r}: copy it again from its model"
                )
            if isinstance(value, dict):
                _check_types(path, value, f"{key}.")


def _find_tensors(folder: Path, family: Family) -> dict[str, Path]:
    """The full name of each tensor, and the file that holds it."""
    # if both exist, transformers has left the index of weights that it replaced, and reads the single file
    if (folder / WEIGHTS).is_file():
        with _open(folder / WEIGHTS) as file:
            files = dict.fromkeys(file.keys(), folder / WEIGHTS)
    elif (folder / INDEX).is_file():
        files = _read_index(folder)
    else:
        raise ValueError(
            f"{folder} holds neither {WEIGHTS} nor {INDEX}: save the model with safetensors, "
            "transformers' save_pretrained does"
        )
    # a model without its head is saved without the prefix
    return {
        name if name.startswith((family.prefix, "lm_head.")) else family.prefix + name: path
        for name, path in files.items()
    }


def _read_index(folder: Path) -> dict[str, Path]:
    weight_map = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ValueError(
            f"{folder / INDEX} has no weight_map of names to files: copy it again from its model"
        )
    return {name: folder / file for name, file in weight_map.items()}


def _check_names(folder: Path, family: Family, config: ModelConfig, files: dict[str, Path]) -> None:
    needed = {name for _, source in family.tensors(config) for name in source.names}
    found = {name for name in files if not name.endswith(family.ignored_endings)}
    if config.tied_head:
        found.discard(HEAD)
    complaints = []
    for what, names in (("lacks", needed - found), ("has surplus", found - needed)):
        if names:
            shown = ", ".join(sorted(names)[:5])
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            complaints.append(f"{what} {shown}{more}")
    if complaints:
        raise ValueError(
            f"{folder} does not hold the model of its config.json: it {'; it '.join(complaints)}"
        )


def _check_tied(folder: Path, family: Family, files: dict[str, Path], embedding: Tensor) -> None:
    """Raises ValueError if a head tied to the embedding (V, C) was saved as well, and differs from it."""
    if HEAD not in files:
        return
    with _open(files[HEAD]) as file:
        if not torch.equal(_slice(file, files[HEAD], HEAD, family)[:].to(embedding.dtype), embedding):
            raise ValueError(
                f"{folder}: {HEAD} is not the embedding, which config.json ties it to: set "
                "tie_word_embeddings to false there to load both, or leave the head out"
            )


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): copy it again from its model") from error
    if not isinstance(content, dict):
        raise ValueError(
            f"{path} must hold an object, got {type(content).__name__}: copy it again from its model"
        )
    return content


def _open(path: Path):
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{path} is not a readable safetensors file ({error}): copy it again from its model"
        ) from error


def _slice(file, path: Path, name: str, family: Family):
    if name not in file.keys():  # noqa: SIM118, the file is no mapping
        name = name.removeprefix(family.prefix)
    try:
        return file.get_slice(name)
    except SafetensorError as error:
        raise ValueError(f"{path} lacks {name}, which {INDEX} places there: copy both again") from error


def _write_tensors(folder: Path, tensors: dict[str, Tensor], max_shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    room = max_shard_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        _save(tensors, folder / WEIGHTS)
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _save(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    # save_file replaces the file by one that its owner alone can read: keep the mode that any new file gets
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(S_IMODE(mode))
