"""Runs a function in several processes that form one group of ranks, as a launcher would."""

import os
import pickle
import socket
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def run_ranks(job, size, *args, hash_seeds=None):
    """What `job(rank, *args)` returned on every rank; a rank that died or raised is an exception.

    hash_seeds   PYTHONHASHSEED of each rank
    """
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        context = torch.multiprocessing.get_context("spawn")
        processes = []
        for rank in range(size):
            if hash_seeds is not None:
                os.environ["PYTHONHASHSEED"] = str(hash_seeds[rank])
            launcher = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            target = Path(folder) / f"{rank}.pickle"
            process = context.Process(target=_run, args=(job, rank, launcher, target, args))
            process.start()
            processes.append(process)
        os.environ.pop("PYTHONHASHSEED", None)
        free.close()
        # whoever stands still after rank 0 came to its end does so on purpose
        for process in processes:
            process.join(120 if process is processes[0] else 10)
            if process.is_alive():
                process.kill()
        return [_result(Path(folder) / f"{rank}.pickle") for rank in range(size)]


def load(path):
    """The model of a folder, split over the ranks of this process's group."""
    config = AutoModelForCausalLM.from_pretrained(path).config
    return AutoModelForCausalLM.from_pretrained(
        path, tp_plan="auto", attn_implementation=config._attn_implementation
    )


def _result(path):
    if not path.exists():
        return RuntimeError("the process ended without a result")
    return pickle.loads(path.read_bytes())


def _run(job, rank, launcher, target, args):
    torch.set_num_threads(1)
    os.environ.update(launcher)
    try:
        result = job(rank, *args)
    except Exception as error:
        result = type(error)(str(error))
    target.write_bytes(pickle.dumps(result))
    torch.distributed.is_initialized() and torch.distributed.destroy_process_group()
    # whoever is left in a broken group is not waited for
    os._exit(0)
