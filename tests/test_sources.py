"""data/sources.py: every document once, in the same order, whatever else lies around."""

import json
import os
from collections import Counter
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from data import sources
from data.sources import HuggingFace, PythonFiles, TextFiles, installed_packages, standard_library


def texts(source) -> list[str]:
    return [text for _, text in source.documents(Counter())]


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_standard_library_is_there_without_installed_packages():
    paths = [path for _, path in PythonFiles(standard_library())._files(Counter())]
    names = {path.name for path in paths}
    assert {"argparse.py", "decoder.py"} <= names
    assert len(paths) > 500
    assert not any("site-packages" in path.parts for path in paths)


def test_every_installed_package_is_found():
    source = PythonFiles(installed_packages())
    groups = {path.relative_to(root).parts[0] for root, path in source._files(Counter())}
    assert {"numpy", "torch", "json", "argparse.py"} <= groups


def test_python_files_are_grouped_by_top_level_package(tmp_path):
    write(
        tmp_path,
        b__x_dot_py="1",
        b__c__y_dot_py="2",
        a_dot_py="3",
        b__notes_dot_txt="no",
        **{".h__z_dot_py": "no"},
    )
    assert list(PythonFiles([tmp_path]).documents(Counter())) == [("a", "3"), ("b", "1"), ("b", "2")]


def test_text_comes_from_every_kind_of_file_in_sorted_order(tmp_path):
    write(
        tmp_path, a_dot_txt="A", b__c_dot_md="C", b__a_dot_py="B", z_dot_csv="no", **{".hidden_dot_txt": "no"}
    )
    (tmp_path / "j.jsonl").write_text(json.dumps({"text": "J1"}) + "\n\n" + json.dumps({"text": "J2"}) + "\n")
    parquet.write_table(pyarrow.table({"text": ["P1", "P2"], "n": [1, 2]}), tmp_path / "p.parquet")
    source = TextFiles([str(tmp_path)], "text")
    assert texts(source) == ["A", "J1", "J2", "P1", "P2", "B", "C"]
    assert texts(source) == texts(source)


def test_endings_in_capitals_are_read_as_small_ones_are(tmp_path):
    write(tmp_path, A_dot_TXT="A", b_dot_Md="B")
    (tmp_path / "J.JSONL").write_text(json.dumps({"text": "J"}))
    parquet.write_table(pyarrow.table({"text": ["P"]}), tmp_path / "P.PARQUET")
    source = TextFiles([str(tmp_path)], "text")
    source.check()
    assert texts(source) == ["A", "J", "P", "B"]
    alone = TextFiles([str(tmp_path / "P.PARQUET")], "text")
    alone.check()
    assert texts(alone) == ["P"]


def test_single_files_can_be_named(tmp_path):
    write(tmp_path, a_dot_txt="A", b_dot_txt="B")
    assert texts(TextFiles([str(tmp_path / "b.txt")], "text")) == ["B"]


def test_the_text_field_can_be_named(tmp_path):
    (tmp_path / "j.jsonl").write_text('{"text": 1, "body": "yes"}')
    assert texts(TextFiles([str(tmp_path)], "body")) == ["yes"]


def test_a_byte_order_mark_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfyes\r\n")
    assert texts(TextFiles([str(tmp_path)], "text")) == ["yes\r\n"]


def test_what_cannot_be_decoded_is_left_out_and_counted(tmp_path):
    write(tmp_path, good_dot_txt="yes")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "one"}\n{"text": "cut\n\xff\n{"text": null}\n')
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 is what it is not")
    (tmp_path / "deep.jsonl").write_bytes(b"[" * 200_000 + b'\n{"text": "two"}\n')
    for name in ("link.txt", "link.jsonl"):
        os.symlink(tmp_path / "nowhere", tmp_path / name)
    counts = Counter()
    found = [text for _, text in TextFiles([str(tmp_path)], "text").documents(counts)]
    assert found == ["one", "two", "yes"]
    assert counts == {"undecodable": 5, "unreadable": 2, "empty": 1}


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()])
def test_a_parquet_row_that_is_no_utf8_is_left_out_and_counted_and_the_others_are_kept(kind, tmp_path):
    rows = [b"one", "\u00e9".encode("latin-1"), None, b"\xf0\x9f\x99\x82 two"]
    table = pyarrow.table({"text": pyarrow.array(rows, pyarrow.large_binary()).cast(kind, safe=False)})
    parquet.write_table(table, tmp_path / "p.parquet")
    counts = Counter()
    found = [text for _, text in TextFiles([str(tmp_path)], "text").documents(counts)]
    assert found == ["one", "\U0001f642 two"]
    assert counts == {"undecodable": 1, "empty": 1}


