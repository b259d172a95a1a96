from pathlib import Path
from types import SimpleNamespace

import torch

from tests.conftest import pytest_collection_modifyitems
from tests.report import read_cases, table

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_holds_a_promise[1-2]"/>
<testcase classname="tests.test_a" name="test_holds_a_promise[3-4]">
<failure message="no">no</failure>
</testcase>
<testcase classname="tests.test_b" name="test_other"><skipped message="one GPU"/></testcase>
</testsuite></testsuites>"""


def test_every_case_is_counted_under_its_promise_by_its_result(tmp_path):
    (tmp_path / "junit.xml").write_text(JUNIT)
    lines = table(read_cases(tmp_path / "junit.xml"), {"gpu": "some"}).splitlines()
    assert "gpu some" in lines
    assert "1 passed, 1 failed, 1 skipped" in lines
    assert lines[-2:] == ["| test_a | holds a promise | 1 | 1 |  |", "| test_b | other |  |  | 1 |"]


def test_with_a_gpu_every_test_that_takes_a_device_is_one_of_the_gpus(monkeypatch):
    marks = {}

    def item(name: str, *fixtures: str) -> SimpleNamespace:
        marks[name] = []
        add_marker = marks[name].append
        return SimpleNamespace(path=Path(name), fixturenames=fixtures, keywords={}, add_marker=add_marker)

    items = [item("test_a.py", "seed", "device"), item("test_b.py", "seed")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pytest_collection_modifyitems(items)
    assert marks == {"test_a.py": [], "test_b.py": []}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pytest_collection_modifyitems(items)
    assert marks == {"test_a.py": ["gpu"], "test_b.py": []}
