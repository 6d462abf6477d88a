"""Selects mean@k, pass@k and maj@k of each data source from the metrics of evaluations."""

import re
from collections.abc import Mapping, Sequence

_SHOWN = re.compile(r"val-(?:core|aux)/(.+)/(acc|reward)/((mean|pass|maj)@(\d+))(?:/mean)?")
_SOURCE = re.compile(r"val-core/(.+)/(?:acc|reward)/mean@\d+")
_KINDS = ("mean", "pass", "maj")

SourceMetric = tuple[str, str]
"""A data source and a metric's short name, such as `pass@4`."""


def source_results(evaluations: Sequence[Mapping[str, float]]) -> list[dict[SourceMetric, float]]:
    """Return the metrics to show of each evaluation, in the same order for all evaluations.

    The metrics of a source measure `acc` if all evaluations of the source have `acc`, otherwise `reward`.
    """
    # A reward function called `reward` has metrics SOURCE/reward/reward/..., which look like another source's metrics.
    sources = {match[1] for metrics in evaluations for name in metrics if (match := _SOURCE.fullmatch(name))}
    found = [
        {
            match.groups(): value
            for name, value in metrics.items()
            if (match := _SHOWN.fullmatch(name)) and match[1] in sources
        }
        for metrics in evaluations
    ]
    without_accuracy = {
        source
        for of_one in found
        for source in {source for source, *_ in of_one}
        if not any(key[:2] == (source, "acc") for key in of_one)
    }
    return [
        {
            (source, metric): value
            for (source, variable, metric, kind, k), value in sorted(of_one.items(), key=lambda item: _order(item[0]))
            if variable == ("reward" if source in without_accuracy else "acc")
        }
        for of_one in found
    ]


def _order(key: tuple[str | None, ...]) -> tuple[str, int, int]:
    source, _, _, kind, k = key
    assert source is not None
    assert kind is not None
    assert k is not None
    return source, _KINDS.index(kind), int(k)
