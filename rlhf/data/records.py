"""Reads records from parquet, JSONL, JSON and CSV files, globs and Hub datasets. Runs no code from the data."""

import glob
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf.data.record_texts import Record, csv_records, extension_by_content, json_records, jsonl_records
from rlhf.data.rows import VERL_COLUMNS, listed, suggestion
from rlhf.errors import UserError, did_you_mean, nearest_path
from rlhf.reward import WantedColumns

log = logging.getLogger(__name__)

EXTENSIONS = (".parquet", ".jsonl", ".json", ".csv")
COMPRESSED = (".gz", ".zst", ".xz", ".bz2", ".zip")
HUB_NAME = re.compile(r"(?P<path>[\w.-]+/[\w.-]+)(:(?P<config>[\w.+-]+))?(@(?P<split>[\w.-]+))?")
HUB_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Source:
    """One file, or one Hub dataset `org/name`, `org/name:config`, `org/name@split` or `org/name:config@split`."""

    setting: str
    spec: str
    path: Path | None
    default_split: str

    @property
    def label(self) -> str:
        """Return the `data_source` of rows whose column `data_source` is missing or empty."""
        if self.path is not None and (file := self.path.resolve()).suffix == self.path.suffix:
            return file.stem  # a link's target, except in the Hub's cache: its targets are hashes without a suffix
        return self.path.stem if self.path else self.spec.partition("@")[0].partition(":")[0]

    @cached_property
    def hub_split(self) -> Any:
        """The rows of the split, loaded from the Hub or from the local cache."""
        match = HUB_NAME.fullmatch(self.spec)
        assert match is not None
        splits = _load_from_hub(self, match["path"], match["config"])
        split = match["split"] or self.default_split
        if split not in splits:
            raise UserError(
                f"{self.setting}={self.spec}: no split {split!r}; it has {listed(map(str, splits))}. Name one, for "
                f"instance {self.setting}={self.spec.partition('@')[0]}@{next(iter(splits))}."
            )
        return splits[split]

    def files(self) -> list[Path]:
        """Return the local files of the records. For a Hub dataset, these are its files in the Hub's cache, if any."""
        if self.path is not None:
            return [self.path]
        return [Path(file["filename"]) for file in self.hub_split.cache_files]

    def records(self, prompt_key: str, answer_key: str, wanted: WantedColumns) -> Iterator[Record]:
        """Yield the records in order.

        From parquet files, read only the columns that the trainer and the rewards use. Other columns are then None.
        """
        if self.path is None:
            return ((f"{self.setting}: {self.spec} row {n}", record) for n, record in enumerate(self.hub_split))
        if self.path.suffix == ".parquet":
            used = {prompt_key, answer_key, *VERL_COLUMNS}
            return _parquet_records(self, lambda name: name in used or wanted.reads(name))
        texts = {".csv": csv_records, ".json": json_records}.get(self.path.suffix, jsonl_records)
        return texts(self.setting, self.path)


def resolve(setting: str, value: Any, default_split: str, *, any_file: bool = False) -> list[Source]:
    """Return the sources of `data.*_files`, with globs in sorted order. Raise UserError for a missing source.

    `any_file` also allows files whose extension is not in EXTENSIONS, for the user's code.
    """
    specs = [value] if isinstance(value, str) else value
    if not isinstance(specs, Sequence) or not specs or not all(isinstance(s, str) and s for s in specs):
        raise UserError(f"{setting}={value!r} names no data. Set a file, a glob, a Hub name or a non-empty list.")
    sources = [source for spec in specs for source in _resolve_one(setting, spec, default_split)]
    for source in sources if not any_file else ():
        _check_extension(source)
    return sources


