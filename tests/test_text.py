"""A user's files are read as documented: forms, kinds, what is held out, what is refused."""

import json
import random

import pytest
from conftest import TOKENIZER, byte_tokenizer

from minispec import UserError
from minispec.text import encode, held_out_prompts, pieces, read_corpus, read_kinds


def talk(question: str, answer: str) -> list[dict]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


TALK = talk("hi", "hello\nthere")
FORMS = [
    ({"text": "a tale"}, "a tale"),
    ({"text": "Add.", "code": "def f():\r\n    pass\r\n"}, talk("Add.", "def f():\n    pass")),
    ({"question": "2+2?", "answer": "2+2 = <<2+2=4>>4"}, talk("2+2?", "2+2 = 4")),
    ({"prompt": "hi"}, TALK[:1]),
    ({"prompt": "hi", "completion": "hello\nthere"}, TALK),
    ({"messages": TALK, "source": 3}, TALK),
]


@pytest.mark.parametrize("row, document", FORMS)
def test_every_form_of_a_line(tmp_path, row, document):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n\n" + json.dumps(row) + "\n")
    assert read_kinds(tmp_path / "rows.jsonl") == {"rows": [document, document]}


def test_documents_of_a_text_and_its_conversations(tmp_path):
    (tmp_path / "a.txt").write_text(
        "one\n\n\ntwo\n<|endoftext|>\n<|endoftext|>\nUser: hi\nAssistant: hello\nthere\n"
        "<|endoftext|>\n用户：hi\n助手：hello\nthere\n"
    )
    assert read_kinds(tmp_path / "a.txt") == {"a": ["one\n\n\ntwo", TALK, TALK]}


def test_any_other_text_is_cut_at_blank_lines_and_nothing_is_lost():
    rng = random.Random(0)
    parts = ["word " * rng.randint(1, 900) + "end" for _ in range(99)]
    cut = pieces("\n\n".join(parts))
    assert "\n\n".join(cut) == "\n\n".join(parts)
    assert all(len(piece) <= max(2000, *map(len, parts)) + 2 for piece in cut)
    assert all(len(a) + len(b) > 2000 for a, b in zip(cut, cut[1:]))
    assert pieces(" \n\n\n") == []


def test_a_folder_s_kinds_are_its_files_but_source_code_is_one(tmp_path):
    folder = tmp_path / "mine"
    (folder / "deep" / ".hidden").mkdir(parents=True)
    (folder / "tales.txt").write_text("one\n<|endoftext|>\ntwo")
    (folder / "deep" / "book.txt").write_text("a book")
    (folder / "deep" / "code.py").write_bytes(b"x = 1  # \xff and <|endoftext|>\n")
    (folder / "more.py").write_text("y = 2")
    (folder / "deep" / "rows.jsonl").write_text('{"text": "row"}')
    (folder / "deep" / ".hidden" / "no.txt").write_text("not this")
    (folder / "notes.md").write_text("nor this")
    code = ["x = 1  #  and <|endoftext|>", "y = 2"]
    kinds = {"tales": ["one", "two"], "book": ["a book"], "rows": ["row"], "mine": code}
    assert read_kinds(folder) == kinds
    assert read_kinds(folder / "notes.md") == {"notes": ["nor this"]}


def test_every_fiftieth_document_is_held_out(tmp_path):
    (tmp_path / "many.txt").write_text("\n<|endoftext|>\n".join(f"text {i}" for i in range(120)))
    (tmp_path / "one.txt").write_text("the only one")
    files = [tmp_path / "many.txt", tmp_path / "one.txt", tmp_path / "many.txt"]
    train, held_out = read_corpus(files)
    assert held_out == {"many": ["text 0", "text 50", "text 100"], "one": []}
    assert len(train["many"]) == 117 and not set(train["many"]) & set(held_out["many"])
    assert train["one"] == ["the only one"]
    prompts = held_out_prompts(tmp_path, None, TOKENIZER, 2)
    assert prompts == {"many": [TOKENIZER.encode(f"text {i}") for i in (0, 50)]}
    (tmp_path / "talk.txt").write_text("User: hi\nAssistant: hello\n<|endoftext|>\n" * 3)
    prompts = held_out_prompts(tmp_path, ["talk"], TOKENIZER, 1)
    assert prompts == {"talk": [TOKENIZER.chat([{"role": "user", "content": "hi"}])]}
    with pytest.raises(UserError, match="has no text of the kind poems, but many"):
        held_out_prompts(tmp_path, ["poems"], TOKENIZER, 2)


def test_a_conversation_is_encoded_by_the_model_s_template():
    for document, text in (
        (TALK, "<|endoftext|><|user|>hi<|end|><|assistant|>hello\nthere"),
        (TALK[:1], "<|endoftext|><|user|>hi<|end|><|assistant|>"),
    ):
        ids = encode(document, TOKENIZER)
        assert TOKENIZER.backend.decode(ids, skip_special_tokens=False) == text
    bare = byte_tokenizer(chat_template=None)
    assert encode(TALK, bare) == bare.encode("hi\nhello\nthere")


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("a.txt", b"\xff\xfe\xff", "a.txt cannot be read"),
        ("a.jsonl", b"\n{}\n", "a.jsonl line 2: must be an object of strings"),
        ("a.jsonl", b"[1]", "line 1"),
        ("a.jsonl", b'{"text": "x"', "line 1"),
        ("a.jsonl", b'{"text": 3}', "line 1"),
        ("a.jsonl", b'{"prompt": "\\ud800"}', "line 1"),
        ("a.jsonl", b'{"messages": []}', "line 1"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', "line 1"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": 3}]}', "line 1"),
        ("a.jsonl", b'{"messages": ["hi"]}', "line 1"),
        ("a.jsonl", b"[" * 100_000, "line 1"),
        ("a.txt", b" \n", "holds no text"),
        ("a.md", b"text", "holds no .txt, .jsonl, .py file"),
    ],
)
def test_a_corpus_that_is_none_is_refused(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        read_corpus([tmp_path])
