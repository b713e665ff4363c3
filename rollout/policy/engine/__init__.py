"""The reference engine: a policy server in torch and aiohttp, for machines without vLLM.

Parts, each of which knows only those before it: `sampling` (logits to tokens), `batch` (the state of all rows and what one
step runs; no model), `kv` (keys and values by row, and attention over them), `weights` (safetensors to parameters, whole or
not at all), `core` (the thread that runs steps and commands), `wire` (vLLM's JSON), `server` (routes and process).

Determinism: with one thread and float32 a request's tokens and log-probs are, bit for bit, a function of the weights, its
token ids and its sampling parameters; neither what else is in the batch nor what was reused from the prefix cache shows. It
holds by construction of shapes: see `kv.MIN_QUERIES`, `kv.KEY_BLOCK` and `batch.MIN_TOKENS`.
"""
