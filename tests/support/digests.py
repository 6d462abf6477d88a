"""Prints digests of short runs and compares them with known digests: `python -m tests.support.digests [RUN...]`.

A digest covers names, types, shapes and values, independent of file formats, the number of ranks and the order of
entries. `known_digests.json` has the digests by place, the part of the machine that decides the bits (see `place`).
Exits with 0 if all digests are known, 1 if one differs, 2 if this place is unknown; `--record` then adds the digests of
this tree to the table. `--of CHECKPOINT` prints the digests of an existing checkpoint.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rlhf.checkpoint.commit.manifest import Manifest
from rlhf.errors import EXIT_DONE
from rlhf.experience.groups import from_tensors
from rlhf.storage.layout import CARRIED, HF_FOLDER, INDEX, REFERENCE, SCHEDULE, scan
from rlhf.storage.reading import CheckedFiles
from rlhf.storage.shards import DTYPES, Shard, TensorReader, as_bytes
from tests.faults.profiles import PROFILES, overrides
from tests.support.compare_runs import driver_state, history
from tests.support.launching import ranks
from tests.support.verified import verify

TABLE = Path(__file__).with_name("known_digests.json")
STEPS = 4
"""Steps of the lora, ppo and dapo runs."""
OFFLINE_STEPS = {"offline_3": 3, "offline": 20}
"""Steps of the runs of the offline recipe."""
RANKS = {"offline_3": 1, "offline": 1, "lora": 1, "ppo": 2, "dapo": 1}
"""Number of ranks of each run."""
SWITCHES = (
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_DEBUG_CPU_TYPE",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_CPU_ISA_HINTS",
    "DNNL_CPU_ISA_HINTS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
)
"""Environment variables by which MKL and oneDNN choose kernels."""

Digests = Mapping[str, str]
"""SHA-256 by part of a checkpoint or its run."""


def place() -> dict[str, str]:
    """Return all that decides the bits besides the code: torch's version, the processor's vendor and widest
    instructions, those of torch's own kernels (`ATEN_CPU_CAPABILITY`), and each set variable of `SWITCHES`."""
    lines = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    cpu = {name.strip(): value.split() for name, value in lines.items()}
    widest = next((name for name in ("avx512f", "avx2") if name in cpu.get("flags", [])), "others")
    switches = {name: value for name in SWITCHES if (value := os.environ.get(name))}
    return {
        "torch": torch.__version__,
        "maker": " ".join(cpu.get("vendor_id", ["unknown"])),
        "processor": widest,
        "kernels": torch.backends.cpu.get_cpu_capability(),
    } | switches


def run_arguments(run: str, folder: Path) -> list[str]:
    """Return the settings of a run of `RANKS`, with one CPU thread per rank."""
    if run not in OFFLINE_STEPS:
        sharded = ["backend.dp_replicate=1"]  # as when the digests were recorded
        return overrides(folder, run, STEPS, RANKS[run], PROFILES[run]) + sharded
    return [
        f"trainer.default_local_dir={folder}",
        f"trainer.experiment_name={run}",
        f"trainer.total_training_steps={OFFLINE_STEPS[run]}",
        "trainer.val_before_train=false",
        "trainer.device=cpu",
        "trainer.threads_per_rank=1",
    ]


def digests_of_run(run: str, folder: Path) -> Digests:
    """Run `run` in `folder` and return the digests of its last checkpoint and its metrics."""
    end = ranks(folder / f"{run}.log", run_arguments(run, folder), nproc=RANKS[run])
    assert end.code == EXIT_DONE, end.output
    run_dir = folder / "rlhf" / run
    return {**digests_of_checkpoint(scan(run_dir)[0]), "metrics": of_values(history(run_dir))}


def digests_of_checkpoint(path: Path) -> Digests:
    """Return the digests of all state that a checkpoint restores and of its exported models, by part."""
    manifest = verify(path)
    files = CheckedFiles(path, manifest.files)
    digests = {folder: of_tensors(_component(files, folder)) for folder in _components(manifest)}
    for role in manifest.roles:
        digests[f"{role}/extra"] = of_values(files.document(f"{role}/{SCHEDULE}"))
        if exported := _files_in(manifest, f"{role}/{HF_FOLDER}"):
            digests[f"{role}/{HF_FOLDER}"] = of_tensors(_whole(path, exported))
    digests["rng"] = of_tensors(
        (f"{Path(name).stem}.{key}", tensor)
        for name in _files_in(manifest, "rng")
        for key, tensor in load_file(path / name).items()
    )
    if carried := _files_in(manifest, CARRIED):
        groups = [group for name in carried for group in from_tensors(load_file(path / name))]
        digests["carried"] = of_values([_group(group) for group in groups])
    state = driver_state(path)
    for newer in ("tokens_fingerprint", "held_out"):  # the table is older than these entries
        state["data"].pop(newer, None)
    return digests | {"driver_state": of_values(state)}


