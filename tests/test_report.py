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
