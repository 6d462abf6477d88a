"""Imports DeepSpeed on a CPU and its optimizers' late imports in the server of ranks, which saves each rank five CPU
seconds. With a GPU, the caller of the engine's build sets the device before the import instead."""

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

if find_spec("deepspeed") is not None and not list(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["DS_ACCELERATOR"] = "cpu"
    import_module("torch._inductor.compile_fx")
    import_module("deepspeed")
    del os.environ["DS_ACCELERATOR"]
