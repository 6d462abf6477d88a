"""Reads Adam's state from a `torch_dist` folder, if the state has the names and shapes of the weights.

This is the case for an optimizer that is not distributed, and for a distributed optimizer in megatron-core's formats
`fully_reshardable` and (up to release 0.15) `fully_sharded_model_space`. The optimizer's other values are in common.pt.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from rlhf.convert.dcp.dcp_files import DcpFolder
from rlhf.convert.megatron.megatron_optimizer import BUCKETS, OptimizerParts, updates_in
from rlhf.convert.megatron.megatron_pickles import ALLOWED
from rlhf.convert.megatron.torch_dist_tensors import by_layer, unflattened
from rlhf.convert.moments import MOMENTS, Unmapped
from rlhf.convert.stored_tensor import open_torch_file
from rlhf.errors import UserError
from rlhf.models.hf.source import ReadableTensor
from rlhf.storage.disk_errors import DamagedCheckpoint

COMMON = "common.pt"
STATE = re.compile(r"optimizer\.state\.(\w+)\.(.+)")
MASTERS = ("fp32_param", "param")
"""Names of the float32 weights: the second in the format fully_reshardable, the first in all others."""
IN_BUCKETS = "optimizer.distributed.dp_group_idx_"
FORMATS = {
    ".gbuf_idx_": "dp_reshardable (once fully_sharded_bucket_space)",
    ".param_state": "dp_zero_gather_scatter",
}
"""Formats without parameter names, by a part of their keys."""


def read_optimizer(folder: DcpFolder, weights: Mapping[str, ReadableTensor]) -> OptimizerParts:
    """Return Adam's state. `weights` are the folder's weights by the names of their tensors.

    Raises Unmapped for a format without parameter names, an optimizer other than Adam, a wrong shape, or a folder
    without step count.
    """
    found: defaultdict[str, dict[str, ReadableTensor]] = defaultdict(dict)
    for name in folder.tensors:
        if (match := STATE.fullmatch(name)) is not None and match[1] in (*MOMENTS, *MASTERS):
            found[match[1]][match[2]] = _in_shape(folder, name, match[1], weights.get(match[2]))
    if any(moment not in found for moment in MOMENTS):
        raise Unmapped(_reason([*folder.tensors, *folder.objects]))
    if all(kind in found for kind in MASTERS):
        raise Unmapped(f"the optimizer's float32 weights have two names, {' and '.join(MASTERS)}")
    masters = found[MASTERS[0]] or found[MASTERS[1]]
    moments = {moment: by_layer(found[moment]) for moment in MOMENTS}
    return OptimizerParts(moments, updates_in(_common(folder), folder.path / COMMON), by_layer(masters))


def _in_shape(folder: DcpFolder, name: str, kind: str, weight: ReadableTensor | None) -> ReadableTensor:
    if weight is None:
        raise Unmapped(f"the optimizer has {name}, which the model lacks")
    tensor = unflattened(folder, name, weight.info)
    if tensor.info.shape != weight.info.shape:
        raise Unmapped(f"{name} has the shape {list(tensor.info.shape)}, the weight has {list(weight.info.shape)}")
    return tensor


def _reason(names: list[str]) -> str:
    stored = [name for name in names if IN_BUCKETS in name]
    for part, format_name in FORMATS.items():
        if any(part in name for name in stored):
            return BUCKETS.format(format_name)
    if chained := next((name for name in names if name.startswith("chained_")), None):
        return f"of several optimizers ({chained}), which are not supported"
    states = sorted({match[1] for name in names if (match := STATE.fullmatch(name))})
    return f"the optimizer has {', '.join(states)} and is not Adam" if states else "the folder has none"


def _common(folder: DcpFolder) -> Any:
    try:
        common = open_torch_file(folder.path / COMMON, ALLOWED)
    except (UserError, DamagedCheckpoint) as error:
        raise Unmapped(f"without step count, because {error}") from None
    return common.get("optimizer") if isinstance(common, dict) else None
