"""The model in transformers: its folder, and its own ways to answer requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.generation.load import VOCAB, Asked, Rate


def save(folder: Path) -> None:
    """Write a GPT-2 of random weights, and a tokenizer in which every token has a text."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    model, config = _typed(transformers.GPT2LMHeadModel), _typed(transformers.GenerationConfig)
    model = model(transformers.GPT2Config())
    model.generation_config = config(pad_token_id=0)  # without a token that ends answers
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [*alphabet, *(f"w{number}" for number in range(VOCAB - len(alphabet)))]
    tokenizer: Any = Tokenizer(models.BPE({text: number for number, text in enumerate(texts)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _typed(transformers.PreTrainedTokenizerFast)(tokenizer_object=tokenizer).save_pretrained(folder)


def _typed(found: object) -> Any:
    """Return a class of transformers, whose functions lack types."""
    return found


class Original:
    """The model in this process; it is loaded for each run, so that it takes no memory from others."""

    def __init__(self, folder: Path, threads: int):
        import transformers

        torch.set_num_threads(threads)
        self._model = _typed(transformers.AutoModelForCausalLM).from_pretrained(folder).eval()
        self._config = _typed(transformers.GenerationConfig)
        # Without limits the cache takes most of the memory, and its allocation longer than the answers.
        self._cache = _typed(transformers.ContinuousBatchingConfig)(num_blocks=64, max_batch_tokens=256)

    def rate(self, way: str, work: Sequence[Asked], clients: int) -> Rate:
        """Return the rate of the tokens that were asked for; 0 if this way does not run here."""
        with torch.no_grad():
            self._generate([work[0].prompt], 4)
            began, spent = time.perf_counter(), time.process_time()
            try:
                WAYS[way](self, work, clients)
            except Exception as error:  # noqa: BLE001 - whatever a release of transformers raises
                print(f"{way} does not run here: {type(error).__name__}: {error}")
                return Rate(0.0, 0.0)
        tokens = sum(each.tokens for each in work)
        return Rate(tokens / (time.perf_counter() - began), tokens / (time.process_time() - spent))

    def alone(self, work: Sequence[Asked], clients: int) -> None:
        """Answer one request at a time, whatever the number of clients."""
        for each in work:
            self._generate([each.prompt], each.tokens)

    def batches(self, work: Sequence[Asked], clients: int) -> None:
        """Answer as many requests at a time as there are clients: each batch runs to its longest answer."""
        for start in range(0, len(work), clients):
            batch = work[start : start + clients]
            self._generate([each.prompt for each in batch], max(each.tokens for each in batch))

    def continuous(self, work: Sequence[Asked], clients: int) -> None:
        """Answer all requests by the manager behind ``generate_batch``, which itself gives all answers one length."""
        config = self._config(do_sample=False, eos_token_id=-1, pad_token_id=0)
        with self._model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=self._cache, block=True, timeout=5, warmup=False
        ) as manager:
            for each in work:
                manager.add_request(each.prompt, max_new_tokens=each.tokens)
            wanted, made = sum(each.tokens for each in work), 0
            while made < wanted and manager.is_running():
                found = manager.get_result(timeout=1)
                made += len(found.generated_tokens) if found else 0
        if made != wanted:
            raise RuntimeError(f"{made} of {wanted} tokens were made")

    def _generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        self._model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, pad_token_id=0)


WAYS: dict[str, Callable[[Original, Sequence[Asked], int], None]] = {
    "one at a time": Original.alone,
    "batches": Original.batches,
    "generate_batch": Original.continuous,
}
