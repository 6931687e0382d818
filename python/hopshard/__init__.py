"""hopshard: sharded data parallelism that keeps traffic off the slow links.

    import hopshard as hs

    hs.init(sharded_data_parallel_degree=2)
    model = hs.DistributedModel(module)
    optimizer = hs.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

Next: config.py, world.py, model.py.
"""

import os as _os

# Debian's libfabric brings PSM libraries that take over SIGTERM, SIGSEGV and others when they are
# loaded, unless told not to.
_os.environ.setdefault("HFI_NO_BACKTRACE", "1")
_os.environ.setdefault("IPATH_NO_BACKTRACE", "1")

import torch as _torch  # Loads the libraries that the native part needs.  # noqa: F401

from hopshard._C import __version__
from hopshard.config import Config
from hopshard.ema import ema
from hopshard.errors import (
    CommError,
    ConfigError,
    Error,
    InvalidArgument,
    ScheduleError,
    ShardedError,
    TimeoutError,
)
from hopshard.model import DistributedModel, accumulate, full_grad, join, unshard
from hopshard.optimizer import DistributedOptimizer
from hopshard.precision import Precision
from hopshard.step import StepOutput, step
from hopshard.world import (
    World,
    barrier,
    current,
    dp_rank,
    dp_size,
    init,
    is_initialized,
    local_rank,
    local_size,
    node,
    num_nodes,
    pp_rank,
    pp_size,
    rank,
    replication_rank,
    replication_size,
    sharding_rank,
    sharding_size,
    shutdown,
    size,
    tp_rank,
    tp_size,
)

__all__ = [
    "CommError",
    "Config",
    "ConfigError",
    "DistributedModel",
    "DistributedOptimizer",
    "Error",
    "InvalidArgument",
    "Precision",
    "ScheduleError",
    "ShardedError",
    "StepOutput",
    "TimeoutError",
    "World",
    "__version__",
    "accumulate",
    "barrier",
    "current",
    "dp_rank",
    "dp_size",
    "ema",
    "full_grad",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "node",
    "num_nodes",
    "pp_rank",
    "pp_size",
    "rank",
    "replication_rank",
    "replication_size",
    "sharding_rank",
    "sharding_size",
    "shutdown",
    "size",
    "step",
    "tp_rank",
    "tp_size",
    "unshard",
]
