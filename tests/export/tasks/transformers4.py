"""Prints the answers of transformers 4 to questions; run by ``test_tokens.py`` with the folder that has it."""

import json
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, QuestionAnsweringPipeline

folder, pairs, count = sys.argv[2:]
tokenizer = AutoTokenizer.from_pretrained(folder)
tokenizer.model_max_length = 64
model = AutoModelForQuestionAnswering.from_pretrained(folder)
pipeline = QuestionAnsweringPipeline(model=model, tokenizer=tokenizer, device="cpu")
answers = []
for question, context in json.loads(Path(pairs).read_text()):
    found = pipeline(question=question, context=context, top_k=int(count), doc_stride=32)
    answers.append(found if isinstance(found, list) else [found])
print(json.dumps(answers))
