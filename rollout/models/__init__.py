"""Model folders by name: `resolve_model` turns what a config says into a folder that transformers can load.

Guarantees:

* A resolved folder holds `config.json` and safetensors weights; one of a known name also a tokenizer with a chat template.
* A name that needs a conversion is converted once per machine, into a cache folder that appears whole or not at all, also
  with several callers at once.
* An unknown name, or a folder that is no model, is a `ModelNotFound` that says what is known.
"""

from rollout.models.resolve import KNOWN, ModelNotFound, load_model, load_tokenizer, resolve_model

__all__ = ["KNOWN", "ModelNotFound", "load_model", "load_tokenizer", "resolve_model"]