def _resolve_one(setting: str, spec: str, default_split: str) -> list[Source]:
    path = Path(spec).expanduser()
    if "://" in spec:
        raise UserError(f"{setting}={spec}: URLs are not supported. Download the file, and set its local path.")
    if path.is_file():
        paths = [path]
    elif path.is_dir():
        raise UserError(
            f"{setting}={spec} is a folder. Give its files, for instance {setting}='{spec.rstrip('/')}/*.parquet'."
        )
    elif any(c in spec for c in "*?["):
        paths = [Path(p) for p in sorted(glob.glob(str(path), recursive=True)) if Path(p).is_file()]  # noqa: PTH207
        if not paths:
            raise UserError(f"{setting}={spec} matches no file (relative to {Path.cwd()}). Correct the pattern.")
    elif HUB_NAME.fullmatch(spec) and path.suffix not in EXTENSIONS:
        return [Source(setting, spec, None, default_split)]
    else:
        siblings = [p.name for p in path.parent.iterdir() if p.is_file()] if path.parent.is_dir() else []
        near = suggestion(path.name, siblings)
        if not path.parent.is_dir():
            near = f" There is no folder {path.parent} either.{did_you_mean(nearest_path(path, Path.is_file))}"
        raise UserError(
            f"{setting}={spec}: no such file (relative to {Path.cwd()}).{near} "
            f"Correct the path; a Hub data set is written org/name, org/name:config or org/name@split."
        )
    return [Source(setting, spec, p, default_split) for p in paths]


def _check_extension(source: Source) -> None:
    if source.path is None or source.path.suffix in EXTENSIONS:
        return
    shown = f"{source.setting}={source.spec}: {source.path.name}"
    if source.path.suffix in COMPRESSED:
        raise UserError(f"{shown} is compressed. Unpack it.")
    raise UserError(f"{shown} is not one of {', '.join(EXTENSIONS)}. Convert it, or narrow the pattern.")


def _parquet_records(source: Source, wanted: Callable[[str], bool]) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    assert source.path is not None
    try:
        with pq.ParquetFile(source.path) as file:
            names = file.schema_arrow.names
            # If no column is wanted, read all columns, which the error message of parse_row lists.
            columns = [name for name in names if wanted(name)] or names
            for batch in file.iter_batches(batch_size=1000, columns=columns):
                for record in batch.to_pylist():
                    yield f"{source.setting}: {source.path} row {number}", {name: record.get(name) for name in names}
                    number += 1
    except (pa.ArrowException, OSError) as error:
        if (other := extension_by_content(source.path)) not in (None, ".parquet"):
            raise UserError(f"{source.setting}: {source.path} is not a parquet file. Rename it to {other}.") from error
        raise UserError(
            f"{source.setting}: {source.path} cannot be read as parquet: {str(error).rstrip('.')}. Restore or "
            "convert it. If it is a pointer of Git LFS (a few lines of text), run `git lfs pull`."
        ) from error


def _load_from_hub(source: Source, path: str, config: str | None) -> Any:
    """Return all splits of a Hub dataset, from the network or the local cache. Raise UserError if both lack it."""
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    unreachable: Exception | None = None
    try:
        HfApi().dataset_info(path, timeout=HUB_TIMEOUT_S)
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{source.setting}={source.spec}: there is no such local file, and no such data set on the Hub that you "
            f"can access. Correct the name, or log in with `hf auth login` if it is private or gated."
        ) from error
    # The class of network errors depends on the Hub library's version. The messages below include the error.
    except Exception as error:
        unreachable = error
    try:
        # Without the request above, load_dataset would retry for half a minute before it reads the cache.
        with nullcontext() if unreachable is None else _offline():
            return datasets.load_dataset(path, config)
    except (ValueError, FileNotFoundError, ConnectionError) as error:
        if unreachable is None:
            raise UserError(
                f"{source.setting}={source.spec}: the data set on the Hub cannot be loaded: {error}. Correct the name, "
                "or download the data set and set its local files."
            ) from error
        reason = " ".join(str(error).split())
        raise UserError(
            f"{source.setting}={source.spec}: there is no such local file, the Hub cannot be reached ({unreachable}), "
            f"and the local cache does not have it ({reason}). Correct the path, connect to the network, "
            f"or use local files."
        ) from error


@contextmanager
def _offline() -> Iterator[None]:
    """Set the Hub libraries' constants to offline, because they read the environment only at import."""
    import datasets.config
    import huggingface_hub.constants

    modules: tuple[Any, ...] = (datasets.config, huggingface_hub.constants)
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value
