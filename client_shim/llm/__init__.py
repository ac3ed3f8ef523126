"""The untrusted half of a language model: its folder, its template, its tokenizer and text.

In: a model's folder, and requests as OpenAI's interface has them. Out: token ids for a runtime, and answers. It runs in
a function's sandbox.
"""
