"""Pins of checkpoints under upload: folders of hard links, which keep the files on the disk until they are copied."""

from pathlib import Path

from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.checkpoint.commit.removal import delete
from rlhf.storage.files import link, make_dir, remove_dir
from rlhf.storage.layout import MANIFEST, PIN, fresh_name


def pin_checkpoint(path: Path) -> Path:
    """A fresh pin beside the checkpoint `path`; raises OSError or DamagedCheckpoint, with nothing left behind, where
    none can be made."""
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
    """The place where the checkpoint of a pin is published, or was."""
    return pin.with_name(pin.name.removeprefix(PIN).partition("-")[0])


def remove_pins(run_dir: Path) -> None:
    """Remove what a killed upload left in the run directory; only for a time when none is under way."""
    for pin in run_dir.glob(f"{PIN}*"):
        remove_pin(pin)


def remove_pin(pin: Path) -> None:
    """Remove a pin if it is there; a disk that refuses is logged."""
    if pin.exists():
        delete(pin)
