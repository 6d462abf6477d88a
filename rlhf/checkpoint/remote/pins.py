"""Pins checkpoints during their upload: a folder of hard links keeps the files on the disk until they are copied."""

from pathlib import Path

from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.checkpoint.commit.removal import delete
from rlhf.storage.files import link, make_dir, remove_dir
from rlhf.storage.layout import MANIFEST, PIN, fresh_name


def pin_checkpoint(path: Path) -> Path:
    """Create a pin beside the checkpoint `path`; after an OSError or DamagedCheckpoint, no pin exists."""
    pin = path.with_name(fresh_name(PIN, path.name))
    try:
        for name in [*read_manifest(path).files, MANIFEST]:
            make_dir((pin / name).parent)
            link(path / name, pin / name)
    except OSError:
        remove_dir(pin, ignore_errors=True)
        raise
    return pin


def checkpoint_of(pin: Path) -> Path:
    """Return the path under which a pin's checkpoint is or was published."""
    return pin.with_name(pin.name.removeprefix(PIN).partition("-")[0])


def remove_pins(run_dir: Path) -> None:
    """Remove a killed upload's pins from the run directory. No upload may be in progress."""
    for pin in run_dir.glob(f"{PIN}*"):
        remove_pin(pin)


def remove_pin(pin: Path) -> None:
    """Remove a pin if it exists; a disk error is logged."""
    if pin.exists():
        delete(pin)
