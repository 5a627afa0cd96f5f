"""Chat templates: conversations as text, rendered in the environment that transformers provides."""

import datetime
import functools
import json
from pathlib import Path

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from minispec.cli import UserError, user_error

Messages = list[dict[str, str]]  # {role, content}


def read_template(directory: Path, settings: dict) -> str | None:
    """Return a checkpoint's chat template: from a file of its own, else from tokenizer_config.json.
    If there are several, return the one named "default"."""
    for name in "additional_chat_templates/default.jinja", "chat_template.jinja":
        if (directory / name).exists():
            return (directory / name).read_text(encoding="utf-8-sig", errors="replace")
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
    return template.get("default") if isinstance(template, dict) else template


def check_messages(messages: object) -> None:
    """Raise UserError unless `messages` is a conversation."""
    turns = messages if isinstance(messages, list) else [None]
    if not all(isinstance(m, dict) and isinstance(m.get("content"), str) for m in turns):
        raise UserError('a conversation must be a list of {"role": …, "content": TEXT}')


def render(template: str, messages: Messages, special_tokens: dict[str, str]) -> str:
    """Render a conversation up to the assistant's next turn. `special_tokens` has bos_token, …"""
    variables = special_tokens | {"messages": messages, "add_generation_prompt": True}
    with user_error("the model's chat template rejects this conversation"):  # a template is code
        # templates test whether `tools` and `documents` are none
        return compile_template(template).render(variables, tools=None, documents=None)


@functools.lru_cache(maxsize=8)  # data generation renders the same one thousands of times
def compile_template(source: str) -> jinja2.Template:
    """Compile a template with the globals and filters that transformers provides."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = tojson
    return environment.from_string(source)


def raise_exception(message: str) -> None:
    """Raise an error, for templates."""
    raise jinja2.TemplateError(message)


def tojson(value, ensure_ascii=False, indent=None, **more) -> str:
    """The `tojson` filter; jinja's own would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


class Generation(jinja2.ext.Extension):
    """Parse {% generation %} … {% endgeneration %}, which mark the assistant's text for training.
    Variables set between them are local."""

    tags = {"generation"}

    def parse(self, parser):
        tag = next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=tag.lineno)
