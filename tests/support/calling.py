"""`tcb.generate_batch` as the tests of the API call it: few new tokens, small pages."""

import tcb

NEW = 6
SMALL = {"page_size": 8, "num_blocks": 64, "max_batch_tokens": 32}


def generate(model, prompts, **options):
    """Outputs by request id; `options` go before ours."""
    options = {"max_new_tokens": NEW, "continuous_batching_config": SMALL} | options
    return tcb.generate_batch(model, prompts, **options)


def tokens(outputs):
    """The generated tokens of every output, in order."""
    return [output.generated_tokens for output in outputs.values()]
