"""Chat templates: conversations as text, rendered in the environment that transformers provides."""

import datetime
import functools
import json
import re
from collections.abc import Collection
from pathlib import Path

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minispec.cli import UserError

Messages = list[dict[str, str]]  # {role, content}
PRIVATE_USE = "\U000f0000", "\U000ffffd"  # the first and last of Unicode's plane 15


def read_template(directory: Path, settings: dict) -> str | None:
    """Return a checkpoint's chat template: from a file of its own, else from tokenizer_config.json.
    If there are several, return the one named "default"."""
    for name in "additional_chat_templates/default.jinja", "chat_template.jinja":
        if (directory / name).exists():
            return (directory / name).read_text(encoding="utf-8", errors="replace")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
    return template.get("default") if isinstance(template, dict) else template


def check_messages(messages: object) -> None:
    """Raise UserError unless `messages` is a conversation."""
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("content"), str) for m in messages
    ):
        raise UserError('a conversation must be a list of {"role": …, "content": TEXT}')


def render(template: str, messages: Messages, special_tokens: dict[str, str]) -> str:
    """Render a conversation up to the assistant's next turn. `special_tokens` maps names such as
    bos_token to tokens."""
    variables = special_tokens | {"messages": messages, "add_generation_prompt": True}
    try:  # templates test whether `tools` and `documents` are none
        return compile_template(template).render(variables, tools=None, documents=None)
    except Exception as error:  # a template is code and may raise anything
        raise UserError(f"the model's chat template rejects this conversation: {error}") from None


@functools.lru_cache(maxsize=8)  # data generation renders the same one thousands of times
def compile_template(source: str) -> jinja2.Template:
    """Compile a template with the globals and filters that transformers provides."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.filters["tojson"] = tojson
    return environment.from_string(source)


def strftime_now(form: str) -> str:
    """Format the current date and time, for templates."""
    return datetime.datetime.now().strftime(form)


def raise_exception(message: str) -> None:
    """Raise an error, for templates."""
    raise jinja2.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, **more) -> str:
    """The `tojson` filter; jinja's own would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


class Generation(jinja2.ext.Extension):
    """Parse {% generation %} … {% endgeneration %}, which mark the assistant's text in training."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# ---- messages are text, not control tokens -------------------------------------------------------


def hide_control_tokens(
    messages: Messages, control_tokens: Collection[str]
) -> tuple[Messages, dict[str, str]]:
    """Replace each control token that a message spells with a private-use character. Return the
    messages, and the text that each of these characters stands for."""
    characters: dict[str, str] = {}

    def replace(match: re.Match) -> str:
        return characters.setdefault(match[0], chr(ord(PRIVATE_USE[0]) + len(characters)))

    # private-use characters in the messages themselves are replaced as well
    spelled = re.compile(f"{alternation(control_tokens)}|[{'-'.join(PRIVATE_USE)}]")
    hidden = [m | {"content": spelled.sub(replace, m["content"])} for m in messages]
    return hidden, {character: text for text, character in characters.items()}


def replace_all(text: str, replacements: dict[str, str]) -> str:
    """Replace every key with its value in one pass, the longest keys first."""
    return re.sub(alternation(replacements), lambda match: replacements[match[0]], text)


def alternation(texts: Collection[str]) -> str:
    """Return a regular expression that matches any of the texts, the longest first."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
