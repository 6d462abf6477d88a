"""Identifies a run in its manifests: backend, configuration, files and versions."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import xxhash

import rlhf
from rlhf.numerics import NUMERICS


@dataclass(frozen=True)
class Identity:
    """Identifies the run that wrote a checkpoint; its manifest has the same fields.

    `fingerprints` identify the files that settings name (`model.path`, ...), by setting. `threads` are the CPU threads
    of each rank. `numerics` is the numerics version (`rlhf.numerics`).
    """

    backend: str
    config_hash: str
    fingerprints: dict[str, str]
    versions: dict[str, str]
    threads: list[int]
    numerics: int = NUMERICS

    @classmethod
    def of_run(
        cls, backend: str, config_yaml: str, fingerprints: Mapping[str, str], threads: Sequence[int]
    ) -> "Identity":
        versions = {
            "rlhf": rlhf.__version__,
            "torch": version("torch"),
            "transformers": version("transformers"),
            "python": platform.python_version(),
        }
        return cls(
            backend, xxhash.xxh3_128_hexdigest(config_yaml.encode()), dict(fingerprints), versions, list(threads)
        )
