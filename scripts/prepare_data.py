"""Prepares a corpus ahead of a run: reads the text, drops duplicates, tokenizes, writes shards.

python -m scripts.prepare_data data=text 'data.paths=[my_folder]' data.folder=datasets/mine
"""

import logging
import sys
from dataclasses import dataclass

from hydra.errors import HydraException
from omegaconf import OmegaConf
from yaml import YAMLError

from data.manifest import read_manifest
from data.prepare import DataConfig, prepare
from scripts.arguments import refuse, told_in_one_line
from train.logger import counted
from train.overrides import CONF, checked, compose_conf, explain, refuse_misread


@dataclass
class Arguments:
    data: DataConfig


def main(overrides: list[str]) -> None:
    with told_in_one_line("stopped by Ctrl-C; the same command starts over"):
        if any(word in ("-h", "--help") for word in overrides):
            print_help()
            return
        log = logging.getLogger("data")
        log.setLevel(logging.INFO)
        log.addHandler(logging.StreamHandler())
        try:
            folder = prepare(parse(overrides))
        except (HydraException, YAMLError) as error:
            refuse(explain(error, Arguments))
        for split, content in read_manifest(folder)["splits"].items():
            tokens, documents = (counted(content[f"{noun}s"], noun) for noun in ("token", "document"))
            print(f"{folder} {split}: {tokens}, {documents}")


def print_help() -> None:
    """Prints what the script does, the corpora, and every key with its meaning."""
    names = ", ".join(sorted(path.stem for path in (CONF / "data").glob("*.yaml")))
    print(f"{__doc__}\ndata=NAME, one of: {names}; then data.KEY=VALUE for each KEY of data=pystdlib:\n")
    print((CONF / "data" / "pystdlib.yaml").read_text(encoding="utf-8"), end="")


def parse(overrides: list[str]) -> DataConfig:
    """The data part of conf/config.yaml, overridden. Raises ValueError for other keys and wrong types."""
    for override in overrides:
        if not override.lstrip("+~").startswith(("data=", "data.")):
            raise ValueError(f"{override!r} is no argument of this script: use data=NAME and data.KEY=VALUE")
    refuse_misread(overrides, Arguments)
    return checked(OmegaConf.create({"data": compose_conf(overrides).data}), Arguments).data


if __name__ == "__main__":
    main(sys.argv[1:])
