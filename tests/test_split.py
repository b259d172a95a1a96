"""data/split.py and data/duplicates.py: each text once, validation by document or package."""

import random
from collections import Counter

import pytest

from data import split
from data.duplicates import INITIAL_SLOTS, DigestSet
from data.sources import PythonFiles, standard_library
from data.split import plan_validation, unique_documents


class Documents:
    def __init__(self, *documents):
        self.given = documents

    def documents(self, counts):
        yield from self.given


def test_digests_are_remembered_exactly_while_the_table_grows():
    rng = random.Random(0)
    digests = [rng.getrandbits(64) for _ in range(INITIAL_SLOTS)]
    seen = DigestSet()
    assert all(seen.add(digest) for digest in digests)
    assert not any(seen.add(digest) for digest in digests)
    assert len(seen) == INITIAL_SLOTS


def test_the_digest_that_marks_free_slots_and_those_that_meet_at_the_table_s_end_are_remembered():
    # all of them begin their search in the last slot
    digests = [0, *((number << 16) | (INITIAL_SLOTS - 1) for number in range(1, 50))]
    seen = DigestSet()
    assert [seen.add(digest) for digest in digests] == [True] * 50
    assert [seen.add(digest) for digest in digests] == [False] * 50


def test_texts_that_differ_in_a_lone_surrogate_are_different():
    source = Documents((None, "a\ud800"), (None, "a\ud801"), ("b\ud800", "b"))
    documents = list(unique_documents(source, None, Counter()))
    assert [text for _, text in documents] == ["a\ud800", "a\ud801", "b"]
    assert sum(plan_validation(documents, 0.5, seed=0).is_validation(group) for group, _ in documents) == 1


def test_duplicates_and_blank_texts_are_left_out_and_counted():
    source = Documents(("p", "one"), ("q", "one"), ("q", "one "), ("q", ""), ("q", " \n"))
    counts = Counter()
    assert list(unique_documents(source, None, counts)) == [("p", "one"), ("q", "one ")]
    assert counts == {"duplicate": 1, "empty": 2}


def test_the_number_of_documents_can_be_limited():
    source = Documents(*[(None, text) for text in "aabbccdd"])
    assert [text for _, text in unique_documents(source, 3, Counter())] == ["a", "b", "c"]


def numbered(count: int) -> list[tuple[str, str]]:
    source = Documents(*[(None, f"document {i}") for i in range(count)])
    return list(unique_documents(source, None, Counter()))


@pytest.mark.parametrize("many_groups", [100, 10_000])
def test_validation_does_not_depend_on_the_order_of_documents(monkeypatch, many_groups):
    monkeypatch.setattr(split, "MANY_GROUPS", many_groups)
    documents = numbered(3000)
    chosen = []
    for order in (documents, documents[::-1]):
        plan = plan_validation(order, 0.1, seed=0)
        chosen.append({text for group, text in documents if plan.is_validation(group)})
    assert chosen[0] == chosen[1]
    assert 0.07 < len(chosen[0]) / 3000 < 0.13


@pytest.mark.parametrize("many_groups", [100, 10_000])
def test_another_seed_chooses_other_documents(monkeypatch, many_groups):
    monkeypatch.setattr(split, "MANY_GROUPS", many_groups)
    documents = numbered(500)
    chosen = []
    for seed in (0, 0, 1):
        plan = plan_validation(documents, 0.1, seed)
        chosen.append({text for group, text in documents if plan.is_validation(group)})
    assert chosen[0] == chosen[1] != chosen[2]


def test_a_large_package_does_not_make_validation_larger_than_asked():
    documents = [("huge", "x" * 900)] + [(f"small{i}", "x" * 10) for i in range(10)]
    for seed in range(20):
        plan = plan_validation(documents, 0.05, seed)
        taken = sum(len(text) for group, text in documents if plan.is_validation(group))
        assert taken == 50


@pytest.mark.parametrize(("size", "told"), [(10, True), (100, False)])
def test_it_is_told_if_most_documents_are_held_out_because_they_are_small(size, told, caplog):
    documents = [("book", "x" * 10_000)] + [(f"note{i}", "x" * size) for i in range(30)]
    plan = plan_validation(documents, 0.05, seed=0)
    assert sum(plan.is_validation(group) for group, _ in documents) == (30 if told else 6)
    words = "30 of 31 documents or packages, 2.9% of the text, are for validation, and training sees none"
    assert (words in caplog.text) == told


@pytest.mark.parametrize("count", [2, 3, 10])
def test_few_documents_leave_neither_split_empty(count):
    documents = numbered(count)
    plan = plan_validation(documents, 0.01, seed=0)
    assert sum(plan.is_validation(group) for group, _ in documents) == 1


def test_a_single_document_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match="at least 2, got 1: give more text, or cut a file with split"):
        plan_validation(numbered(1), 0.1, seed=0)


def test_only_as_much_of_a_large_corpus_is_read_as_the_plan_needs(monkeypatch):
    monkeypatch.setattr(split, "MANY_GROUPS", 100)
    documents = iter(numbered(1000))
    plan_validation(documents, 0.1, seed=0)
    assert len(list(documents)) == 1000 - 101


def test_of_the_standard_library_about_five_percent_are_for_validation():
    documents = list(unique_documents(PythonFiles(standard_library()), None, Counter()))
    plan = plan_validation(documents, 0.05, seed=0)
    taken = sum(len(text) for group, text in documents if plan.is_validation(group))
    assert 0.04 < taken / plan.characters <= 0.05