def of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return the digest of names, types, shapes and values of CPU tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(as_bytes(tensor.contiguous()))
    return digest.hexdigest()


def of_values(values: Any) -> str:
    """Return the digest of JSON values, independent of the order of keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _components(manifest: Manifest) -> list[str]:
    """Return the folders with sharded tensors."""
    names = [f"{role}/{item}" for role in manifest.roles for item in ("model", "optimizer")]
    return [folder for folder in (*names, REFERENCE) if f"{folder}/{INDEX}" in manifest.files]


def _component(files: CheckedFiles, folder: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the unsharded tensors of a folder of shards."""
    reader = TensorReader.of_component(files, folder)
    for name, (dtype, shape) in reader.tensors.items():
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        reader.read_into({name: Shard(shape, (0,), tensor)})
        yield name, tensor


def _files_in(manifest: Manifest, folder: str) -> list[str]:
    return [name for name in sorted(manifest.in_folder(folder)) if name.endswith(".safetensors")]


def _whole(path: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        yield from load_file(path / name).items()


def _group(group: Any) -> list[Any]:
    """Return a carried group as numbers and texts."""
    samples = [
        [_plain(sample.token_ids), _plain(sample.log_probs), sample.finish_reason, sample.version]
        for sample in group.samples
    ]
    return [group.uid, _plain(group.prompt_ids), samples, _plain(group.scores)]


def _plain(numbers: Any) -> list:
    return numbers.tolist() if hasattr(numbers, "tolist") else list(numbers)


def known(here: Mapping[str, str]) -> dict[str, dict[str, str]] | None:
    """Return the known digests of each run at a place, or None for an unknown place.

    A part is absent if it changed after the last time that somebody could record digests at this place.
    """
    return next((entry["digests"] for entry in json.loads(TABLE.read_text()) if here in entry["places"]), None)


def known_everywhere(run: str) -> Digests:
    """Return the digests of a run's parts that are equal at every known place, because no kernel affects them."""
    first, *others = (entry["digests"][run] for entry in json.loads(TABLE.read_text()))
    return {part: digest for part, digest in first.items() if all(other.get(part) == digest for other in others)}


def record(here: Mapping[str, str], digests: Mapping[str, Digests]) -> None:
    """Add an unknown place to the table: to the entry with the same digests, or as a new entry."""
    entries = json.loads(TABLE.read_text())
    same = next((entry for entry in entries if entry["digests"] == digests), None)
    if same is None:
        entries.append(same := {"places": [], "digests": digests})
    same["places"].append(here)
    TABLE.write_text(json.dumps(entries, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.digests", description=__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"of {', '.join(RANKS)}; all by default")
    parser.add_argument("--of", type=Path, metavar="CHECKPOINT", help="print the digests of this checkpoint instead")
    parser.add_argument("--record", action="store_true", help="add the digests to the table, which lacks this place")
    arguments = parser.parse_args()
    if arguments.of is not None:
        print_lines(f"{part:20} {digest}" for part, digest in digests_of_checkpoint(arguments.of).items())
        return 0
    here = place()
    expected = known(here)
    print_lines([f"place: {json.dumps(here)}"])
    digests = {}
    with tempfile.TemporaryDirectory(prefix="rlhf-digests-") as folder:
        for run in arguments.runs or RANKS:
            digests[run] = digests_of_run(run, Path(folder))
            print_lines(_compared(run, digests[run], None if expected is None else expected[run]))
    if expected is None and arguments.record:
        record(here, digests)
    if expected is None:
        return 2
    return int(any(digests[run].get(part) != digest for run in digests for part, digest in expected[run].items()))


def _compared(run: str, digests: Digests, expected: Digests | None) -> Iterator[str]:
    expected = expected or {}
    for part in sorted(digests.keys() | expected.keys()):
        equal = expected.get(part) == digests.get(part)
        verdict = "unknown here" if part not in expected else "equal" if equal else "DIFFERS"
        yield f"{run:8} {part:18} {digests.get(part, 'missing'):64} {verdict}"


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
