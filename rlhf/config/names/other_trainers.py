"""Reads `other_trainers.toml`: names and values of verl, TRL, OpenRLHF and Hydra for our settings."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class OtherTrainers:
    """Tables of names and values from other trainers.

    `names` has a table for each trainer, from its names to our settings or groups; `settings` joins these tables.
    `values` maps other trainers' values to ours. In some settings, verl's -1 means none or all; `minus_one` maps each
    such setting to our value.
    `remarks` has a sentence for each name without a single equivalent; `value_remarks` has a sentence for each pair of
    setting (or group) and value. `prefixes` are outer sections of the other trainers' files, to remove before a lookup.
    """

    prefixes: tuple[str, ...]
    names: Mapping[str, Mapping[str, str]]
    settings: Mapping[str, str]
    values: Mapping[str, str]
    minus_one: Mapping[str, str]
    remarks: Mapping[str, str]
    value_remarks: Mapping[tuple[str, str], str]


@cache
def other_trainers() -> OtherTrainers:
    """Read the tables, once per process, when the first message needs them."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    in_samples = "That setting counts samples; here, a token budget limits each pass. Set {}."
    return OtherTrainers(
        prefixes=tuple(table["prefixes"]),
        names=table["settings"],
        settings={name: ours for names in table["settings"].values() for name, ours in names.items()},
        values=table["values"],
        minus_one=table["minus_one"],
        remarks={name: remark["text"] for remark in table["remarks"] for name in remark["names"]}
        | {name: in_samples.format(budget) for name, budget in table["micro_batches"].items()},
        value_remarks={(entry["setting"], entry["value"]): entry["text"] for entry in table["values_with_remarks"]},
    )
