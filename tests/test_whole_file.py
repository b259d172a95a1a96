import os

import pytest

from train.whole_file import write_whole


def test_a_text_or_bytes_replace_the_old_ones_and_leave_nothing_beside_them(tmp_path):
    path = tmp_path / "rows.json"
    for content in ("old", "new", b"\x89\r\n"):
        write_whole(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_one_and_the_text_goes_where_it_leads(exists, tmp_path):
    (tmp_path / "disk").mkdir()
    link, there = tmp_path / "rows.json", tmp_path / "disk" / "rows.json"
    if exists:
        there.write_text("old")
    link.symlink_to(there)
    write_whole(link, "new")
    assert link.is_symlink()
    assert there.read_text() == "new"
    assert list((tmp_path / "disk").iterdir()) == [there]


def test_a_text_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path, there = tmp_path / "rows.json", []
    monkeypatch.setattr("os.fsync", lambda number: there.append((path.exists(), os.fstat(number).st_size)))
    write_whole(path, "naïve")
    assert there == [(False, 6)]


def test_a_text_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "folder", "text")
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "half", "half a pair \ud83d")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
