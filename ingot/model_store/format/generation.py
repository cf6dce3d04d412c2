"""How a decoder is run: the ``generation`` of ``serving.json``."""

from __future__ import annotations

from itertools import chain
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ingot.errors import InvalidArgument
from ingot.model_store.format.evidence import Record
from ingot.tasks import Generating
from ingot.tensors import DType, Signature, TensorSpec

TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
TokenIds = Annotated[tuple[TokenId, ...], Field(max_length=1 << 16)]
# GroupQueryAttention of ONNX Runtime needs a multiple of 8.
_HEAD_STEP = 8


class SamplingDefaults(Record):
    """How ``generate()`` of transformers chooses tokens with the model's ``generation_config``.

    A request that does not state a value gets this one. ``top_k`` 0 and ``top_p`` 1 limit nothing. ``max_new_tokens``
    is None where the model states none.
    """

    do_sample: bool = False
    temperature: float = Field(1.0, gt=0, le=100)
    top_k: int = Field(50, ge=0, lt=1 << 32)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    max_new_tokens: int | None = Field(None, ge=1, lt=1 << 32)


class TokenRules(Record):
    """Which tokens an answer cannot have, or must have, as ``generation_config`` of transformers says.

    Attributes:
        begin: the tokens among which each of the first tokens of an answer is chosen, such as ``forced_bos_token_id``.
        last: the token at the last place of an answer that reaches its most tokens (``forced_eos_token_id``).
        suppress: tokens that are never chosen (``suppress_tokens``, and ``bad_words_ids`` of one token).
        begin_suppress: tokens that are not chosen behind those of ``begin`` (``begin_suppress_tokens``).
        min_tokens: tokens before which no token of ``eos`` is chosen (``min_length``, ``min_new_tokens``).
        no_repeat: so many tokens in a row do not occur twice (``no_repeat_ngram_size``); 0 for no limit.
    """

    begin: tuple[TokenIds, ...] = Field((), max_length=16)
    last: TokenId | None = None
    suppress: TokenIds = ()
    begin_suppress: TokenIds = ()
    min_tokens: int = Field(0, ge=0, lt=1 << 32)
    no_repeat: int = Field(0, ge=0, lt=1 << 16)


class Encoder(Record):
    """What an encoder-decoder reads once for each answer.

    The graph has the input ``input_ids`` INT64[1, source], and for each layer N of the decoder the outputs
    ``cross.N.key`` and ``cross.N.value`` FP32[1, kv_heads, source, head_size]. The decoder's graph has them as further
    inputs, of all rows and with the dimension ``source_capacity``, and ``sources`` INT32[rows] (the length of each,
    minus one) and ``source_total`` INT32[1] (the largest length).

    Attributes:
        blob: the graph, by the hex digest of its blob.
        max_length: the most tokens of ``source``.
        start: the tokens with which the decoder begins; they are not part of an answer.
    """

    blob: str = Field("", pattern="^([0-9a-f]{64})?$")
    max_length: int = Field(ge=1, le=1 << 24)
    start: tuple[TokenId, ...] = Field(min_length=1, max_length=16)


