"""python -m train seq_len=8192 model=gpt2_medium …: composes conf/ with these overrides and trains."""

import logging
import os
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from train.config import parse
from train.loop import train

CONF = Path(__file__).resolve().parent.parent / "conf"


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(cfg: DictConfig) -> None:
    rank = int(os.environ.get("RANK", "0"))
    # data preparation says what it does; once, not once a process
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("data").setLevel(logging.INFO if rank == 0 else logging.ERROR)
    try:
        train(parse(cfg))
    except (ValueError, FloatingPointError) as error:
        if "HYDRA_FULL_ERROR" in os.environ:
            raise
        # every process finds the same mistake in the configuration; bad numbers have a rank of their own
        if rank == 0 or isinstance(error, FloatingPointError):
            print(f"error: {error}\n(HYDRA_FULL_ERROR=1 shows the traceback)", file=sys.stderr, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
