"""Selects the environment variables of reward processes: variables that programs need and that are never secret."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import rlhf
from rlhf.models.parameter_count import hub_cache

ALLOWED = (
    # Python and its packages
    *("PATH", "TMPDIR", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME"),
    *("PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PYTHONWARNINGS", "PYTHONUTF8", "PYTHONIOENCODING"),
    # language, time zone, user name
    *("LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LC_NUMERIC", "LC_TIME", "LC_COLLATE", "LC_MESSAGES", "TZ"),
    *("USER", "LOGNAME"),
    # thread counts, on which results may depend
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
    *("RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
    # devices
    *("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_VISIBLE_DEVICES"),
    *("NVIDIA_DRIVER_CAPABILITIES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    # trusted certificates; models that are already downloaded
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"),
    *("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_VERBOSITY"),
)
"""Variables that every reward process receives if the trainer has them. Proxy settings are not among them, because
their addresses may contain passwords."""


def reward_environment(trainer: Mapping[str, str], pass_env: Sequence[str]) -> dict[str, str]:
    """Return a reward process' environment: the trainer's variables in `ALLOWED` and in `pass_env`."""
    kept = {name: trainer[name] for name in (*ALLOWED, *pass_env) if name in trainer}
    root = str(Path(rlhf.__file__).parents[1])
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (root, trainer.get("PYTHONPATH"), str(Path.cwd()))))
    # Reward processes have another HOME. With this variable they find downloaded models, but not the Hub's token.
    kept["HF_HUB_CACHE"] = str(hub_cache(trainer))
    return kept
