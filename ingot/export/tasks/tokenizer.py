"""The tokenizer of a folder, and what transformers itself makes of texts, with which steps are compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from ingot import foreign
from ingot.errors import InvalidArgument, Unsupported
from ingot.export.program import quiet
from ingot.steps import Original, Values
from ingot.steps.samples import texts

# Patterns of files that have the words of a tokenizer.
_VOCABULARIES = ("tokenizer.json", "vocab*", "*.model", "*.vocab", "*.tiktoken")


class FolderTokenizer:
    """The tokenizer of a folder as transformers loads it."""

    def __init__(self, folder: Path, module: Any, **options: Any):
        import transformers

        def unread(error: Exception) -> str:
            return f"the tokenizer in {folder} cannot be loaded: {foreign.one_line(error)}"

        with foreign.reported_as(InvalidArgument, unread), quiet():
            self.own: Any = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        if not has_words(folder) or len(self.own) <= len(self.own.all_special_ids):
            raise Unsupported(
                f"{folder} has no words of a tokenizer ({', '.join(_VOCABULARIES)}); save it with "
                "tokenizer.save_pretrained(FOLDER), or export the model without steps (--task none)"
            )
        if not getattr(self.own, "is_fast", False):
            raise Unsupported(
                f"the tokenizer in {folder} ({type(self.own).__name__}) is Python code, which an archive cannot hold; "
                "export the model without steps (--task none)"
            )
        if self.own.pad_token is None:
            raise Unsupported(
                f"the tokenizer in {folder} has no pad token, with which texts of different lengths share a batch; set "
                "one before it is saved, or export the model without steps (--task none)"
            )
        self.name = f"transformers {transformers.__version__}"
        self.max_length = _max_length(self.own, module)
        if (own := options.pop("max_length", None)) is not None:
            self.max_length = min(self.max_length, own)
        self.own.model_max_length = self.max_length  # where pipelines cut
        if options.pop("lower", False):
            _put_in_lower_case(self.own.backend_tokenizer)
        self._options = options

    @property
    def content(self) -> bytes:
        """The serialization of the loaded tokenizer, which may differ from ``tokenizer.json``."""
        return serialized(self.own)

    @property
    def options(self) -> dict[str, Any]:
        """The fields of the step."""
        own = self.own
        return {
            "max_length": self.max_length,
            "pad_id": own.pad_token_id or 0,
            "pad_type": own.pad_token_type_id or 0,
            "padding_side": own.padding_side,
            "truncation_side": own.truncation_side,
            **self._options,
        }

    def prepare(self, values: Values, kind: str = "np") -> Any:
        """Return the tensors that transformers makes of texts."""
        found = {name: [item.decode() for item in array.tolist()] for name, array in values.items()}
        rows = found.pop("text")
        prompt = self._options.get("prompts", {}).get(self._options.get("default_prompt", ""), "")
        rows = [prompt + text for text in rows]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.own(
                rows,
                **found,
                padding=True,
                truncation="longest_first",
                max_length=self.max_length,
                return_tensors=kind,
            )

    def original(
        self,
        answer: Callable[[Any, Values], Values],
        pairs: Literal["no", "optional", "required"] = "no",
        samples: Sequence[Values] | None = None,
    ) -> Original:
        """Return the work of transformers, with which the steps are compared.

        Args:
            answer: as in :class:`~ingot.steps.Original`.
            pairs: whether texts are compared in pairs.
            samples: as in :class:`~ingot.steps.Original`; by default texts that every tokenizer can read.
        """
        pair = "" if pairs == "no" else "text_pair"
        items, usual = (
            texts.sets(each, "text", pair, required=pairs == "required") for each in (texts.hard(), texts.samples())
        )
        return Original(self.name, self.prepare, answer, items, usual if samples is None else samples)

    @property
    def clean_up(self) -> bool:
        """Whether transformers removes blanks before punctuation from decoded texts."""
        own = self.own
        forced = getattr(own, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
        return bool(own.clean_up_tokenization_spaces) and (
            forced or type(own.backend_tokenizer.model).__name__ != "BPE"
        )


def has_words(folder: Path) -> bool:
    """Return whether a folder has the words of a tokenizer; without them transformers makes an empty one."""
    return any(any(folder.glob(pattern)) for pattern in _VOCABULARIES)


def serialized(tokenizer: Any) -> bytes:
    """Return the serialization of a tokenizer of transformers, without truncation and padding."""
    from tokenizers import Tokenizer

    copy: Any = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    return str(copy.to_str()).encode()


def _put_in_lower_case(tokenizer: Any) -> None:
    """Let a tokenizer put texts in lower case first, as sentence-transformers 6 does for ``do_lower_case``."""
    from tokenizers import normalizers

    made: Any = normalizers
    known = tokenizer.normalizer
    each = [*known] if isinstance(known, made.Sequence) else [known] if known is not None else []
    if not any(isinstance(item, made.Lowercase) for item in each):
        tokenizer.normalizer = made.Sequence([made.Lowercase(), *each])


def _max_length(tokenizer: Any, module: Any) -> int:
    """Return the most tokens of a row: positions of some models start behind the id of padding."""
    longest = getattr(module.config, "max_position_embeddings", None)
    known = [tokenizer.model_max_length] if tokenizer.model_max_length < 1 << 20 else []
    if isinstance(longest, int) and longest > 1:
        shifted = any(hasattr(item, "create_position_ids_from_input_ids") for item in module.modules())
        known.append(longest - (module.config.pad_token_id or 0) - 1 if shifted else longest)
    return int(min(known, default=512))
