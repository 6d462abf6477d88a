"""Import of the server of ranks: DeepSpeed on a CPU, and what its optimizers import late; five CPU-seconds that every
rank would spend. Where there is a GPU, the device is told before the import, by whoever has an engine built."""

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

if find_spec("deepspeed") is not None and not list(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["DS_ACCELERATOR"] = "cpu"
    import_module("torch._inductor.compile_fx")
    import_module("deepspeed")
    del os.environ["DS_ACCELERATOR"]
