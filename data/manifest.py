"""manifest.json: what a prepared folder holds and what it was prepared from; it is written last."""

import json
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

from data.shards import HEADER_BYTES

FILE = "manifest.json"
FORMAT = "nanoflash corpus"
VERSION = 1
SPLITS = ("train", "val")


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write content, with format and version, as the manifest of folder."""
    content = {"format": FORMAT, "version": VERSION, **content}
    with Path(folder, FILE).open("w", encoding="utf-8") as file:
        file.write(json.dumps(content, indent=2) + "\n")
        file.flush()
        # like the shards: a folder under its final name is whole, whenever the power fails
        os.fsync(file.fileno())


def read_manifest(folder: Path, key: str = "data.folder") -> dict[str, Any]:
    """The manifest of folder: config, tokenizer, documents and splits -> {tokens, documents, shards}.

    key: the setting that named the folder. Raises ValueError if there is none, or it is not ours or of
    another version.
    """
    path = Path(folder, FILE)
    if not path.is_file():
        raise ValueError(
            f"{key}={str(folder)!r} has no {FILE}, so it was not made by prepare: choose another {key}, or "
            "prepare it with python -m scripts.prepare_data"
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _damaged(path, error) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} is no manifest of ours, format must be {FORMAT!r}: choose another {key}")
    if manifest.get("version") != VERSION:
        raise ValueError(
            f"{path} must have version {VERSION}, got {manifest.get('version')}: delete its folder"
        )
    splits = manifest.get("splits")
    lacking = [] if isinstance(manifest.get("config"), dict) else ["config"]
    lacking += [] if isinstance(splits, dict) and splits.keys() >= set(SPLITS) else ["splits"]
    if lacking:
        raise _damaged(path, f"it lacks {', '.join(lacking)}")
    return manifest


def _damaged(path: Path, fault: object) -> ValueError:
    return ValueError(f"{path} is damaged ({fault}): delete the folder {path.parent} and prepare it again")


def corpus_digest(folder: Path) -> str:
    """A digest of the tokens in a prepared folder, 32 hexadecimal digits, from its shards' headers.

    These hold the number of tokens and their checksum, so nothing more need be read.
    """
    splits, digest = read_manifest(folder)["splits"], blake2b(digest_size=16)
    for split in SPLITS:
        for shard in splits[split]["shards"]:
            with Path(folder, shard["file"]).open("rb") as file:
                digest.update(file.read(HEADER_BYTES))
    return digest.hexdigest()
