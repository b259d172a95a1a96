"""key=value arguments for the scripts, in Hydra's syntax, checked against a dataclass."""

import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from train.interruption import answer_ctrl_c
from train.overrides import EXIT_CTRL_C, EXIT_REFUSED, wrong_value, wrong_yaml
from train.terminal import open_closed_streams

Arguments = TypeVar("Arguments")
# what --help says about the argument `overwrite`, which accompanies a `result_file`
OVERWRITE = "replace results that are there"
# an error lists all arguments if there are at most this many
FEW = 6


def argument(default, meaning: str, *, path: bool = False):
    """A field of an arguments dataclass: its default (... if it is required) and what --help says about it.

    path: the text, or each text of the list, names a file or folder; a leading tilde is the home folder.
    """
    metadata = {"meaning": meaning, "path": path}
    if default is ...:
        return field(default="???", metadata=metadata)
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


def result_file(default: str, meaning: str, *, picture: bool = False, table: bool = False):
    """An argument that names the file a script writes; the dataclass also needs one named `overwrite`.

    picture, table: the script also writes one, under the same name with the ending .png or .md. `run_script`
    refuses files that exist already, unless overwrite=true.
    """
    endings = [""] + [".png"] * picture + [".md"] * table
    return field(default=default, metadata={"meaning": meaning, "path": True, "endings": endings})


def command_line(arguments) -> list[str]:
    """The command-line words that give `run_script` these arguments, without those at their defaults."""
    words = []
    for item in fields(arguments):
        given = getattr(arguments, item.name)
        usual = item.default if item.default is not MISSING else item.default_factory()
        if given != usual:
            # run_script reads YAML, and JSON is YAML
            words.append(f"{item.name}={given if item.type is str else json.dumps(given)}")
    return words


def run_script(
    main: Callable[[Arguments], None],
    arguments: type[Arguments],
    description: str,
    words: str | None = None,
    others: str | None = None,
) -> None:
    """Calls main with the command line's arguments; --help lists them; a wrong value is a one-line error.

    Text is taken as typed; lists and numbers are YAML. words: the list argument that collects words without
    a key. others: the list argument that collects key=value words of unknown keys, for python -m train.
    """
    given = OmegaConf.create()
    with told_in_one_line("stopped by Ctrl-C"):
        try:
            if any(word in ("-h", "--help") for word in sys.argv[1:]):
                print_help(arguments, description)
                return
            given, texts = read_words(arguments, words, others)
            # OmegaConf would interpret ??? and ${...} in text: merge empty values, set it afterwards
            empty = {name: type(value)() for name, value in texts.items()}
            merged = OmegaConf.merge(OmegaConf.structured(arguments), given, empty)
            complete = without_tildes(replace(OmegaConf.to_object(merged), **texts))
            check_results(complete)
            main(complete)
        except ConfigKeyError as error:
            refuse(f"{unknown_argument(error.full_key, arguments)}--help lists them")
        except OmegaConfBaseException as error:
            refuse(f"{wrong_value(error, given)}: --help lists the arguments")
        except YAMLError as error:
            refuse(wrong_yaml(error))


@contextmanager
def told_in_one_line(stopped: str) -> Iterator[None]:
    """Ends a script that raises ValueError or OSError in one line, and by SIGPIPE if its reader has gone.

    stopped: what to say after Ctrl-C. Characters that the terminal's encoding lacks are printed with escapes.
    """
    open_closed_streams()
    if hasattr(sys.stdout, "reconfigure"):
        # as python -m train does
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        answer_ctrl_c()
        yield
        # only this may show that the reader of a pipe has gone
        sys.stdout.flush()
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            end_if_unread()
        refuse(error)
    except KeyboardInterrupt:
        stop(stopped)


def read_words(arguments: type, words: str | None, others: str | None) -> tuple[DictConfig, dict]:
    """The command line's values: those that are YAML, and by name those that are text, as typed.

    words, others: as for run_script. Raises ValueError for a word without a key that none collects, and for
    a list that is given by its own key as well.
    """
    bare = [word for word in sys.argv[1:] if "=" not in word]
    if bare and words is None:
        raise ValueError(f"arguments are key=value, got {bare[0]!r}: --help lists them")
    kinds = {item.name: item.type for item in fields(arguments)}
    given, texts, foreign = [], {}, []
    for word in sys.argv[1:]:
        name, is_pair, value = word.partition("=")
        if is_pair and others and name not in kinds:
            foreign.append(word)
        elif is_pair and kinds.get(name) is str:
            # YAML would turn "def f(x):" into a mapping, and "# a comment" into nothing
            texts[name] = value
        elif is_pair:
            given.append(word)
    for name, collected in ((others, foreign), (words, bare)):
        if not collected:
            continue
        if any(word.startswith(f"{name}=") for word in given):
            raise ValueError(f"{name}= is given, and {collected[0]} belongs to it too: give all in one way")
        texts[name] = collected
    return OmegaConf.from_cli(given), texts


