"""Lets a server write texts through clients of OpenAI's API; prints each text. Run by ``test_writing_clients.py``.

Arguments: the server's address, the model, a prompt, and which library besides ``openai`` is installed.
"""

import asyncio
import json
import sys

import openai

url, model, prompt, library = sys.argv[1:]
place = {"base_url": f"{url}/v1", "api_key": "none"}
talk = [{"role": "user", "content": prompt}]
found = {}

client = openai.OpenAI(**place)
found["openai"] = client.completions.create(model=model, prompt=prompt, max_tokens=12).choices[0].text
message = client.chat.completions.create(model=model, messages=talk, max_tokens=12).choices[0].message
found["openai, chat"] = message.content

stream = client.completions.create(model=model, prompt=prompt, max_tokens=12, stream=True)
found["openai, stream"] = "".join(chunk.choices[0].text for chunk in stream)
chunks = [
    *client.chat.completions.create(
        model=model, messages=talk, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
]
found["openai, chat, stream"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
found["openai, usage"] = [chunks[0].choices[0].delta.role, chunks[-1].choices, chunks[-1].usage.completion_tokens]
extra = {"top_k": 1, "min_p": 0.5, "repetition_penalty": 1.0, "ignore_eos": True}
given = client.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=2, seed=1, extra_body=extra)
found["openai, extra"] = given.choices[0].text
probable = client.chat.completions.create(model=model, messages=talk, max_tokens=3, logprobs=True, top_logprobs=2)
found["openai, logprobs"] = [token.token for token in probable.choices[0].logprobs.content]
errors = []
for fields in ({"logit_bias": {"1": 2}}, {"model": "other"}):
    try:
        client.completions.create(**{"model": model, "prompt": prompt, **fields})
    except openai.APIStatusError as error:
        errors.append([type(error).__name__, error.param])
found["openai, errors"] = errors
found["openai, models"] = [each.id for each in client.models.list()]


async def write():
    async with openai.AsyncOpenAI(**place) as client:
        whole = await client.chat.completions.create(model=model, messages=talk, max_tokens=12)
        stream = await client.chat.completions.create(model=model, messages=talk, max_tokens=12, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return whole.choices[0].message.content, "".join(pieces)


found["openai, async"], found["openai, async, stream"] = asyncio.run(write())

if library == "langchain":
    from langchain_openai import ChatOpenAI, OpenAI

    chat = ChatOpenAI(model=model, max_tokens=12, temperature=0, **place)
    found["langchain, chat"] = chat.invoke(prompt).content
    found["langchain, chat, stream"] = "".join(chunk.content for chunk in chat.stream(prompt))
    plain = OpenAI(model=model, max_tokens=12, temperature=0, **place)
    found["langchain"] = plain.invoke(prompt)
    found["langchain, stream"] = "".join(plain.stream(prompt))
else:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    options = {"model": model, "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 12, "temperature": 0}
    chat = OpenAILike(is_chat_model=True, **options)
    messages = [ChatMessage(role="user", content=prompt)]
    found["llama-index, chat"] = chat.chat(messages).message.content
    found["llama-index, chat, stream"] = "".join(part.delta for part in chat.stream_chat(messages))
    plain = OpenAILike(is_chat_model=False, **options)
    found["llama-index"] = plain.complete(prompt).text
    found["llama-index, stream"] = "".join(part.delta for part in plain.stream_complete(prompt))
print(json.dumps(found))
