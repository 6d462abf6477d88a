"""Imports DeepSpeed, and modules that it imports late, in the process that forks the tests' ranks.

This saves each rank five CPU seconds.

Does nothing on a machine with a GPU: there, a rank sets its device before it imports DeepSpeed.
"""

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

if find_spec("deepspeed") is not None and not list(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["DS_ACCELERATOR"] = "cpu"
    import_module("torch._inductor.compile_fx")
    import_module("deepspeed")
    del os.environ["DS_ACCELERATOR"]