def print_help(arguments: type, description: str) -> None:
    """Prints what a script does, and its arguments with meanings and defaults."""
    print(f"{description.strip()}\n\narguments, as key=value:")
    for item in fields(arguments):
        default = item.default if item.default is not MISSING else item.default_factory()
        value = "(required)" if default == "???" else f"[{default}]"
        print(f"  {item.name:<16} {item.metadata['meaning']} {value}")


def unknown_argument(name: str, arguments: type) -> str:
    """An error text: no such argument, and which may be meant; the caller adds where all are listed."""
    names = [item.name for item in fields(arguments)]
    near = get_close_matches(name, names, 1)
    guess = f"did you mean {near[0]}? " if near else ""
    if not near and len(names) <= FEW:
        guess = f"there are {', '.join(names)}, and "
    return f"{name} is no argument: {guess}"


def without_tildes(arguments: Arguments) -> Arguments:
    """The arguments with ~ in paths expanded, since a shell does not expand it within KEY=VALUE."""
    paths = {
        item.name: getattr(arguments, item.name) for item in fields(arguments) if item.metadata.get("path")
    }
    expand = os.path.expanduser
    expanded = {
        name: expand(path) if isinstance(path, str) else [expand(one) for one in path]
        for name, path in paths.items()
    }
    return replace(arguments, **expanded)


def check_results(arguments) -> None:
    """Raises ValueError, before anything is measured, for a result file that cannot be written.

    Also for one that exists already, without overwrite=true, for one that another argument writes too, and
    for overwrite=true without any.
    """
    writers: dict[Path, str] = {}
    for item in fields(arguments):
        name = getattr(arguments, item.name)
        if "endings" not in item.metadata:
            continue
        if not name:
            # elsewhere empty text means that no file is wanted
            if item.default:
                raise ValueError(f"{item.name} must name a file, got nothing: use {item.name}={item.default}")
            continue
        check_place(item.name, name)
        # a picture or table differs from the rows' file in its ending only, and would replace it here
        if Path(name).suffix in item.metadata["endings"][1:]:
            raise ValueError(
                f"{item.name}={name} must name the JSON file, beside which a {Path(name).suffix} is "
                f"written: use {Path(name).with_suffix('.json')}"
            )
        for ending in item.metadata["endings"]:
            path = Path(name).with_suffix(ending) if ending else Path(name)
            other = writers.setdefault(path.resolve(), item.name)
            if other != item.name:
                raise ValueError(
                    f"{item.name}={name}: {path} is what {other}={getattr(arguments, other)} writes already, "
                    "choose another name"
                )
            if path.is_dir():
                raise ValueError(f"{item.name}={name}: {path} is a folder, choose another name")
            # a link that leads nowhere is somebody's too
            if os.path.lexists(path) and not arguments.overwrite:
                raise ValueError(
                    f"{item.name}={name}: {path} exists, choose another name, or add overwrite=true"
                )
    results = [item.name for item in fields(arguments) if "endings" in item.metadata]
    if results and not writers and arguments.overwrite:
        raise ValueError(f"overwrite=true, but no file is written: give {results[0]}=FILE, or leave it out")


def check_some(arguments, *names: str) -> None:
    """Raises ValueError if one of the named arguments is an empty list."""
    for name in names:
        if not getattr(arguments, name):
            raise ValueError(f"nothing to measure: {name} must not be empty, name one")


def check_least(arguments, *names: str) -> None:
    """Raises ValueError if one of the named arguments is, or holds, a number below 1."""
    for name in names:
        given = getattr(arguments, name)
        numbers = given if isinstance(given, list) else [given]
        if any(number is not None and number < 1 for number in numbers):
            raise ValueError(f"{name} must be at least 1, got {given}")


def check_as_many(arguments, *names: str) -> None:
    """Raises ValueError unless the named arguments, which are lists, hold as many values each."""
    counts = [len(getattr(arguments, name)) for name in names]
    if len(set(counts)) > 1:
        raise ValueError(
            f"{', '.join(names)} must hold as many values each, got {', '.join(map(str, counts))}: give the "
            "others, too"
        )


def check_place(key: str, name: str) -> None:
    """Raises ValueError if no file of that name, or nothing in a folder of that name, can be written."""
    place = Path(name).absolute()
    # a folder that is there is written into
    folder = place if place.is_dir() else next(path for path in place.parents if path.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{key}={name}: nothing can be written to {folder}, choose another place")


def refuse(reason: object) -> NoReturn:
    """Ends a script whose input is wrong, in the way of python -m train."""
    print(f"error: {reason}", file=sys.stderr)
    sys.exit(EXIT_REFUSED)


def end_if_unread() -> None:
    """Ends a script by SIGPIPE, without a message, if the reader of its output has gone, as `head` does."""
    stdout = select.poll()
    stdout.register(sys.stdout, select.POLLOUT)
    if any(event & select.POLLERR for _, event in stdout.poll(0)):
        # Python ignores SIGPIPE by default
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)


def stop(remark: str) -> NoReturn:
    """Ends a script after Ctrl-C, in the way of python -m train."""
    print(remark, file=sys.stderr)
    sys.exit(EXIT_CTRL_C)
