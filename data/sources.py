"""Where documents come from: each source gives them one at a time, in the same order on every pass.

A document is (group, text). Documents of one group go to the same side of the validation split: for Python
files the group is the top-level package, elsewhere it is None and every document stands for itself.
"""

import hashlib
import json
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

PLAIN_SUFFIXES = (".txt", ".md", ".py")
TEXT_SUFFIXES = (*PLAIN_SUFFIXES, ".jsonl", ".parquet")
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
# where training writes, in the working directory: samples and metrics of models are no text to train on
RUNS = Path("runs")
# in characters; a longer file becomes several documents, cut at line ends: memory must not grow with the
# longest file
LONGEST_DOCUMENT = 1 << 22
PARQUET_ROWS = 64
PARQUET_BUFFER_BYTES = 1 << 20

Document = tuple[str | None, str]


class Source(Protocol):
    """What every source offers."""

    def check(self) -> None:
        """Raise ValueError naming the configuration key, before any work, if the source cannot be read."""

    def documents(self, counts: Counter[str]) -> Iterator[Document]:
        """Each document; what is left out is counted in counts by its reason."""

    def fingerprint(self) -> str | None:
        """A text that changes when the files change; None if that cannot be told, or they are gone."""


class PythonFiles:
    """Every .py file below the roots, grouped by top-level package or module."""

    def __init__(self, roots: list[Path]) -> None:
        self.roots = roots

    def check(self) -> None:
        if not any(True for _ in self._files(Counter())):
            raise ValueError(
                f"data.source finds no .py file in {[str(root) for root in self.roots]}: use data=text"
            )

    def documents(self, counts: Counter[str]) -> Iterator[Document]:
        for root, path in self._files(counts):
            for text in read_plain(path, counts):
                yield path.relative_to(root).parts[0].removesuffix(".py"), text

    def fingerprint(self) -> str:
        return fingerprint(path for _, path in self._files(Counter()))

    def _files(self, counts: Counter[str]) -> Iterator[tuple[Path, Path]]:
        for root in self.roots:
            for path in walk(root, (".py",), counts, skip=PACKAGE_FOLDERS):
                yield root, path


def standard_library() -> list[Path]:
    """The folder of the running Python's standard library: 31 MB in Python 3.11."""
    return [Path(sysconfig.get_path("stdlib"))]


def installed_packages() -> list[Path]:
    """The standard library, and each site-packages or dist-packages folder that Python imports from."""
    folders = {Path(entry).resolve() for entry in sys.path if Path(entry).name in PACKAGE_FOLDERS}
    return standard_library() + sorted(folder for folder in folders if folder.is_dir())


