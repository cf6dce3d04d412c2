"""Prints the answers of transformers 4 to questions; run by ``test_tokens.py`` with the folder that has it."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[1])
transformers: Any = importlib.import_module("transformers")

folder, pairs, count = sys.argv[2:]
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
tokenizer.model_max_length = 64
model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder)
pipeline = transformers.QuestionAnsweringPipeline(model=model, tokenizer=tokenizer, device="cpu")
answers = []
for question, context in json.loads(Path(pairs).read_text()):
    found = pipeline(question=question, context=context, top_k=int(count), doc_stride=32)
    answers.append(found if isinstance(found, list) else [found])
print(json.dumps(answers))
