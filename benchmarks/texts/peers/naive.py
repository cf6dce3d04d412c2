"""The naive server, as most would write it in an hour: FastAPI and sentence-transformers."""

import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(sys.argv[1], device="cpu")
app = FastAPI()


class Request(BaseModel):
    input: str | list[str]
    model: str = ""


@app.post("/v1/embeddings")
def embeddings(request: Request) -> dict[str, Any]:
    texts = [request.input] if isinstance(request.input, str) else request.input
    vectors = model.encode(texts, show_progress_bar=False)
    data = [{"object": "embedding", "index": index, "embedding": row.tolist()} for index, row in enumerate(vectors)]
    return {"object": "list", "data": data, "model": request.model}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", access_log=False)
