# syntax=docker/dockerfile:1
# An environment worker. Keeps nothing. Environments and agents of your own come with the run, or are read from /work.
#
#   docker build -f deploy/environment.Dockerfile -t paceline-environment .
#
# BASE is any image with Python 3.11 or newer and its venv. pip asks the index that its own settings name; --build-arg
# PIP_INDEX_URL=… or PIP_EXTRA_INDEX_URL=… chooses another, for example one with a CPU build of torch.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
RUN python3 -m venv /opt/paceline
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY protos protos
COPY paceline paceline
COPY services services
COPY rollout rollout
COPY reward reward
COPY learner learner
COPY environment environment
RUN --mount=type=cache,target=/root/.cache/pip \
    /opt/paceline/bin/python -m pip install -c constraints.txt .

FROM ${BASE}
RUN useradd --uid 10001 --create-home paceline \
    && mkdir /runs /work /cache \
    && chown paceline:paceline /runs /work /cache
COPY --from=build /opt/paceline /opt/paceline
ENV PATH=/opt/paceline/bin:$PATH PYTHONUNBUFFERED=1 PYTHONSAFEPATH=1 HF_HOME=/cache
USER 10001
WORKDIR /work
EXPOSE 7080
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s --retries=3 \
    CMD ["python", "-m", "services.common.healthcheck", "127.0.0.1:7080"]
ENTRYPOINT ["paceline-environment", "--insecure", "--host", "0.0.0.0", "--port", "7080"]
CMD ["--coordinator", "coordinator:7070"]
