"""The texts of a decoder: prompts as tokens, and tokens as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ingot.errors import InvalidArgument, Unsupported, missing_package
from ingot.steps import tokenizer
from ingot.steps.completion.detokenizer import TokenTexts

if TYPE_CHECKING:
    from ingot.steps.completion.chat_template import ChatTemplate

# Characters of a prompt, which take a second; the tokenizer may allow fewer.
_MOST_CHARACTERS = 1_000_000


class CompletionTexts:
    """A decoder's tokenizer and chat template; immutable, for any number of threads.

    Args:
        content: the tokenizer's file.
        name: of the file, for messages.
        template: in Jinja; empty if the model has none.
        special: the texts of special tokens by their names in templates, such as ``bos_token``.

    Raises:
        InvalidArchive: the tokenizer or the template cannot be read.
        Unsupported: a package is not installed.
    """

    def __init__(self, content: bytes, name: str, template: str = "", special: Mapping[str, str] | None = None):
        loaded = tokenizer.load(content, name)
        self.tokens = TokenTexts(loaded)
        self._tokenizer = loaded  # keeps it loaded, for others that share it
        self._most = min(_MOST_CHARACTERS, loaded.most_characters)
        self._template = _template(template, special or {}) if template else None

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self._template is not None

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a prompt; ``special`` is whether those are added with which texts begin.

        Raises:
            InvalidArgument: the text is too long.
        """
        if len(text) > self._most:
            raise InvalidArgument(f"the prompt has {len(text)} characters, over the limit of {self._most}")
        ids: list[int] = self._tokenizer.whole.encode(text, add_special_tokens=special).ids
        return ids

    def chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """Return the tokens of the prompt that asks for the next message; see :meth:`ChatTemplate.render`.

        Raises:
            InvalidArgument: the template refuses the messages, or the prompt is too long.
            Unsupported: the model has no template.
        """
        if self._template is None:
            raise Unsupported("the model has no chat template")
        return self.encode(self._template.render(messages, options), special=False)


def _template(source: str, special: Mapping[str, str]) -> ChatTemplate:
    try:
        from ingot.steps.completion.chat_template import ChatTemplate
    except ModuleNotFoundError as error:
        raise missing_package("jinja2", "a model that is served with its chat template", "text") from error
    return ChatTemplate(source, special)
