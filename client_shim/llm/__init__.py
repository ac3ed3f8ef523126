"""The half of a language model that must be distrusted: its folder, its template, its tokenizer, text.

In: a model's folder, and requests as OpenAI's interface has them. Out: token ids for a runtime, and answers. It runs in
a function's sandbox.
"""