class Generation(Record):
    """A decoder with an explicit cache: the graph's form, the cache's sizes, and the special tokens.

    The graph of form ``gqa`` has the inputs ``input_ids`` INT64[rows, new], ``position_ids`` INT64[rows, new],
    ``lengths`` INT32[rows] (tokens in the cache after the call, minus one), ``total`` INT32[1] (the
    largest of ``lengths``, plus one), and for each layer N ``past_key_values.N.key`` and ``past_key_values.N.value``
    FP32[rows, kv_heads, capacity, head_size]. Its outputs are ``logits`` FP32[rows, vocab] of the last new token, and
    ``present.N.key`` and ``present.N.value``, which may be the same memory as the past. Several new tokens with a past
    are for one row only; several rows have one new token each.

    Attributes:
        layers: layers with a cache.
        kv_heads: heads of keys and values of each layer.
        head_size: elements of a key or a value.
        max_length: the most positions of a row, prompt and new tokens together.
        vocab: the number of logits.
        eos: tokens that end an answer.
        bos: the token with which texts begin, None without one; the tokenizer adds it where the model needs it.
        pad: the token of padding; None without one.
        defaults: how tokens are chosen if a request does not state it.
        chat_template: the template in Jinja that makes a prompt of messages; empty without one.
        tokenizer: the name of the tokenizer's file, as the step ``tokenize`` stores it; empty without one.
        special: special tokens that chat templates name, such as ``bos_token``, by that name.
        task: as Hugging Face names it.
        rules: which tokens an answer cannot have, or must have.
        encoder: what the decoder of an encoder-decoder attends to, besides its own tokens; None of others.
    """

    form: Literal["gqa"] = "gqa"
    layers: int = Field(ge=1, le=1024)
    kv_heads: int = Field(ge=1, le=4096)
    head_size: int = Field(ge=_HEAD_STEP, le=4096, multiple_of=_HEAD_STEP)
    max_length: int = Field(ge=1, le=1 << 24)
    vocab: int = Field(ge=1, le=1 << 24)
    eos: tuple[TokenId, ...] = Field((), max_length=1024)
    bos: TokenId | None = None
    pad: TokenId | None = None
    defaults: SamplingDefaults = SamplingDefaults()
    chat_template: str = Field("", max_length=1 << 20)
    tokenizer: str = ""
    special: dict[str, str] = Field(default_factory=dict, max_length=64)
    task: Generating = "text-generation"
    rules: TokenRules = TokenRules()
    encoder: Encoder | None = None

    @model_validator(mode="after")
    def _known_tokens(self) -> Generation:
        rules, start = self.rules, self.encoder.start if self.encoder is not None else ()
        known = [*self.eos, *start, *rules.suppress, *rules.begin_suppress, *chain(*rules.begin)]
        known += [token for token in (self.bos, rules.last) if token is not None]
        if (wrong := max(known, default=0)) >= self.vocab:
            raise ValueError(f"token {wrong} is a special token, but the model has {self.vocab} tokens")
        return self

    @property
    def cache_bytes(self) -> int:
        """The bytes of the cache of one position of one row."""
        return 2 * self.layers * self.kv_heads * self.head_size * DType.FP32.numpy.itemsize

    @property
    def caches(self) -> tuple[TensorSpec, ...]:
        """The inputs of the graph that hold the cache, in the order of the layers."""
        return self._parts("past_key_values", "rows", "capacity")

    def _parts(self, prefix: str, rows: int | str, length: str) -> tuple[TensorSpec, ...]:
        shape = (rows, self.kv_heads, length, self.head_size)
        names = (f"{prefix}.{layer}.{part}" for layer in range(self.layers) for part in ("key", "value"))
        return tuple(TensorSpec(name, DType.FP32, shape) for name in names)

    @property
    def cross(self) -> tuple[TensorSpec, ...]:
        """The inputs of the graph that an encoder has made, in the order of the layers."""
        if self.encoder is None:
            return ()
        lengths = TensorSpec("sources", DType.INT32, ("rows",)), TensorSpec("source_total", DType.INT32, (1,))
        return (*lengths, *self._parts("cross", "rows", "source_capacity"))

    @property
    def encoder_signature(self) -> Signature | None:
        """The interface of the encoder's graph; None without an encoder."""
        if self.encoder is None:
            return None
        return Signature((TensorSpec("input_ids", DType.INT64, (1, "source")),), self._parts("cross", 1, "source"))

    @property
    def signature(self) -> Signature:
        """The interface of the graph, which has no batch dimension, because each row has its own length."""
        inputs = [TensorSpec(name, DType.INT64, ("rows", "new")) for name in ("input_ids", "position_ids")]
        lengths = (TensorSpec("lengths", DType.INT32, ("rows",)), TensorSpec("total", DType.INT32, (1,)))
        logits = TensorSpec("logits", DType.FP32, ("rows", self.vocab))
        present = [
            TensorSpec(spec.name.replace("past_key_values", "present"), spec.dtype, spec.shape) for spec in self.caches
        ]
        return Signature((*inputs, *lengths, *self.caches, *self.cross), (logits, *present))

    def check(self, signature: Signature) -> None:
        """Check that a graph has the interface that is declared.

        Raises:
            InvalidArgument: it has another one.
        """
        if signature != self.signature:
            found, declared = ({*given.inputs, *given.outputs} for given in (signature, self.signature))
            wrong = min(map(str, found ^ declared), default="the order of its tensors")
            raise InvalidArgument(
                f"the graph is not of the form that its generation declares; they differ in {wrong}: export the model "
                "again"
            )
