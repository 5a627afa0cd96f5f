"""Reading the user's text files: formats, categories, held-out documents, rejected input."""

import gzip
import json
import random

import pytest
from conftest import ALTERNATING, TOKENIZER, byte_tokenizer

from minispec import UserError
from minispec.training.text import (
    Skipped,
    chunks,
    encode,
    held_out_prompts,
    read_corpus,
    read_documents,
)


def talk(question: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


TALK = talk("hi", "hello\nthere")
PARTS = [{"type": "text", "text": "hello\n"}, {"type": "text", "text": "there"}]
FORMS = [
    ({"text": "a tale"}, "a tale"),
    ({"prompt": "hi"}, TALK[:1]),
    ({"prompt": "hi", "completion": "hello\nthere"}, TALK),
    ({"messages": TALK, "source": 3}, TALK),
    ({"messages": [TALK[0], {"role": "assistant", "content": PARTS}]}, TALK),
    ({"messages": []}, []),
]


@pytest.mark.parametrize("row, document", FORMS)
def test_every_format_of_a_line(tmp_path, row, document):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n\n" + json.dumps(row) + "\n")
    assert read_documents(tmp_path / "rows.jsonl") == {"rows": [document, document]}


@pytest.mark.parametrize(
    "name, text",
    [
        ("a.txt", "User: hi\nAssistant: hello\nthere\n<|endoftext|>\n"),
        ("a.jsonl", json.dumps({"messages": TALK}) + "\n"),
    ],
)
def test_byte_order_mark_and_windows_line_ends_are_ignored(tmp_path, name, text):
    (tmp_path / name).write_text("\ufeff" + text, newline="\r\n", encoding="utf-8")
    assert read_documents(tmp_path / name) == {"a": [TALK]}


def test_text_files_hold_documents_and_conversations(tmp_path):
    (tmp_path / "a.txt").write_text(
        "one\n\n\ntwo\n<|endoftext|>\n<|endoftext|>\nUser: hi\nAssistant: hello\nthere\n"
        "<|endoftext|>\n用户：hi\n助手：hello\nthere\n"
    )
    assert read_documents(tmp_path / "a.txt") == {"a": ["one\n\n\ntwo", TALK, TALK]}


def test_other_text_is_cut_at_blank_lines_without_loss():
    rng = random.Random(0)
    parts = ["word " * rng.randint(1, 900) + "end" for _ in range(99)]
    cut = chunks("\n\n".join(parts))
    assert "\n\n".join(cut) == "\n\n".join(parts)
    assert all(len(piece) <= max(2000, *map(len, parts)) + 2 for piece in cut)
    assert all(len(a) + len(b) > 2000 for a, b in zip(cut, cut[1:]))
    assert chunks(" \n\n\n") == []


def test_categories_of_a_folder_are_its_files(tmp_path):
    folder = tmp_path / "mine"
    (folder / "deep" / ".hidden").mkdir(parents=True)
    (folder / "tales.txt").write_text("one\n<|endoftext|>\ntwo")
    (folder / "deep" / "book.txt").write_text("a book")
    (folder / "deep" / "rows.jsonl").write_text('{"text": "row"}')
    (folder / "deep" / ".hidden" / "no.txt").write_text("not this")
    (folder / "notes.md").write_text("nor this")
    (folder / "config.json").write_text('{"vocab_size": 3}')
    categories = {"tales": ["one", "two"], "book": ["a book"], "rows": ["row"]}
    assert read_documents(folder) == categories
    assert read_documents(folder / "notes.md") == {"notes": ["nor this"]}


def test_every_fiftieth_document_is_held_out(tmp_path):
    (tmp_path / "many.txt").write_text("\n<|endoftext|>\n".join(f"text {i}" for i in range(120)))
    (tmp_path / "one.txt").write_text("the only one")
    files = [tmp_path / "many.txt", tmp_path / "one.txt", tmp_path / "many.txt"]
    train, held_out = read_corpus(files)
    assert held_out == {"many": ["text 0", "text 50", "text 100"], "one": []}
    assert len(train["many"]) == 117 and not set(train["many"]) & set(held_out["many"])
    assert train["one"] == ["the only one"]
    prompts = held_out_prompts(tmp_path, None, TOKENIZER, 2, Skipped())
    assert prompts == {"many": [TOKENIZER.encode(f"text {i}") for i in (0, 50)]}
    (tmp_path / "talk.txt").write_text("User: hi\nAssistant: hello\n<|endoftext|>\n" * 3)
    prompts = held_out_prompts(tmp_path, ["talk"], TOKENIZER, 1, Skipped())
    assert prompts == {"talk": [TOKENIZER.chat([{"role": "user", "content": "hi"}])]}
    with pytest.raises(UserError, match="--kind poems: not found in .*, which has many"):
        held_out_prompts(tmp_path, ["poems"], TOKENIZER, 2, Skipped())


def test_conversations_that_the_template_rejects_are_replaced_by_others(tmp_path):
    rows, file = [{"messages": TALK}] * 200, tmp_path / "a.jsonl"
    rejected = [TALK[1:] + TALK[:1], [], [{"role": "user", "content": "a"}, *TALK]]
    for i, messages in enumerate(rejected):
        rows[50 * i] = {"messages": messages}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    strict, skipped = byte_tokenizer(ALTERNATING), Skipped()
    prompts = held_out_prompts(file, None, strict, 2, skipped)["a"]
    # only the first turn of the third one is needed, and the template accepts it
    assert [strict.decode(ids) for ids in prompts] == ["a", "hi"]
    first = f"{file} line 1: the model's chat template rejects this conversation"
    assert str(skipped) == f"documents skipped: 2; the first is {first}: roles must alternate"
    assert skipped.reasons[f"{file} line 51"] == "it is empty"


def test_conversations_are_encoded_with_the_chat_template():
    for document, text in (
        (TALK, "<|endoftext|><|user|>hi<|end|><|assistant|>hello\nthere"),
        (TALK[:1], "<|endoftext|><|user|>hi<|end|><|assistant|>"),
    ):
        ids = encode(document, TOKENIZER)
        assert TOKENIZER.backend.decode(ids, skip_special_tokens=False) == text
    bare = byte_tokenizer(chat_template=None)
    assert encode(TALK, bare) == bare.encode("hi\nhello\nthere")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"a\xff\xfe\xff", "a.txt cannot be read as UTF-8 text"),
        ("a.txt", "text".encode("utf-16"), "a.txt cannot be read as UTF-8 text"),
        ("a.txt", b"te\0xt", "a.txt is not text: it contains NUL bytes"),
        ("a.jsonl", gzip.compress(b'{"text": "a"}', mtime=0), "a.jsonl cannot be read as UTF-8"),
        ("data.parquet", b"PAR1\x15\0", "data.parquet is not text: it contains NUL bytes"),
        ("config.json", b'{\n"vocab_size": 3}', "config.json line 1: must be an object with"),
        ("config.json", b'{"vocab_size": 3}', "config.json line 1: must be an object with"),
        ("a.json", b'[{"text": "a"}]', "a.json line 1: must be an object with string values"),
        ("a.jsonl", b"\n{}\n", "a.jsonl line 2: must be an object with string values"),
        ("a.jsonl", b"[1]", "line 1"),
        ("a.jsonl", b'{"text": "x"', "line 1"),
        ("a.jsonl", b'{"text": 3}', "line 1"),
        ("a.jsonl", b'{"prompt": "\\ud800"}', "line 1"),
        ("a.jsonl", b'{"messages": []}', "no text found"),
        ("a.jsonl", b'{"messages": {}}', "line 1"),
        ("a.jsonl", b'{"messages": [{"role": 3, "content": "a"}]}', "line 1"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "line 1"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "line 1"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": 3}]}', "line 1"),
        ("a.jsonl", b'{"messages": ["hi"]}', "line 1"),
        ("a.jsonl", b"[" * 100_000, "line 1"),
        ("a.jsonl", b'{"a":' * 100_000, "line 1"),
        ("a.txt", b" \n", "no text found"),
        ("a.md", b"text", "holds no .txt, .jsonl file"),
    ],
)
def test_unreadable_text_is_rejected(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_corpus([tmp_path if name == "a.md" else tmp_path / name])
