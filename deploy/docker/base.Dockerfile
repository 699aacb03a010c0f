# Images of all roles. The role stages at the end are made from deploy/helm/paceline/files/roles.yaml by deploy/render.py; edit
# deploy/docker/base.Dockerfile above them.
#
#   docker build -f deploy/docker/Dockerfile --target coordinator -t paceline-coordinator .
#   docker build -f deploy/docker/Dockerfile --target rollout-gpu -t paceline-rollout-gpu .
#
# BASE is an image with Python 3.11 and its venv; GPU_BASE the same with CUDA's libraries for torch. Every package is pinned with
# its hash in deploy/docker/locks/ (`make locks`). pip asks the index that its own settings name; --build-arg PIP_INDEX_URL=… or
# PIP_EXTRA_INDEX_URL=… chooses another. Add a line `# syntax=` only where a registry is reachable.
ARG BASE=python:3.11-slim-bookworm
ARG GPU_BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04

# What is installed without its dependencies: the packages of this repository.
FROM ${BASE} AS source
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY paceline paceline
COPY services services
COPY apps apps
COPY weights weights
COPY rollout rollout
COPY reward reward
COPY learner learner
COPY environment environment

# Coordinator and command line: no torch, no compiler. Packages come first, because the source changes more often.
FROM ${BASE} AS control-packages
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends binutils \
    && rm -rf /var/lib/apt/lists/*
COPY deploy/docker/locks/build.txt deploy/docker/locks/control.txt /locks/
RUN python3 -m venv /opt/paceline \
    && /opt/paceline/bin/python -m pip install --no-cache-dir --require-hashes -r /locks/build.txt \
    && /opt/paceline/bin/python -m pip install --no-cache-dir --require-hashes --no-deps -r /locks/control.txt
COPY deploy/docker/trim.py deploy/docker/compile.py deploy/docker/collect.py /locks/
WORKDIR /src

FROM control-packages AS control-build
COPY --from=source /src /src
RUN /opt/paceline/bin/python -m pip install --no-cache-dir --no-deps --no-build-isolation . \
    && /opt/paceline/bin/python /locks/trim.py control \
    && /opt/paceline/bin/python /locks/compile.py hf_xet s3fs tokenizers transformers zstandard \
        paceline.services.cli.main paceline.services.coordinator.main paceline.apps.dashboard.links paceline.apps.dashboard.main paceline.services.common.serving.healthcheck \
    && /opt/paceline/bin/python /locks/collect.py /root-of-image

# The same with what reads Parquet and the hub's data sets.
FROM control-packages AS tables-build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY deploy/docker/locks/tables.txt /locks/
RUN /opt/paceline/bin/python -m pip install --no-cache-dir --require-hashes --no-deps -r /locks/tables.txt
COPY --from=source /src /src
RUN /opt/paceline/bin/python -m pip install --no-cache-dir --no-deps --no-build-isolation . \
    && /opt/paceline/bin/python /locks/trim.py control \
    && /opt/paceline/bin/python /locks/compile.py datasets pyarrow.parquet s3fs tokenizers transformers \
        paceline.services.cli.main paceline.services.coordinator.main paceline.services.common.serving.healthcheck \
    && /opt/paceline/bin/python /locks/collect.py /root-of-image

FROM ${BASE} AS worker-build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY deploy/docker/locks/build.txt deploy/docker/locks/worker.txt deploy/docker/locks/torch-cpu.txt /locks/
RUN python3 -m venv /opt/paceline \
    && /opt/paceline/bin/python -m pip install --no-cache-dir --require-hashes -r /locks/build.txt \
    && /opt/paceline/bin/python -m pip install --no-cache-dir --require-hashes --no-deps -r /locks/torch-cpu.txt \
    && /opt/paceline/bin/python -m pip install --no-cache-dir --require-hashes --no-deps -r /locks/worker.txt
WORKDIR /src
COPY --from=source /src /src
COPY deploy/docker/trim.py deploy/docker/compile.py /locks/
RUN /opt/paceline/bin/python -m pip install --no-cache-dir --no-deps --no-build-isolation . \
    && /opt/paceline/bin/python /locks/trim.py \
    && /opt/paceline/bin/python /locks/compile.py datasets peft pyarrow.parquet s3fs torch transformers \
        paceline.services.environment.main paceline.services.learner.main paceline.services.learner.rank paceline.services.reward.main paceline.services.rollout.main \
        paceline.services.common.serving.healthcheck

FROM ${GPU_BASE} AS gpu-build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY deploy/docker/locks/build.txt deploy/docker/locks/vllm.txt /locks/
RUN python3 -m venv /opt/paceline \
    && /opt/paceline/bin/python -m pip install --no-cache-dir --require-hashes -r /locks/build.txt \
    && /opt/paceline/bin/python -m pip install --no-cache-dir --require-hashes --no-deps -r /locks/vllm.txt
WORKDIR /src
COPY --from=source /src /src
RUN /opt/paceline/bin/python -m pip install --no-cache-dir --no-deps --no-build-isolation .

FROM scratch AS control
COPY --from=control-build /root-of-image /
ENV PATH=/opt/paceline/bin:/usr/local/bin:/usr/bin LANG=C.UTF-8 PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 \
    XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
USER 10001
WORKDIR /tmp
ARG VERSION=0.2.0.dev0
ARG REVISION=unknown
LABEL org.opencontainers.image.version=${VERSION} \
      org.opencontainers.image.revision=${REVISION} \
      org.opencontainers.image.licenses=Apache-2.0

FROM scratch AS tables
COPY --from=tables-build /root-of-image /
ENV PATH=/opt/paceline/bin:/usr/local/bin:/usr/bin LANG=C.UTF-8 PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 \
    XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
USER 10001
WORKDIR /tmp
ARG VERSION=0.2.0.dev0
ARG REVISION=unknown
LABEL org.opencontainers.image.version=${VERSION} \
      org.opencontainers.image.revision=${REVISION} \
      org.opencontainers.image.licenses=Apache-2.0

# Some images of Python have its library uncompiled.
FROM ${BASE} AS worker
RUN useradd --uid 10001 --create-home paceline \
    && mkdir /runs /store /token /cache /bundles \
    && chown paceline:paceline /runs /store /token /cache /bundles \
    && python3 -m compileall -q -x '/(tests?|lib2to3|site-packages|dist-packages)/' \
        "$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
COPY --from=worker-build /opt/paceline /opt/paceline
ENV PATH=/opt/paceline/bin:$PATH PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 \
    XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface
USER 10001
WORKDIR /tmp
ARG VERSION=0.2.0.dev0
ARG REVISION=unknown
LABEL org.opencontainers.image.version=${VERSION} \
      org.opencontainers.image.revision=${REVISION} \
      org.opencontainers.image.licenses=Apache-2.0

# The one compiler that Triton and inductor call at run time, and Python's headers, which its input includes.
FROM ${GPU_BASE} AS gpu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev python3 python3-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home paceline \
    && mkdir /runs /store /token /cache /bundles \
    && chown paceline:paceline /runs /store /token /cache /bundles
COPY --from=gpu-build /opt/paceline /opt/paceline
ENV PATH=/opt/paceline/bin:$PATH PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 CC=gcc \
    XDG_CACHE_HOME=/cache HF_HOME=/cache/huggingface TORCHINDUCTOR_CACHE_DIR=/cache/inductor TRITON_CACHE_DIR=/cache/triton
USER 10001
WORKDIR /tmp
ARG VERSION=0.2.0.dev0
ARG REVISION=unknown
LABEL org.opencontainers.image.version=${VERSION} \
      org.opencontainers.image.revision=${REVISION} \
      org.opencontainers.image.licenses=Apache-2.0