def test_a_parquet_file_is_read_whose_name_is_not_utf8(tmp_path):
    parquet.write_table(pyarrow.table({"text": ["one"]}), tmp_path / "p.parquet")
    os.rename(tmp_path / "p.parquet", os.fsencode(tmp_path) + b"/\xff.parquet")
    counts = Counter()
    assert [text for _, text in TextFiles([str(tmp_path)], "text").documents(counts)] == ["one"]
    assert not counts


def test_a_folder_that_cannot_be_read_is_counted_and_the_others_are_read(tmp_path, monkeypatch):
    write(tmp_path, a__a_dot_txt="A", locked__b_dot_txt="B")
    scandir = os.scandir

    # permissions mean nothing to root
    def locked(folder):
        if Path(folder).name == "locked":
            raise PermissionError(13, "Permission denied", folder)
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", locked)
    counts = Counter()
    assert [text for _, text in TextFiles([str(tmp_path)], "text").documents(counts)] == ["A"]
    assert counts == {"unreadable folder": 1}
    with pytest.raises(ValueError, match="hold no file ending in .*, left out: {'unreadable folder': 1}"):
        TextFiles([str(tmp_path / "locked")], "text").check()


def test_a_pipe_is_counted_and_never_waited_for(tmp_path):
    write(tmp_path, a_dot_txt="A", folder_dot_txt__b_dot_txt="B")
    os.mkfifo(tmp_path / "pipe.txt")
    os.symlink(tmp_path / "pipe.txt", tmp_path / "link.txt")
    os.symlink(tmp_path / "nowhere", tmp_path / "broken.txt")
    counts = Counter()
    # none is opened here
    found = [path.name for path in sources.walk(tmp_path, (".txt",), counts)]
    assert found == ["a.txt", "broken.txt", "b.txt"]
    assert counts == {"no file": 2}


def test_linked_folders_are_read_and_none_twice(tmp_path, monkeypatch):
    write(tmp_path, texts__a_dot_txt="A", elsewhere__b_dot_txt="B")
    for name, target in (("link", "elsewhere"), ("again", "elsewhere"), ("circle", "texts")):
        os.symlink(tmp_path / target, tmp_path / "texts" / name)
    source = TextFiles([str(tmp_path / "texts")], "text")
    opened, scandir = [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: opened.append(folder) or scandir(folder))
    assert texts(source) == ["A", "B"]
    # each folder, the link that comes second, and the circle no more than once round: two would take for ever
    assert len(opened) <= 4
    assert source.fingerprint() == source.fingerprint()


def test_a_long_file_comes_in_parts_that_end_with_a_line(tmp_path, monkeypatch):
    # no line ends there
    monkeypatch.setattr(sources, "LONGEST_DOCUMENT", 97)
    text = "".join(f"line {i} é\n" for i in range(100)) + "x" * 500
    write(tmp_path, a_dot_txt=text)
    parts = texts(TextFiles([str(tmp_path)], "text"))
    assert "".join(parts) == text
    assert all(len(part) <= 2 * 97 for part in parts)
    assert all(part.endswith("\n") for part in parts[:8])


