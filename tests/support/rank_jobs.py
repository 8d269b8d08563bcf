"""What one rank does in the tests of tensor parallelism; each job is a process of its own."""

import os
import time

import torch
from transformers import GenerationConfig

import tcb
import tcb.engine
from tcb.planning.schedule import plan_batch
from tests.support.ranks import load

NEW = 8
TIGHT = {"page_size": 4, "num_blocks": 26, "max_batch_tokens": 16}
SETTINGS = [
    TIGHT | {"use_async_batching": True, "return_logprobs": True},
    TIGHT | {"cpu_offload_space": 0.01, "scheduler_type": "prefill_first"},
]
TIMEOUT = 4.0


def tokens_of(outputs):
    """Generated tokens, in order; who failed shows its error instead."""
    return [output.error or output.generated_tokens for output in outputs.values()]


def everything(rank, folder, paths, prompts):
    """All of the jobs below that need no group of their own, in one: a group takes seconds."""
    return {
        "families": families(rank, paths, prompts),
        "one model": one_model(rank, folder["llama"], prompts),
        "refusals": refusals(rank, folder),
    }


def families(rank, paths, prompts):
    """Tokens of every family under every setting, and the plans that were made on the way."""
    plans, made = [], []

    def noting(state, limits):
        plan = plan_batch(state, limits)
        plans.append(repr(plan))
        return plan

    tcb.engine.plan_batch = noting
    for path in paths:
        model = load(path)
        for settings in SETTINGS:
            outputs = tcb.generate_batch(
                model, prompts, max_new_tokens=NEW, continuous_batching_config=settings
            )
            made.append(tokens_of(outputs))
    tcb.engine.plan_batch = plan_batch
    return {"tokens": made, "plans": plans, "hash": hash("tcb")}


def one_model(rank, path, prompts):
    """What a user may do with one model: sample, keep the manager, change weights, talk to a
    manager on rank 0.
    """
    model, seen = load(path), {}
    sampled = tcb.generate_batch(
        model,
        prompts,
        GenerationConfig(max_new_tokens=NEW, do_sample=True, top_k=20, repetition_penalty=1.3),
        TIGHT | {"return_logprobs": True},
    )
    seen["sampled"] = tokens_of(sampled)
    seen["logprobs"] = [output.logprobs for output in sampled.values()]
    # a clock, and a criterion that cannot be sent: rank 0 decides for all
    seen["stopped"] = tokens_of(
        tcb.generate_batch(
            model,
            prompts[:3],
            max_new_tokens=NEW,
            max_time=1e9,
            stopping_criteria=[
                lambda ids, scores: torch.tensor([rank == 0 and ids[0, -1] % 3 == 0])
            ],
            continuous_batching_config=TIGHT,
        )
    )
    kept = {"max_new_tokens": NEW, "persistent_manager": True, "continuous_batching_config": TIGHT}
    seen["kept"] = [tokens_of(tcb.generate_batch(model, prompts, **kept)) for _ in range(2)]
    if rank == 1:
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.to_local().mul_(3.0)
    seen["changed"] = tokens_of(tcb.generate_batch(model, prompts, **kept))
    seen["changed alone"] = tokens_of(
        tcb.generate_batch(model, prompts, max_new_tokens=NEW, continuous_batching_config=TIGHT)
    )
    tcb.destroy_cached_continuous_batching_manager(model)
    seen["manager"] = _talk(rank, model, prompts)
    return seen


def _talk(rank, model, prompts):
    manager = tcb.init_continuous_batching(model, GenerationConfig(max_new_tokens=NEW), TIGHT)
    manager.start()
    seen = {
        "driver": manager.is_tp_driver,
        "size": manager.distributed_helper.tp_size,
        "id": manager.add_request(prompts[0], "mine", streaming=True),
    }
    if rank == 0:
        streamed = [output.generated_tokens for output in manager.request_id_iter("mine")]
        seen["streamed"] = streamed
        manager.add_request(prompts[1], "long", max_new_tokens=60)
        manager.cancel_request("long")
        seen["cancelled"] = manager.get_result("long", timeout=60).error
        # longer than a heartbeat: nobody may take idle ranks for dead
        time.sleep(0.3)
    with manager.pause():
        seen["paused"] = manager.background_thread_status.is_pause_requested()
    if rank == 0:
        manager.add_request(prompts[0], "last")
        seen["last"] = manager.get_result("last", timeout=60).generated_tokens
        manager.stop()
    else:
        # rank 0 stops all
        manager.join(time.perf_counter(), 60)
    seen["left over"] = manager.output_router.output_queue.qsize()
    seen["running"] = manager.is_running()
    return seen


def refusals(rank, paths):
    """How ranks refuse what they do not have in common, and models that cannot be split so."""
    seen = {}
    model = load(paths["llama"])
    cases = {
        "settings": {"max_batch_tokens": 16 + rank, "page_size": 4, "num_blocks": 26},
        "memory": {"page_size": 4, "num_blocks": 10**9 if rank == 1 else 26},
    }
    for name, settings in cases.items():
        seen[name] = _error(
            lambda settings=settings: tcb.generate_batch(
                model, [[1, 2]], max_new_tokens=2, continuous_batching_config=settings
            )
        )
    tcb_version, tcb.__version__ = tcb.__version__, f"0.{rank}"
    seen["version"] = _error(lambda: tcb.generate_batch(model, [[1, 2]], max_new_tokens=2))
    tcb.__version__ = tcb_version
    seen["heads"] = _error(
        lambda: tcb.generate_batch(load(paths["three heads"]), [[1, 2]], max_new_tokens=2)
    )
    seen["afterwards"] = tokens_of(
        tcb.generate_batch(model, [[1, 2, 3]], max_new_tokens=NEW, continuous_batching_config=TIGHT)
    )
    return seen


def losing_a_rank(rank, path, prompts, how):
    """Outputs and seconds after the other rank is lost in the middle of serving."""
    model = load(path)
    settings = TIGHT | {"cpu_group_timeout": TIMEOUT}
    manager = tcb.init_continuous_batching(
        model, GenerationConfig(max_new_tokens=10_000), settings | {"num_blocks": 4000}
    )
    manager.start()
    ids = [manager.add_request(prompt, streaming=False) for prompt in prompts]
    time.sleep(0.5)
    since = time.perf_counter()
    if rank == 1:
        os.kill(os.getpid(), how)
    errors = [manager.get_result(name, timeout=60).error for name in ids]
    manager.join(since, 60)
    fatal = repr(manager.background_thread_status.fatal_error)
    return {"errors": errors, "seconds": time.perf_counter() - since, "fatal": fatal}


def _error(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
