"""Serves jobs with vLLM, in an environment that has it and neither this package nor its tests.

    PYTHON -P vllm_worker.py FOLDER DTYPE MAX_LENGTH

Reads a job a line from standard input, {"prompts": token ids of each, "new_tokens": n}, and answers
each with a line of JSON, {"seconds", "tokens"}; the first line it writes says that it is ready.
"""

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Load the model, eager, and answer jobs until standard input ends."""
    # what libraries print must not stand between the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    folder, dtype, max_length = sys.argv[1:]
    import vllm

    engine = vllm.LLM(
        folder,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=int(max_length),
        skip_tokenizer_init=True,
    )
    _answer(answers, {"version": vllm.__version__})
    for line in sys.stdin:
        job = json.loads(line)
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        _answer(answers, {"seconds": seconds, "tokens": tokens})


def _answer(answers: Any, content: dict[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
