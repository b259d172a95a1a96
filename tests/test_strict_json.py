import json
import math

import pytest

from train.strict_json import from_json, to_json


@pytest.mark.parametrize("indent", [None, 1])
def test_numbers_that_are_not_finite_are_null_wherever_they_are(indent):
    value = {"a": math.nan, "b": [1.5, math.inf, (2, -math.inf)], "c": {"d": math.nan}, "e": "NaN", "f": True}
    text = to_json(value, indent)
    read = json.loads(text, parse_constant=pytest.fail)
    assert read == {"a": None, "b": [1.5, None, [2, None]], "c": {"d": None}, "e": "NaN", "f": True}
    assert from_json(text) == read


def test_what_older_files_have_in_their_place_is_read_as_null():
    assert from_json('{"a": NaN, "b": [Infinity, -Infinity, 0.5]}') == {"a": None, "b": [None, None, 0.5]}
