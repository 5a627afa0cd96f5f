"""Conversations as text: a model's chat template, given what transformers gives it."""

import datetime
import functools
import json
import re
from collections.abc import Collection
from pathlib import Path

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minispec.errors import UserError

Messages = list[dict[str, str]]  # {role, content}
PRIVATE = "\U000f0000", "\U000ffffd"  # Unicode's plane 15: characters for private use


def read_template(directory: Path, settings: dict) -> str | None:
    """The chat template of a checkpoint: a file's, else that of its tokenizer_config.json; of
    several the one called default."""
    for name in "additional_chat_templates/default.jinja", "chat_template.jinja":
        if (directory / name).exists():
            return (directory / name).read_text(encoding="utf-8", errors="replace")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
    return template.get("default") if isinstance(template, dict) else template


def check_messages(messages: object) -> None:
    """Refuse what is no conversation."""
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages
    ):
        raise UserError('a conversation must be a list of {"role": …, "content": TEXT}')


def render(template: str, messages: Messages, named: dict[str, str]) -> str:
    """The text of a conversation, up to where the assistant is to speak; `named` are the special
    tokens by their names, such as bos_token."""
    known = named | {"messages": messages, "add_generation_prompt": True}
    try:  # templates ask whether these two are none
        return compiled(template).render(known, tools=None, documents=None)
    except Exception as error:  # a template is code: it may raise anything
        raise UserError(f"the model's chat template refuses this conversation: {error}") from None


@functools.lru_cache(maxsize=8)  # data generation renders one thousands of times
def compiled(source: str) -> jinja2.Template:
    """A template with what transformers gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = strftime_now
    environment.filters["tojson"] = tojson
    return environment.from_string(source)


def strftime_now(form: str) -> str:
    """What templates call so: the date or time."""
    return datetime.datetime.now().strftime(form)


def refuse(message: str) -> None:
    """What templates call as raise_exception."""
    raise jinja2.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, **more) -> str:
    """What templates call so: jinja's own would escape for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


class Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} marks, for training, what the assistant says."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# ---- what people say is text ---------------------------------------------------------------------


def hide(messages: Messages, controls: Collection[str]) -> tuple[Messages, dict[str, str]]:
    """The messages with a private character in place of whatever spells a control token in them;
    and what each of these characters stands for."""
    characters: dict[str, str] = {}

    def mark(match: re.Match) -> str:
        return characters.setdefault(match[0], chr(ord(PRIVATE[0]) + len(characters)))

    # a private character of their own is hidden as well
    spelled = re.compile(f"{alternatives(controls)}|[{'-'.join(PRIVATE)}]")
    hidden = [m | {"content": spelled.sub(mark, m["content"])} for m in messages]
    return hidden, {character: text for text, character in characters.items()}


def replace_all(text: str, replacements: dict[str, str]) -> str:
    """Replace every key by its value, the longest first, in one pass."""
    return re.sub(alternatives(replacements), lambda match: replacements[match[0]], text)


def alternatives(texts: Collection[str]) -> str:
    """A regular expression for any of the texts, the longest first."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
