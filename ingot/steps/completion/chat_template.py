"""Chat templates: prompts from messages, as ``apply_chat_template`` of transformers 5 makes them.

A template is written in Jinja, and is part of a model. It runs in Jinja's sandbox, which has neither files nor Python's
internals, with limits on its steps, its time and the characters that it makes. Filters and methods that make long texts
of short ones are left out, or count the characters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from ingot.steps.completion.template_limits import (
    FILTERS,
    METHODS,
    MOST_BITS,
    WORK,
    Work,
    check_form,
    number_of,
    size_of,
    written,
)

# Filters and methods that make texts of any length, or take any time, and that chat templates do not use.
_NO_FILTERS = frozenset(
    ("batch", "center", "filesizeformat", "format", "pprint", "slice", "sum", "urlize", "wordcount", "wordwrap")
)
_NO_METHODS = frozenset(("center", "expandtabs", "format_map", "ljust", "rjust", "translate", "zfill"))


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
            InvalidArgument: the template refuses the messages, fails, or exceeds a limit.
        """
        variables = {"tools": None, "documents": None, **self._special, **options, WORK: Work()}
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

    intercepted_binops = frozenset(("+", "-", "*", "**", "/", "//", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=written)
        kept = {name: found for name, found in self.filters.items() if name not in _NO_FILTERS}
        self.filters = {**kept, **FILTERS}
        self.globals.update(raise_exception=_raise, strftime_now=_now, namespace=_Namespace)
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = _filtered(loop.iter, "each_counted")
        _replace_concatenations(template)
        return template

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        work, owner = context[WORK], getattr(function, "__self__", None)
        work.step()
        if isinstance(owner, str) and (made := METHODS.get(getattr(function, "__name__", ""))):
            args = ([*args[0]], *args[1:]) if function.__name__ == "join" and args else args
            work.write(made(owner, *args, **kwargs))
        return super().call(context, function, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return not (isinstance(obj, str) and attr in _NO_METHODS) and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            check_form(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("a chat template cannot use **")
        if any(isinstance(value, int) and value.bit_length() > MOST_BITS for value in (left, right)):
            raise SecurityError(f"a chat template cannot use numbers of over {MOST_BITS} bits")
        if operator == "%" and isinstance(left, str):
            check_form(left)
        if operator == "*":
            context[WORK].write(size_of(left) * number_of(right) + size_of(right) * number_of(left))
        else:
            context[WORK].write(size_of(left) + size_of(right))
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


def _raise(message: object) -> str:
    raise _Refused(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)