class TextFiles:
    """The user's own files, and those in the user's folders, by suffix: .txt .md .py .jsonl .parquet.

    A suffix may be in capitals. A plain file is one document, and so is each .jsonl line and .parquet row.
    Hidden files and folders are left out, and runs/ within a given folder; linked ones are read.
    text_field: which field of a line or row is the text.
    """

    def __init__(self, paths: list[str], text_field: str) -> None:
        self.paths = [Path(path).expanduser() for path in paths]
        self.text_field = text_field

    def check(self) -> None:
        for path in self.paths:
            if not path.exists():
                raise ValueError(
                    f"data.paths names {str(path)!r}, which does not exist (in {Path.cwd()}): correct it"
                )
            if path.is_file() and path.suffix.lower() not in TEXT_SUFFIXES:
                raise ValueError(
                    f"data.paths names {str(path)!r}: a file's suffix must be one of {TEXT_SUFFIXES}"
                )
        counts: Counter[str] = Counter()
        if not any(True for _ in self._files(counts)):
            raise ValueError(
                f"data.paths {[str(p) for p in self.paths]} hold no file ending in {TEXT_SUFFIXES}, "
                f"left out: {dict(counts) or 'nothing'}"
            )

    def documents(self, counts: Counter[str]) -> Iterator[Document]:
        readers: dict[str, Callable[[Path, Counter[str]], Iterator[str]]] = {
            ".jsonl": self._read_jsonl,
            ".parquet": self._read_parquet,
        }
        for path in self._files(counts):
            for text in readers.get(path.suffix.lower(), read_plain)(path, counts):
                yield None, text

    def fingerprint(self, *, as_written: bool = False) -> str | None:
        if not all(path.exists() for path in self.paths):
            return None
        return fingerprint(self._files(Counter()), as_written=as_written)

    def _files(self, counts: Counter[str]) -> Iterator[Path]:
        runs = RUNS.resolve()
        for path in self.paths:
            holds_runs = path.resolve() in runs.parents
            for file in [path] if path.is_file() else walk(path, TEXT_SUFFIXES, counts):
                if holds_runs and runs in file.resolve().parents:
                    counts["written by a run"] += 1
                else:
                    yield file

    def _read_jsonl(self, path: Path, counts: Counter[str]) -> Iterator[str]:
        has_field = False
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if not line.strip():
                        continue
                    try:
                        record = json.loads(line)
                    # not UTF-8 or not JSON, both ValueErrors, or nested deeper than Python reads
                    except (ValueError, RecursionError):
                        counts["undecodable"] += 1
                        continue
                    is_object = isinstance(record, dict)
                    is_there = is_object and self.text_field in record
                    has_field = has_field or is_there
                    if is_object and not has_field:
                        # no line so far has it: its name may be wrong
                        raise _no_field(self.text_field, f"{path} line {number}", list(record))
                    # one such line does not speak against the field, as a column of numbers does
                    if not is_there or not isinstance(record[self.text_field], str | None):
                        counts["no text in data.text_field"] += 1
                        continue
                    yield from text_of(record, self.text_field, f"{path} line {number}", counts)
        # as in read_plain
        except OSError:
            counts["unreadable"] += 1

    def _read_parquet(self, path: Path, counts: Counter[str]) -> Iterator[str]:
        # a slow import, for these files only
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        try:
            # a buffer instead of whole column chunks: a row group can be gigabytes
            with (
                # pyarrow opens no name that is not UTF-8
                path.open("rb") as raw,
                ParquetFile(raw, buffer_size=PARQUET_BUFFER_BYTES, pre_buffer=False) as file,
            ):
                if self.text_field not in file.schema_arrow.names:
                    raise _no_field(self.text_field, str(path), file.schema_arrow.names)
                for batch in file.iter_batches(PARQUET_ROWS, columns=[self.text_field], use_threads=False):
                    # a.b also selects the field b of a column a, which may come first
                    for value in batch.column(batch.schema.names.index(self.text_field)):
                        try:
                            record = {self.text_field: value.as_py()}
                        # what was written as text is not always UTF-8
                        except UnicodeDecodeError:
                            counts["undecodable"] += 1
                            continue
                        yield from text_of(record, self.text_field, str(path), counts)
        # not Parquet, or damaged
        except (ArrowException, OSError):
            counts["undecodable"] += 1


class HuggingFace:
    """The train split of a data set on the Hugging Face hub or in a local folder, streamed.

    dataset: "owner/name" on the hub, or a folder that `datasets` can load. configuration: which of its
    configurations, empty if it has just one. text_field: which column is the text.
    """

    def __init__(self, dataset: str, configuration: str, text_field: str) -> None:
        self.dataset = dataset
        self.configuration = configuration
        self.text_field = text_field

    def check(self) -> None:
        self._open()

    def documents(self, counts: Counter[str]) -> Iterator[Document]:
        for number, record in enumerate(self._open(), start=1):
            for text in text_of(record, self.text_field, f"{self.dataset} row {number}", counts):
                yield None, text

    def fingerprint(self) -> str | None:
        folder = Path(self.dataset)
        # what is on the hub cannot be told without loading it
        return fingerprint(walk(folder, ("",), Counter())) if folder.is_dir() else None

    def _open(self) -> Any:
        # a slow import, for this source only
        from datasets import load_dataset

        try:
            return load_dataset(self.dataset, self.configuration or None, split="train", streaming=True)
        # no such data set or folder, and no way to the hub
        except (FileNotFoundError, ConnectionError) as error:
            raise ValueError(
                f"data.dataset={self.dataset!r} cannot be opened ({error}): correct the name, reach the "
                "network, or name a local folder with the same files"
            ) from error
        except RuntimeError as error:
            raise ValueError(
                f"data.dataset={self.dataset!r} cannot be opened ({error}): name a copy of it in Parquet "
                "files, or download its text and use data=text"
            ) from error
        # no split train, no such configuration, or several and none named
        except ValueError as error:
            raise ValueError(
                f"data.dataset={self.dataset!r} with data.dataset_name={self.configuration!r} cannot be "
                f"opened ({' '.join(str(error).split())}): only its split train is read; change "
                "data.dataset_name, or download its text and use data=text"
            ) from error


