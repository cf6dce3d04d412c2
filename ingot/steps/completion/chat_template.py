"""Chat templates: prompts from messages, as ``apply_chat_template`` of transformers 5 makes them.

A template is written in Jinja, and is part of a model. It runs in Jinja's sandbox, which has neither files nor Python's
internals, with limits on its steps and on the characters that it makes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ingot import foreign
from ingot.errors import InvalidArchive, InvalidArgument

# Loop iterations and calls of one rendering; so many take about 0.2 s. Templates need about ten for a message.
_MOST_STEPS = 200_000
# Characters that one rendering may write and join.
_MOST_CHARACTERS = 8 << 20
# The name of a rendering's _Work in its context. No variable of a template has this name, as it is not an identifier.
_WORK = "work of this rendering"


class ChatTemplate:
    """A compiled template, for any number of threads.

    Args:
        source: the template in Jinja.
        special: the texts of special tokens by their names, such as ``bos_token``.

    Raises:
        InvalidArchive: the source is not a valid template.
    """

    def __init__(self, source: str, special: Mapping[str, str]):
        with foreign.reported_as(InvalidArchive, "the model's chat template cannot be read"):
            self._template = _Sandbox().from_string(source)
        self._special = dict(special)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """Return the prompt that asks for the next message.

        Args:
            messages: each a JSON object with a role and a content.
            options: further variables of the template.

        Raises:
            InvalidArgument: the template refuses the messages, fails, or exceeds the limit of steps or characters.
        """
        variables = {"tools": None, "documents": None, **self._special, **options, _WORK: _Work()}
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **variables)
        except InvalidArgument:
            raise
        except _Refused as error:
            raise InvalidArgument(f"the model's chat template refuses the messages: {error}") from error
        except Exception as error:  # templates raise errors of any type
            why = foreign.typed(error)
            raise InvalidArgument(f"the model's chat template fails for these messages: {why}") from error


class _Refused(jinja2.TemplateError):
    """The template calls ``raise_exception``."""


class _Work:
    """The steps and characters of one rendering, which raise InvalidArgument over their limits."""

    def __init__(self) -> None:
        self._steps = self._characters = 0

    def step(self) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise InvalidArgument(f"the model's chat template needs over {_MOST_STEPS} steps; send fewer messages")

    def write(self, characters: int) -> None:
        self._characters += characters
        if self._characters > _MOST_CHARACTERS:
            raise InvalidArgument(
                f"the model's chat template makes over {_MOST_CHARACTERS} characters; send shorter messages"
            )


class _Generation(Extension):
    """The tag that marks a template's parts for training; it changes no text."""

    tags = {"generation"}  # noqa: RUF012 - as in the class that it extends

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace, without attributes whose names begin with an underscore."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a chat template cannot set '{name}'")
        super().__setitem__(name, value)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with transformers' additions. It counts loop iterations, calls, and characters of texts."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_written
        )
        self.filters.update(tojson=_to_json, each_counted=_each, joined_counted=_joined)
        self.globals.update(raise_exception=_raise, strftime_now=_now, namespace=_Namespace)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, "each_counted")
        _replace_concatenations(template)
        return template

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        context[_WORK].step()
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("a chat template cannot use **")
        if operator == "*":
            context[_WORK].write(_size(left) * _number(right) + _size(right) * _number(left))
        else:
            context[_WORK].write(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)


def _replace_concatenations(parent: nodes.Node) -> None:
    """Replace each ``a ~ b`` in a template by a filter, which counts the characters."""
    for name, value in parent.iter_fields():
        children = value if isinstance(value, list) else [value]
        for at, child in enumerate(children):
            if not isinstance(child, nodes.Node):
                continue
            _replace_concatenations(child)
            if isinstance(child, nodes.Concat):
                children[at] = _filtered(nodes.List(child.nodes, lineno=child.lineno), "joined_counted")
        setattr(parent, name, value if isinstance(value, list) else children[0])


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


@jinja2.pass_context
def _each(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    work = context[_WORK]
    for value in values:
        work.step()
        yield value


@jinja2.pass_context
def _joined(context: Context, values: list[Any]) -> str:
    texts = [*map(str, values)]
    context[_WORK].write(sum(map(len, texts)))
    return "".join(texts)


@jinja2.pass_context
def _written(context: Context, value: Any) -> Any:
    context[_WORK].write(_size(value))
    return value


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _number(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: object) -> str:
    raise _Refused(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)