# decoded in pieces of 8 KB
@pytest.mark.parametrize("place", [10, 20_000, 34_990])
def test_no_part_is_read_of_a_long_file_that_cannot_be_decoded_to_its_end(tmp_path, monkeypatch, place):
    monkeypatch.setattr(sources, "LONGEST_DOCUMENT", 97)
    text = b"\xef\xbb\xbf" + b"a line\n" * 5000
    (tmp_path / "good.txt").write_bytes(text)
    (tmp_path / "bad.txt").write_bytes(text[:place] + b"\xff" + text[place:])
    counts = Counter()
    found = [text for _, text in TextFiles([str(tmp_path)], "text").documents(counts)]
    assert "".join(found).encode() == text[3:]
    assert counts == {"undecodable": 1}


def test_what_runs_have_written_is_read_only_where_it_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, runs__one__sample_dot_txt="S", runs__b_dot_txt="B")
    write(tmp_path, a_dot_txt="A", sub__runs__c_dot_txt="C")
    # found before runs/ is
    (tmp_path / "link").symlink_to(tmp_path / "runs" / "one")
    for path in (".", str(tmp_path), "../" + tmp_path.name):
        counts = Counter()
        source = TextFiles([path], "text")
        assert [text for _, text in source.documents(counts)] == ["A", "C"]
        assert counts == {"written by a run": 2}
    before = source.fingerprint()
    write(tmp_path, runs__two__sample_dot_txt="T")
    assert source.fingerprint() == before
    assert texts(TextFiles(["runs/one"], "text")) == ["S"]
    assert texts(TextFiles(["runs"], "text")) == ["B", "S", "T"]
    assert texts(TextFiles(["runs/one/sample.txt", "sub/runs"], "text")) == ["S", "C"]


def test_a_missing_path_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"data\.paths names '.*nowhere', which does not exist"):
        TextFiles([str(tmp_path / "nowhere")], "text").check()


def test_a_file_of_another_kind_is_refused_by_name(tmp_path):
    write(tmp_path, a_dot_pdf="")
    with pytest.raises(ValueError, match=r"data\.paths names '.*a\.pdf': a file's suffix must be one of"):
        TextFiles([str(tmp_path / "a.pdf")], "text").check()


def test_a_folder_without_text_files_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"data\.paths .* hold no file ending in"):
        TextFiles([str(tmp_path)], "text").check()


def test_a_wrong_text_field_is_refused_with_place_and_fields(tmp_path):
    (tmp_path / "j.jsonl").write_text('{"body": "x"}')
    with pytest.raises(ValueError, match=r"data\.text_field='text' is not in .*j\.jsonl line 1, which has"):
        texts(TextFiles([str(tmp_path)], "text"))


def test_a_wrong_column_is_refused_with_the_columns(tmp_path):
    parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "p.parquet")
    with pytest.raises(
        ValueError, match=r"data\.text_field='text' is not in .*p\.parquet, which has \['body'\]"
    ):
        texts(TextFiles([str(tmp_path)], "text"))


@pytest.mark.parametrize(
    "line", ['{"text": 3}', '{"text": ["a"]}', '{"body": "x"}', "{}", '"text"', "3", "null", '["text"]']
)
def test_a_line_without_text_is_counted_and_left_out_and_the_others_are_kept(line, tmp_path):
    (tmp_path / "j.jsonl").write_text(f'{{"text": "one"}}\n{line}\n{{"text": "two"}}\n')
    counts = Counter()
    assert [text for _, text in TextFiles([str(tmp_path)], "text").documents(counts)] == ["one", "two"]
    assert counts == {"no text in data.text_field": 1}


def test_a_column_with_a_dot_in_its_name_is_read_beside_a_nested_one(tmp_path):
    table = pyarrow.table({"a": [{"b": "nested"}], "a.b": ["flat"]})
    parquet.write_table(table, tmp_path / "p.parquet")
    assert texts(TextFiles([str(tmp_path)], "a.b")) == ["flat"]


def test_a_column_that_is_no_text_is_refused(tmp_path):
    parquet.write_table(pyarrow.table({"text": [3]}), tmp_path / "p.parquet")
    message = r"data\.text_field='text' must name text, got int in .*p\.parquet: name another field, or take"
    with pytest.raises(ValueError, match=message):
        texts(TextFiles([str(tmp_path)], "text"))


