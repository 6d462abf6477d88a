"""Hard-links checkpoints for their upload, so that retention cannot remove the files before they are copied."""

from pathlib import Path

from rlhf.checkpoint.commit.manifest import read_manifest
from rlhf.checkpoint.commit.removal import delete
from rlhf.storage.files import link, make_dir, remove_dir
from rlhf.storage.layout import MANIFEST, UPLOAD, fresh_name


def link_for_upload(path: Path) -> Path:
    """Create a folder of hard links beside the checkpoint `path`. On OSError or DamagedCheckpoint, leave no folder."""
    links = path.with_name(fresh_name(UPLOAD, path.name))
    try:
        for name in [*read_manifest(path).files, MANIFEST]:
            make_dir((links / name).parent)
            link(path / name, links / name)
    except OSError:
        remove_dir(links, ignore_errors=True)
        raise
    return links


def checkpoint_of(links: Path) -> Path:
    """Return the path under which the checkpoint of a folder of links is or was published."""
    return links.with_name(links.name.removeprefix(UPLOAD).partition("-")[0])


def remove_upload_links(run_dir: Path) -> None:
    """Remove the links of a killed upload from the run directory. No upload may be in progress."""
    for links in run_dir.glob(f"{UPLOAD}*"):
        remove_links(links)


def remove_links(links: Path) -> None:
    """Remove a folder of links if it exists; a disk error is logged."""
    if links.exists():
        delete(links)
