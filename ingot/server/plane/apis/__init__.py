"""The APIs of other servers, answered by models with steps, so that their clients work unchanged.

| module | API | clients |
|---|---|---|
| ``openai`` | ``/v1/embeddings``, ``/v1/models`` | the ``openai`` SDK, LangChain, LlamaIndex, Haystack |
| ``completions``, ``chat`` | ``/v1/completions``, ``/v1/chat/completions``, by ``completing`` | the same |
| ``tei`` | ``/embed``, ``/predict``, ``/similarity``, ``/info`` of text-embeddings-inference | its clients |
| ``tokens`` | its ``/embed_all``, ``/tokenize``, ``/decode`` | the same |
| ``reranking`` | ``/rerank`` of text-embeddings-inference, Jina and Cohere | theirs, LiteLLM |
| ``huggingface`` | ``/models/NAME`` | ``huggingface_hub.InferenceClient(model=URL)`` |
| ``on_tokens`` | the same, for entities, questions, missing words and candidate labels | the same |

Each handler reads the fields of a body (``../fields.py``), asks the data plane (``asking``) and returns the answer as
JSON; ``server/plane/operations.py`` has the paths. An unknown field is refused by its name: ignored, it would change
what the client means without a word.
"""
