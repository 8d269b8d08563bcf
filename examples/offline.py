"""Many prompts in one call: `tcb.generate_batch`.

    python examples/offline.py [model name]

Every prompt gets the tokens that `model.generate` gives it alone, in the order of the prompts.
"""

from models import load_model
from transformers import GenerationConfig

import tcb

TEXTS = [
    "The capital of France is",
    "A haiku about the sea:",
    "The capital of France is Paris, and the capital of Italy is",
]


def main() -> None:
    """Generate 16 tokens for each text and print them."""
    model, tokenizer = load_model()
    prompts = [tokenizer.encode(text) for text in TEXTS]
    options = GenerationConfig(max_new_tokens=16, do_sample=False)

    outputs = tcb.generate_batch(model, prompts, options)

    for text, output in zip(TEXTS, outputs.values(), strict=True):
        print(output.request_id, output.status.name, output.generated_tokens)
        print(f"{text} -> {tokenizer.decode(output.generated_tokens)!r}")


if __name__ == "__main__":
    main()
