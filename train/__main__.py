"""python -m train seq_len=8192 model=gpt2_medium …: composes conf/ with these overrides and trains.

Exit codes:
  0    finished
  2    refused, out of memory, a loss or gradients that are not finite, or the system failed (a full disk)
  70   a process hangs (train/watchdog.py)
  75   stopped by a signal, with everything saved (train/interruption.py)
  130  stopped by Ctrl-C before training began
With --multirun, a run that would exit with 2 is reported, the other runs go on, and the command exits with 2
when they are done. A process that torchrun restarts after a 2 exits with 2 at once if the same error would
recur (train/restarts.py).
"""

import errno
import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from yaml import YAMLError

from train.config import Config, parse
from train.interruption import EXIT_INTERRUPTED, Interrupted, answer_ctrl_c
from train.overrides import (
    CONF,
    EXIT_CTRL_C,
    EXIT_REFUSED,
    explain,
    refuse_equal_names,
    refuse_idle_overrides,
    refuse_misread,
)
from train.restarts import comes_again, is_first_here, tell, was_refused
from train.terminal import open_closed_streams, warn_without_source_lines, words_may_fail
from train.weights import start_positions

# as Hydra itself reads it
WANTS_TRACEBACK = os.environ.get("HYDRA_FULL_ERROR") == "1"
# why a write found no room: a full disk, the user's quota, or the limit on file size
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# folders of this process's runs: --multirun trains several
_folders: set[Path] = set()


class RunFailed(Exception):  # noqa: N818, as Interrupted
    """A run of --multirun ended with a reported error; Hydra holds this until the other runs are done."""


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(cfg: DictConfig) -> None:
    code = _run(cfg)
    # with several processes this one may have failed alone while the others wait for it: it must end
    goes_on = HydraConfig.get().mode == RunMode.MULTIRUN and "WORLD_SIZE" not in os.environ
    if code == EXIT_REFUSED and goes_on:
        # not chained to the error itself, whose traceback frames hold the weights
        raise RunFailed
    if code:
        _end(code)


def _run(cfg: DictConfig) -> int:
    """Trains, reports why the run ended if it ended early, and returns the exit code."""
    rank = int(os.environ.get("RANK", "0"))
    # data preparation logs what it does: show that once, not once per process
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("data").setLevel(logging.INFO if rank == 0 else logging.ERROR)
    config = None
    try:
        answer_ctrl_c()
        config = parse(cfg)
        refuse_idle_overrides(HydraConfig.get().overrides.task, config, start_positions(config.start))
        if config.folder in _folders:
            raise ValueError(
                f"name={config.name} was used by an earlier run of this --multirun, from whose end this one "
                "would go on: give each a name of its own, as 'name=seed${seed}' does"
            )
        # this import takes two seconds: a refused command should not wait for it
        from train.loop import train

        _folders.add(config.folder)
        try:
            train(config)
        except ValueError:
            # refused before it began: the name is still free
            _folders.remove(config.folder)
            raise
    except Interrupted as interrupted:
        if rank == 0:
            print(f"{interrupted} (exit code {EXIT_INTERRUPTED})", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except KeyboardInterrupt:
        print("stopped before training began; the same command starts over", file=sys.stderr, flush=True)
        return EXIT_CTRL_C
    except (ValueError, FloatingPointError, MemoryError, OSError) as error:
        if WANTS_TRACEBACK:
            raise
        # every process of a host finds a mistake in the configuration or in the host's files, so the first
        # one reports it; other errors belong to one rank
        is_ours = is_first_here() or not isinstance(error, ValueError)
        reason = str(error)
        if config and isinstance(error, OSError) and error.errno in NO_ROOM and error.filename is None:
            # Python does not say which file could not be written
            reason += f", most likely in {config.folder}: make room there; the same command goes on"
        text = f"error: {reason}\n(HYDRA_FULL_ERROR=1 shows the traceback)"
        tell(text, is_ours=is_ours, again=comes_again(error))
        return EXIT_REFUSED
    return 0


def command() -> None:
    """Runs main, and reports Hydra's own errors in one line too."""
    try:
        refused_before = was_refused()
    except ConnectionError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_REFUSED)
    if refused_before:
        text = (
            f"not started again: it would end the same way, with code {EXIT_REFUSED}; make the change that "
            "the error asks for, above or on another host, and start torchrun again"
        )
        tell(text, is_ours=is_first_here(), again=True)
        sys.exit(EXIT_REFUSED)
    # without this Hydra prints its errors itself and exits with 1
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # Python's argparse takes no more words behind an option that stands between two of them
    sweep = ("--multirun", "-m")
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in sweep)
    try:
        # checked here, where overrides are as typed: inside a run of --multirun Hydra has rewritten them
        refuse_misread(sys.argv[1:], Config)
        refuse_equal_names(sys.argv[1:])
        main()
    except RunFailed:
        sys.exit(EXIT_REFUSED)
    # OSError: --multirun cannot write its multirun.yaml
    except (HydraException, YAMLError, ValueError, OSError) as error:
        if WANTS_TRACEBACK:
            raise
        # every host finds the same mistake in its own conf/
        again = not isinstance(error, OSError)
        tell(f"error: {explain(error, Config)}", is_ours=is_first_here(), again=again)
        sys.exit(EXIT_REFUSED)


def _end(code: int) -> NoReturn:
    """Ends the process without cleaning up: gloo's clean-up can wait forever for a process that is gone."""
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    open_closed_streams()
    warn_without_source_lines()
    with words_may_fail():
        command()