def test_the_fingerprint_changes_with_the_files_alone(tmp_path):
    write(tmp_path, a_dot_txt="A")
    source = TextFiles([str(tmp_path)], "text")
    before = source.fingerprint()
    assert source.fingerprint() == before
    # another text as long as this one was written a moment later
    os.utime(tmp_path / "a.txt", ns=(0, (tmp_path / "a.txt").stat().st_mtime_ns + 1))
    changed = source.fingerprint()
    assert changed != before
    write(tmp_path, b_dot_txt="B")
    assert source.fingerprint() not in (before, changed)


def test_the_fingerprint_changes_with_the_text_behind_a_link(tmp_path):
    write(tmp_path, elsewhere__b_dot_txt="B")
    (tmp_path / "texts").mkdir()
    for name, target in (("link.txt", "b.txt"), ("broken.txt", "nowhere")):
        os.symlink(tmp_path / "elsewhere" / target, tmp_path / "texts" / name)
    source = TextFiles([str(tmp_path / "texts")], "text")
    before = source.fingerprint()
    assert source.fingerprint() == before
    write(tmp_path, elsewhere__b_dot_txt="longer")
    assert source.fingerprint() != before


def test_a_hugging_face_data_set_is_streamed_from_a_local_folder(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for shard in range(2):
        table = pyarrow.table({"text": [f"document {shard} {i}" for i in range(50)], "score": [0.5] * 50})
        parquet.write_table(table, folder / f"train-{shard:05d}-of-00002.parquet")
    source = HuggingFace(str(tmp_path), "", "text")
    source.check()
    assert texts(source) == [f"document {shard} {i}" for shard in range(2) for i in range(50)]


def test_a_configuration_of_a_hugging_face_data_set_can_be_named(tmp_path):
    for name in ("small", "large"):
        write(tmp_path, **{f"{name}__train_dot_jsonl": json.dumps({"content": name})})
    card = "".join(f"- config_name: {name}\n  data_files: {name}/*.jsonl\n" for name in ("small", "large"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{card}---\n")
    assert texts(HuggingFace(str(tmp_path), "large", "content")) == ["large"]
    with pytest.raises(
        ValueError, match=r"data\.text_field='text' is not in .* row 1, which has \['content'\]"
    ):
        texts(HuggingFace(str(tmp_path), "large", "text"))


def test_a_data_set_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"data\.dataset='.*nowhere' cannot be opened"):
        HuggingFace(str(tmp_path / "nowhere"), "", "text").check()


def test_a_data_set_with_a_loading_script_is_refused_with_what_can_be_read(tmp_path):
    write(tmp_path / "old", old_dot_py="raise SystemExit('it was run')")
    message = (
        r"data\.dataset='.*old' cannot be opened \(.*scripts.*\): name a copy of it in Parquet files, or"
    )
    with pytest.raises(ValueError, match=message):
        HuggingFace(str(tmp_path / "old"), "", "text").check()


def test_a_data_set_without_the_split_or_the_configuration_is_refused_by_the_keys(tmp_path):
    write(tmp_path / "tested", test_dot_jsonl=json.dumps({"text": "A"}))
    message = r"data\.dataset='.*tested' with .*\['test'\]\): only its split train is read; .* use data=text"
    with pytest.raises(ValueError, match=message):
        HuggingFace(str(tmp_path / "tested"), "", "text").check()
    write(tmp_path / "named", a__train_dot_jsonl=json.dumps({"text": "A"}))
    write(tmp_path / "named", README_dot_md="---\nconfigs:\n- config_name: a\n  data_files: a/*.jsonl\n---\n")
    with pytest.raises(ValueError, match=r"with data\.dataset_name='b' cannot be opened .*\['a'\]"):
        HuggingFace(str(tmp_path / "named"), "b", "text").check()


def test_blank_lines_between_records_are_nothing_that_is_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n \n')
    counts = Counter()
    documents = TextFiles([str(tmp_path)], "text").documents(counts)
    assert [text for _, text in documents] == ["one", "two"]
    assert not counts
