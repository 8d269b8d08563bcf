"""A process that ends while an engine lives is gone soon, and without an error."""

import subprocess
import sys
from time import monotonic


def test_a_process_ends_without_stop():
    code = """
import torch, tcb
from tests.support.families import FAMILIES
from transformers import GenerationConfig
model = FAMILIES["llama"]()
manager = tcb.init_continuous_batching(model, GenerationConfig(max_new_tokens=400))
manager.start()
manager.add_request([1, 2])
tcb.generate_batch(model, [[1, 2]], max_new_tokens=2)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_process_ends_in_the_middle_of_a_long_step():
    code = """
import threading, time, torch, tcb
from tests.support.families import FAMILIES
from transformers import GenerationConfig
model = FAMILIES["llama"]()
manager = tcb.init_continuous_batching(model, GenerationConfig(max_new_tokens=400))
manager.start()
began, may_begin = threading.Event(), threading.Event()
large = torch.zeros(600, 600)
def slow(*_):
    if may_begin.is_set():
        began.set()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            large @ large
with manager.pause():
    model.model.layers[0].register_forward_pre_hook(slow)
manager.add_request([1, 2], max_new_tokens=2)
manager.get_result("req_0")
may_begin.set()
manager.add_request([1, 2])
assert began.wait(60)
print(time.monotonic(), flush=True)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert monotonic() - float(ended.stdout) < 30
    assert "Traceback" not in ended.stderr
