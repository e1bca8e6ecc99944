"""What the demo model is trained on, and what it never sees."""

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxhybrid.demo.corpus import Document, library_documents, token_stream, training_batches
from jaxhybrid.demo.specimens import EXPRESSIONS, HELD_OUT


def test_the_split_goes_by_name_and_holds_out_a_few_percent():
    documents = list(library_documents())
    held_out = [document for document in documents if document.held_out]
    share = sum(len(d.text) for d in held_out) / sum(len(d.text) for d in documents)
    assert 0.01 < share < 0.08
    assert held_out == [document for document in library_documents() if document.held_out]
    assert Document("a/b.py", "one").held_out == Document("a/b.py", "two").held_out


def test_what_conversations_quote_is_split_as_they_are():
    for module in EXPRESSIONS:
        assert Document(f"{module}.py", "").held_out == (module in HELD_OUT)


def test_no_tests_and_no_other_packages():
    names = [document.name for document in library_documents()]
    assert "ast.py" in names
    assert "topic/assert" in names
    assert not [name for name in names if {"site-packages", "test", "tests"} & set(name.split("/"))]


def test_windows_are_shuffled_by_seed_and_taken_up_where_they_were_left():
    stream = np.arange(70, dtype=np.uint16)
    first = list(_take(training_batches(stream, window=5, batch=3, seed=1), 8))
    assert sorted(np.concatenate(first[:5])[:14].ravel().tolist()) == stream.tolist()
    for left, right in zip(first[3:], _take(training_batches(stream, 5, 3, seed=1, start=3), 5), strict=True):
        np.testing.assert_array_equal(left, right)
    other = next(training_batches(stream, 5, 3, seed=2))
    assert not np.array_equal(first[0], other)


def test_each_document_is_opened_by_the_end_of_text_token():
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    stream = token_stream(tokenizer, [Document("x", "ab"), Document("y", "b")])
    assert stream.tolist() == [2, 0, 1, 2, 1]


def _take(batches, count):
    return [next(batches) for _ in range(count)]
