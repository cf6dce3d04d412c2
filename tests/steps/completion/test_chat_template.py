"""Chat templates against transformers' own rendering, and what a hostile template cannot do."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from ingot.errors import InvalidArchive, InvalidArgument
from ingot.steps.completion.chat_template import ChatTemplate

CHATML = """{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA = """{% set loop_messages = messages %}{% if tools is not none %}{{ raise_exception('no tools') }}{% endif %}
{% for message in loop_messages %}
{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant') }}
{% endif %}
{% if loop.first %}{{ bos_token }}{% endif %}
    {% generation %}[{{ loop.index }}/{{ loop.length }} {{ message.role ~ ":" ~ message.content }}]{% endgeneration %}
    {% if loop.last %}{{ eos_token }}{% endif %}
{% endfor %}"""
ODD = """{%- macro show(item, depth) -%}{{ item | tojson(indent=2) ~ depth * '-' }}{%- endmacro -%}
{%- set ns = namespace(count=0, text='') -%}
{%- for message in messages if message.role != 'system' -%}
  {%- if message.content is string and '</think>' in message.content -%}
    {%- set ns.text = ns.text ~ message.content.split('</think>')[-1].lstrip('\\n') -%}
  {%- else -%}{%- continue -%}{%- endif -%}
  {%- set ns.count = ns.count + 1 -%}
  {{- show(message, ns.count) }}{{ [1, 2] + [3] }}{{ messages[::-1][0].role }}
{%- else -%}none{%- endfor -%}
{{ ns.text }}{{ 'thinking' if enable_thinking is defined and enable_thinking }}"""
CHATS = [
    [{"role": "user", "content": " hi <b> "}],
    [{"role": "user", "content": "größer"}, {"role": "assistant", "content": "<think>x</think>\n\nyes"}],
    [{"role": "system", "content": "be short"}],
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("template", [CHATML, LLAMA, ODD])
@pytest.mark.parametrize("chat", CHATS)
def test_a_prompt_is_that_of_transformers(template: str, chat: list[dict[str, Any]]) -> None:
    ours = ChatTemplate(template, SPECIAL)
    options: dict[str, Any] = {"enable_thinking": True}
    variables: dict[str, Any] = {**SPECIAL, **options}
    try:
        expected: Any = render_jinja_template([chat], chat_template=template, add_generation_prompt=True, **variables)
    except Exception:  # noqa: BLE001 - the template's own refusal
        with pytest.raises(InvalidArgument, match="refuses the messages: Conversation roles must alternate"):
            ours.render(chat, options)
        return
    assert ours.render(chat, options) == expected[0][0]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}", "needs over 200000 steps"),
        ("{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(40) }}", "needs over 200000 steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% set n = namespace(t='ab') %}{% for a in range(90) %}{% set n.t = n.t ~ n.t %}{% endfor %}", "characters"),
        ("{% set n = namespace(t='ab') %}{% for a in range(90) %}{% set n.t = n.t + n.t %}{% endfor %}", "characters"),
        ("{{ 'a' * 10000000000 }}", "makes over 8388608 characters"),
        ("{{ [1] * 10000000000 }}", "makes over 8388608 characters"),
        ("{{ 9 ** 9 ** 9 ** 9 }}", "cannot use"),
        ("{{ '%9999999999d' % 1 }}", "a width of four digits"),
        ("{{ '%*d' % (9999999999, 1) }}", "or of another value"),
        ("{{ '{:9999999999}'.format(1) }}", "a width of four digits"),
        ("{{ '{:{}}'.format(1, 9999999999) }}", "or of another value"),
        ("{{ 'a'.ljust(9999999999) }}", "unsafe"),
        ("{{ 'a'.zfill(9999999999) }}", "unsafe"),
        ("{{ 'a\n'|indent(9999999999) }}", "makes over 8388608 characters"),
        ("{{ ('a' * 9999)|replace('a', 'a' * 9999) }}", "makes over 8388608 characters"),
        ("{{ ('a' * 9999).replace('a', 'a' * 9999) }}", "makes over 8388608 characters"),
        ("{{ ('a' * 9999)|join('a' * 9999) }}", "makes over 8388608 characters"),
        ("{{ ('a' * 9999).join('a' * 9999) }}", "makes over 8388608 characters"),
        ("{{ [1]|tojson(indent=9999999999) }}", "cannot indent by over 16"),
        ("{% set n = namespace(x=9) %}{% for a in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}", "256 bits"),
        ("{{ messages[0].__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "cannot set '__class__'"),
        ("{% include 'passwd' %}", "no loader"),
        ("{{ messages[5].content }}", "UndefinedError"),
        ("{{ nothing.content }}", "'nothing' is undefined"),
    ],
)
def test_a_template_has_limits(template: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ChatTemplate(template, {}).render([{"role": "user", "content": "hi"}], {})


def test_a_template_formats_joins_and_replaces() -> None:
    template = (
        "{{ '%s in 2024 **%03d**' % ('a', 5) }} {{ 'b: {} {:>3}'.format(1, 2) }} {{ 'xax'.replace('a', 'b') }} "
        "{{ 'xax'|replace('x', 'y', 1) }} {{ messages|join(', ', attribute='role') }} {{ ', '.join(['c', 'd']) }}"
    )
    found = ChatTemplate(template, {}).render([{"role": "user"}, {"role": "assistant"}], {})
    assert found == "a in 2024 **005** b: 1   2 xbx yax user, assistant c, d"


@pytest.mark.parametrize("name", ["batch(99999999)", "center(99999999)", "format(1)", "slice(99999999)", "urlize"])
def test_filters_that_make_any_number_of_characters_are_unknown(name: str) -> None:
    with pytest.raises(InvalidArchive, match="No filter named"):
        ChatTemplate("{{ 'a'|" + name + " }}", {})


def test_a_text_that_is_not_a_template_is_refused() -> None:
    with pytest.raises(InvalidArchive, match="chat template cannot be read: TemplateSyntaxError"):
        ChatTemplate("{% for %}", {})