def walk(
    root: Path, suffixes: tuple[str, ...], counts: Counter[str], skip: tuple[str, ...] = ()
) -> Iterator[Path]:
    """Each file below root with one of suffixes, sorted; without hidden ones and folders named in skip.

    suffixes: in lower case, those of the files may be in capitals.
    Linked folders are entered like others, but none twice, so that circular links end.
    Folders that cannot be read, and pipes and the like, are counted in counts.
    """

    def unreadable(error: OSError) -> None:
        counts["unreadable folder"] += 1

    entered = set()
    for folder, folders, files in os.walk(root, onerror=unreadable, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in entered:
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        for name in sorted(files):
            if not name.lower().endswith(suffixes) or name.startswith("."):
                continue
            path = Path(folder, name)
            # a pipe, from which a read would never return; dangling links are left for the reader to count
            if not os.path.isfile(path) and os.path.exists(path):
                counts["no file"] += 1
                continue
            yield path


def read_plain(path: Path, counts: Counter[str]) -> Iterator[str]:
    """The text of a UTF-8 file; one longer than LONGEST_DOCUMENT in parts, cut at line ends."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            if os.fstat(file.fileno()).st_size > LONGEST_DOCUMENT:
                # no part is taken of a file that cannot be read to its end
                while file.read(LONGEST_DOCUMENT):
                    pass
                file.seek(0)
            # to the end of the line, unless that is as far away again
            yield file.read(LONGEST_DOCUMENT) + file.readline(LONGEST_DOCUMENT)
            while part := file.read(LONGEST_DOCUMENT) + file.readline(LONGEST_DOCUMENT):
                yield part
    except UnicodeDecodeError:
        counts["undecodable"] += 1
    # a broken link, or a file that this user may not read
    except OSError:
        counts["unreadable"] += 1


def text_of(record: dict[str, Any], text_field: str, place: str, counts: Counter[str]) -> Iterator[str]:
    """record[text_field], unless it is null. Raises ValueError, naming data.text_field, if it is no text."""
    if text_field not in record:
        raise _no_field(text_field, place, list(record))
    text = record[text_field]
    if text is None:
        counts["empty"] += 1
    elif isinstance(text, str):
        yield text
    else:
        raise ValueError(
            f"data.text_field={text_field!r} must name text, got {type(text).__name__} in {place}: name "
            "another field, or take that one out"
        )


def fingerprint(paths: Iterator[Path], *, as_written: bool = False) -> str:
    """A digest of each path, size and time of change, without reading the files.

    as_written: takes relative paths as they are, not made absolute.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        try:
            # follows links: the status is that of the text
            status = path.stat()
            seen = f"{status.st_size}\0{status.st_mtime_ns}"
        # in a folder that may only be listed, or a dangling link
        except OSError:
            seen = "unreadable"
        # a name need not be UTF-8
        name = path if as_written else os.path.abspath(path)
        digest.update(os.fsencode(name) + f"\0{seen}\n".encode())
    return digest.hexdigest()


def _no_field(text_field: str, place: str, found: object) -> ValueError:
    return ValueError(
        f"data.text_field={text_field!r} is not in {place}, which has {found}: name one of these"
    )
