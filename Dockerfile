# lptune on a machine with NVIDIA GPUs. Not built yet where it was written: no container engine was there.
#
#   docker build -t lptune .
#   docker run --rm --gpus all --ipc=host --user "$(id -u):$(id -g)" -e HOME=/work -v "$PWD:/work" lptune \
#     lptune run full_finetune --config qwen2_5/0.5b data.source=rows.jsonl
#
# --ipc=host: NCCL and torch exchange through shared memory, of which a container has 64 MB otherwise. HOME: caches of
# compiled kernels and of the hub go to the mounted folder, so that they outlive the container. `lptune doctor`, as the
# first command, says what the container sees of the GPUs.

# torch's wheel brings CUDA's libraries and Triton its own assembler. So the base is CUDA's smallest image: it has the
# variables by which the container runtime lends the driver. Ubuntu 24.04 has Python 3.12.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# g++ and Python.h: torch.compile, Triton's launchers and lptune's C++ are compiled at run time. Without versions: Ubuntu's
# mirrors keep only the newest of a release.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
       ca-certificates g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

# Exact versions, compared with the digests in requirements/: those that the tests run with. The source comes last, so that a
# change of it does not install torch anew. torch's own libraries have the versions that its wheel pins.
COPY requirements/torch.txt requirements/ci.txt /tmp/requirements/
RUN python3 -m venv /opt/venv \
    && pip install --require-hashes --no-deps -r /tmp/requirements/torch.txt \
    && pip install --require-hashes --no-deps -r /tmp/requirements/ci.txt \
    && pip install "$(grep -o '^torch==[^ ]*' /tmp/requirements/torch.txt)"

COPY pyproject.toml hatch_build.py README.md LICENSE /opt/lptune/
COPY lptune /opt/lptune/lptune
COPY recipes /opt/lptune/recipes
COPY configs /opt/lptune/configs
RUN pip install --no-deps --no-build-isolation /opt/lptune && pip check && lptune --version

RUN useradd --create-home --uid 10001 lptune
USER 10001
WORKDIR /work
CMD ["lptune", "--help"]
