"""python -m train seq_len=8192 model=gpt2_medium …: composes conf/ with these overrides and trains.

Exit codes: 0 finished; 2 refused, out of memory, or numbers that are not finite; 75 stopped by a signal, with
everything saved (train/interruption.py); 70 a process hangs (train/watchdog.py); 130 stopped by Ctrl-C before
training began.
"""

import logging
import os
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from train.config import parse
from train.interruption import EXIT_INTERRUPTED, Interrupted
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
    except Interrupted as interrupted:
        if rank == 0:
            print(f"{interrupted} (exit code {EXIT_INTERRUPTED})", file=sys.stderr, flush=True)
        _end(EXIT_INTERRUPTED)
    except KeyboardInterrupt:
        print("stopped before training began; the same command starts over", file=sys.stderr, flush=True)
        _end(130)
    except (ValueError, FloatingPointError, MemoryError, OSError) as error:
        if "HYDRA_FULL_ERROR" in os.environ:
            raise
        # every process finds the same mistake in the configuration; other errors have a rank of their own
        if rank == 0 or not isinstance(error, ValueError):
            print(f"error: {error}\n(HYDRA_FULL_ERROR=1 shows the traceback)", file=sys.stderr, flush=True)
        _end(2)


def _end(code: int) -> None:
    """Ends the process without clean-up: gloo's can wait for ever for a process that has already ended."""
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
