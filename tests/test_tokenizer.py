"""Streaming decode never breaks a character; chat templates render in a sandbox."""

import json
import random

import pytest
from conftest import SHARED, needs_shared
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from minispec import UserError
from minispec.pretrain import ASSISTANT, CHAT_TEMPLATE, END, END_TURN, USER
from minispec.tokenizer import Tokenizer


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """One token per byte, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END, USER, ASSISTANT, END_TURN])
    return Tokenizer(backend, END, END, chat_template)


TEXT = "Ünï 你好，世界 👩‍👩‍👧 𝔘 end � é"


@pytest.mark.parametrize("seed", range(5))
def test_a_stream_gives_whole_characters_and_in_the_end_the_whole_text(seed):
    tokenizer, rng = byte_tokenizer(), random.Random(seed)
    text = "".join(rng.choices(TEXT, k=60))
    stream, pieces = tokenizer.stream(tokenizer.encode("before")), []
    for token in tokenizer.encode(text):
        pieces.append(stream.push(token))
        assert text.startswith("".join(pieces))
    pieces.append(stream.flush())
    assert "".join(pieces) == text == stream.text


def test_an_incomplete_character_is_held_and_shown_at_the_end():
    tokenizer = byte_tokenizer()
    stream = tokenizer.stream([])
    assert [stream.push(token) for token in tokenizer.encode("a你")[:3]] == ["a", "", ""]
    assert stream.flush() == "\ufffd"


@pytest.mark.parametrize("seed", range(20))
def test_any_tokens_stream_to_their_text_and_nothing_raises(seed):
    """Random ids, invalid bytes among them, after random prompts."""
    tokenizers = [byte_tokenizer()]
    if SHARED.exists():
        folders = ("tinystories-656k", "stories260k")
        tokenizers += [Tokenizer.from_directory(SHARED / "checkpoints" / f) for f in folders]
    rng = random.Random(seed)
    for tokenizer in tokenizers:
        prompt, tokens = ([rng.randrange(tokenizer.size) for _ in range(n)] for n in (5, 40))
        stream = tokenizer.stream(prompt)
        text = "".join(map(stream.push, tokens)) + stream.flush()
        if tokenizer is tokenizers[0]:  # bytes: the rest of the whole, after what both share
            whole = tokenizer.decode(prompt + tokens)
            assert whole.endswith(text.lstrip("\ufffd")) and "\ufffd" * 41 not in text


def test_a_prompt_that_ends_inside_a_character_is_not_repeated():
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode("hello 你好x")
    for cut in range(1, len(tokens)):
        stream = tokenizer.stream(tokens[:cut])
        said = "".join(map(stream.push, tokens[cut:])) + stream.flush()
        before = tokenizer.decode(tokens[:cut]).rstrip("\ufffd")
        assert before + said == "hello 你好x"


def test_special_tokens_are_not_text():
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode(f"a{USER}b{END}")
    stream = tokenizer.stream([])
    assert "".join(map(stream.push, tokens)) + stream.flush() == tokenizer.decode(tokens) == "ab"


@needs_shared
@pytest.mark.parametrize("folder", ["tinystories-656k", "stories260k"])
def test_the_first_space_of_a_continuation_is_kept(folder):
    """Decoders of SentencePiece kind strip the first space of a text, but this is not its first."""
    tokenizer = Tokenizer.from_directory(SHARED / "checkpoints" / folder)
    text = "Once upon a time there was a big cat. She said: héllo"
    tokens = tokenizer.encode(text)
    for cut in range(1, len(tokens)):
        stream = tokenizer.stream(tokens[:cut])
        said = "".join(map(stream.push, tokens[cut:])) + stream.flush()
        assert tokenizer.decode(tokens[:cut]) + said == tokenizer.decode(tokens)


@needs_shared
def test_real_byte_level_vocabularies_stream(tmp_path):
    for file in ("qwen2/tokenizer.built.json", "minimind/tokenizer.json"):
        (tmp_path / "tokenizer.json").write_bytes((SHARED / "tokenizers" / file).read_bytes())
        tokenizer = Tokenizer.from_directory(tmp_path)
        tokens = tokenizer.encode(TEXT)
        stream = tokenizer.stream([])
        assert "".join(map(stream.push, tokens)) + stream.flush() == TEXT


def test_a_conversation_is_rendered_up_to_the_assistants_turn():
    tokenizer = byte_tokenizer()
    with pytest.raises(UserError, match="not valid Unicode"):
        tokenizer.encode("a\udcff")
    messages = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "Yo"},
                {"role": "user", "content": "Bye"}]  # fmt: skip
    text = tokenizer.backend.decode(tokenizer.chat(messages), skip_special_tokens=False)
    assert (
        text == f"{END}{USER}Hi <b>{END_TURN}{ASSISTANT}Yo{END_TURN}{USER}Bye{END_TURN}{ASSISTANT}"
    )


@pytest.mark.parametrize(
    "template, match",
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{% for %}", "refuses"),
        ("{{ 'a' + none }}", "refuses"),
        ("{# nothing #}", "makes nothing"),
    ],
)
def test_templates_that_cannot_or_must_not_be_rendered(template, match):
    with pytest.raises(UserError, match=match):
        byte_tokenizer(template).chat([{"role": "user", "content": "x"}])


def test_what_transformers_gives_to_templates():
    """No tools, a filter's arguments by place, and a tag that only training asks for."""
    template = (
        "{% if tools is none %}a{% endif %}{{ documents is none }}{{ [1, {'<': 'é'}] | tojson }}"
        "{{ {'x': 1} | tojson(true, 1) }}"
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    tokenizer = byte_tokenizer(template)
    text = tokenizer.backend.decode(tokenizer.chat([{"role": "user", "content": "Hi"}]))
    assert text == 'aTrue[1, {"<": "é"}]{\n "x": 1\n}Hi'


def test_special_tokens_that_only_neighbours_name(tmp_path):
    """As older checkpoints have them: in special_tokens_map.json, in added_tokens_decoder, or an
    end among the words that tokenizer.json does not mark as special."""
    backend = Backend(models.WordLevel({"a": 0, "<s>": 1, "<unk>": 2}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_directory(tmp_path).encode("<s>a") != [1, 0]
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>"}}')
    listed = {"3": {"content": "<|end|>", "special": True}, "4": {"content": "xy"}}
    settings = {"added_tokens_decoder": listed, "chat_template": [{"name": "default"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("<s>a<|end|>xy") == [1, 0, 3, 4] and tokenizer.bos == "<s>"
    assert tokenizer.special_ids == [1, 3] and tokenizer.chat_template is None
    for wrong, match in (
        ({"7": {"content": "zz"}}, "'zz' cannot be token 7"),
        ({"x": {"content": "zz"}}, "must hold tokens by their ids"),
        ({"3": 5}, "must hold tokens by their ids"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": wrong}))
        with pytest.raises(UserError, match=match):
            Tokenizer.from_directory(tmp_path)


def test_save_and_load_keep_everything(tmp_path):
    byte_tokenizer().save(tmp_path)
    again = Tokenizer.from_directory(tmp_path)
    assert (again.bos, again.eos, again.chat_template) == (END, END, CHAT_TEMPLATE)
    assert again.encode(TEXT) == byte_tokenizer().encode(TEXT)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["add_bos_token"], settings["bos_token"] = True, {"content": END, "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    again = Tokenizer.from_directory(tmp_path)
    assert again.chat_template == "from the file"
    for wrong, match in (("{", "cannot be read"), ("[]", "must hold"),
                         ('{"add_bos_token": true, "bos_token": "<no>"}', "not in")):  # fmt: skip
        (tmp_path / "tokenizer_config.json").write_text(wrong)
        with pytest.raises(UserError, match=match):
            Tokenizer.from_directory(tmp_path)
    assert again.encode("a") == [again.backend.token_to_id(END), *byte_tokenizer().encode("a")]
