"""Cold start: a policy that has seen demonstrations before it meets rewards.

`farmhand warmup` plays a task set's oracle solutions in real sandboxes, writes them as the token sequences that the driver
would have seen, and takes supervised steps on the assistant's tokens. It starts from a model or makes a small one from
nothing, with a tokenizer made from the same demonstrations. The package's `quickstart` model is its output.
"""
