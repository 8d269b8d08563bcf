"""Requests from coroutines: some are awaited, one is streamed, one is given up; then what the
manager says of itself.

    python examples/async_client.py [model name]

The manager serves from a thread of its own, so that the event loop is never held up.
"""

import asyncio

from models import load_model
from transformers import GenerationConfig

import tcb


async def serve(manager: tcb.ContinuousBatchingManager, encode) -> None:
    """Three kinds of clients at once."""
    stream = manager.stream(encode("A haiku about the sea:"))
    answers = asyncio.gather(
        manager.generate(encode("The capital of France is"), max_new_tokens=4),
        manager.generate(encode("Two and two are"), max_new_tokens=4),
    )
    async for output in stream:
        print("streamed", output.generated_tokens)
    for output in await answers:
        print("finished", output.generated_tokens)
    try:
        # a client that stops waiting cancels its request
        await asyncio.wait_for(manager.generate(encode("Forever"), max_new_tokens=10**4), 0.2)
    except TimeoutError:
        print("given up")
    stats = manager.stats()
    print(f"{stats.decode_tokens} tokens decoded in {stats.steps} steps")


def main() -> None:
    """Run the clients against a manager."""
    model, tokenizer = load_model()
    options = GenerationConfig(max_new_tokens=8, do_sample=False)
    with tcb.continuous_batching_context_manager(model, options) as manager:
        asyncio.run(serve(manager, tokenizer.encode))


if __name__ == "__main__":
    main()
