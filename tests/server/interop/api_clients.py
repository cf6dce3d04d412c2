"""Calls a server with the clients of other servers; prints what each returned. Run by ``test_api_clients.py``."""

import asyncio
import json
import sys

import cohere
import openai
from huggingface_hub import InferenceClient
from langchain_openai import OpenAIEmbeddings
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

url, texts = sys.argv[1], json.loads(sys.argv[2])
found = {}

client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
found["openai"] = [item.embedding for item in client.embeddings.create(model="table", input=texts).data]
given = client.embeddings.create(model="table", input=texts, encoding_format="float")
found["openai, floats"] = [item.embedding for item in given.data]
found["openai, models"] = [model.id for model in client.models.list()]
try:
    client.embeddings.create(model="table", input=texts, dimensions=5)
except openai.APIStatusError as error:
    found["openai, error"] = [type(error).__name__, error.param]


async def embed():
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        return [item.embedding for item in (await client.embeddings.create(model="table", input=texts)).data]


found["openai, async"] = asyncio.run(embed())

options = {"model": "table", "base_url": f"{url}/v1", "api_key": "none"}
found["langchain"] = OpenAIEmbeddings(check_embedding_ctx_length=False, **options).embed_documents(texts)
try:
    client.embeddings.create(model="table", input=[[1, 2, 3]])  # as LangChain sends without the setting
except openai.BadRequestError as error:
    found["langchain, ids"] = str(error)

llama = TextEmbeddingsInference(base_url=url, model_name="table", text_instruction="", query_instruction="")
found["llama-index"] = llama.get_text_embedding_batch(texts)

found["hub"] = [InferenceClient(model=f"{url}/models/table").feature_extraction(text)[0].tolist() for text in texts]
found["hub, similarity"] = InferenceClient(model=f"{url}/models/table").sentence_similarity("good", ["good"])
classes = InferenceClient(model=f"{url}/models/length").text_classification("a fine film")
found["hub, classes"] = [[item.label, item.score] for item in classes]

ranked = cohere.ClientV2("none", base_url=url).rerank(
    model="ranker", query="film", documents=["good", "a very fine film", "bad film"], top_n=2
)
found["cohere"] = [item.index for item in ranked.results]
print(json.dumps(found))
