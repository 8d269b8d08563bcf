"""Requests that come and go while others run: a manager, streamed outputs, options of one request.

    python examples/streaming.py [model name]

The manager serves from a thread of its own; leaving the `with` block waits for every request.
"""

from models import load_model
from transformers import GenerationConfig

import tcb


def main() -> None:
    """Stream one request token by token while another runs, then print the other's end."""
    model, tokenizer = load_model()
    options = GenerationConfig(max_new_tokens=12, do_sample=False)

    with tcb.continuous_batching_context_manager(model, options) as manager:
        poem = manager.add_request(tokenizer.encode("A haiku about the sea:"), streaming=True)
        fact = manager.add_request(tokenizer.encode("The capital of France is"), max_new_tokens=4)

        for output in manager.request_id_iter(poem):
            # an output holds all tokens so far
            print("streamed", output.status.name, output.generated_tokens)

        output = manager.get_result(fact)
        print("finished", output.request_id, output.generated_tokens)


if __name__ == "__main__":
    main()
