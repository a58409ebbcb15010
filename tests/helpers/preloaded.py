"""What the fork server (tests/helpers/fork_server.py) has done before a process is forked off it.

Importing this module imports torch, lptune and torch's compiler, and compiles a function of three operations:
that finds the C++ compiler, asks what this CPU can do, and imports what is imported at first use. So does a
step under FSDP2. A process that starts by itself pays 4 s of CPU time for the imports and 6 s for its first
compilation. A fork pays neither.
"""

import gc
import os
import shutil
from pathlib import Path

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of processes that each import torch
# As the launcher does before it imports torch (lptune/launch/flags.py), which a fork has done already: else a
# store that ends while another process writes to it prints a stack.
os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"

# ruff: noqa: F401
import numpy.ctypeslib
import numpy.ma
import safetensors.torch
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor.debug
import torch.distributed.tensor.parallel
import transformers.models.auto.modeling_auto
from torch.testing._internal.distributed.fake_pg import FakeStore

import lptune.checkpoint
import lptune.cli.main
import lptune.cli.plan
import lptune.data
import lptune.distributed
import lptune.linear
import lptune.models.decoder
import lptune.training

torch.set_num_threads(1)
# In a build for GPUs autograd starts threads, with or without a GPU, which no fork keeps.
if shutil.which(os.environ.get("CXX", "g++")) and torch.version.cuda is None and torch.version.hip is None:
    torch.hub.tqdm.monitor_interval = 0  # its progress bars are watched by a thread
    torch.compile(lambda x, y: (x * y).relu() + x)(torch.ones(8), torch.ones(8, requires_grad=True))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # And a step under FSDP2 on two ranks that are not there: the first one takes 0.2 s of CPU time more. The
    # mesh has a name that no run's has: what DTensor keeps of a mesh goes with the mesh's group.
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)  # type: ignore[no-untyped-call]
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("preloaded",))
    model = torch.distributed.fsdp.fully_shard(torch.nn.Linear(8, 8), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    torch.distributed.destroy_process_group()
    del mesh, model, optimizer

# What is here stays: a fork's collector need not visit it, which would copy every page that it touches. A
# full collection in a fork costs 0.02 s instead of 0.36.
gc.collect()
gc.freeze()

# A fork has one thread, and locks that another one held stay locked in it.
assert not Path("/proc/self/task").exists() or len(os.listdir("/proc/self/task")) == 1
