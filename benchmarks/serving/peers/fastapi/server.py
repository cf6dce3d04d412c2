"""The naive server, as most would write it in an hour: FastAPI, a pydantic body, one call of the model a request."""

import uvicorn
from arguments import engine, parse
from fastapi import FastAPI, Response
from fastapi.requests import Request
from pydantic import create_model

options = parse()
model = engine()
app = FastAPI()
Nested = list[float] | list[list[list[float]]]
Sample = create_model(
    "Sample",
    **{name: (list[float] if shape == shape[:1] else Nested, ...) for name, (_, shape) in model.inputs.items()},
)


@app.post("/predict")
async def predict(sample: Sample) -> dict[str, list[float]]:
    arrays = {name: array[None] for name, array in model.of_json(sample.model_dump()).items()}
    return {model.output: model.run(arrays)[0].tolist()}


@app.post("/predict/binary")
async def predict_binary(request: Request) -> Response:
    arrays = {name: array[None] for name, array in model.of_bytes(await request.body()).items()}
    return Response(model.run(arrays)[0].tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning", access_log=False)
