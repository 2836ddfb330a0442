# docker build -f docker/cpu.Dockerfile --build-arg PIP_EXTRA_INDEX_URL=<PyTorch's CPU wheel index> -t realvr:cpu .
# docker run --rm --shm-size=4g realvr:cpu realvr demo --smoke
FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git libnuma1 libgl1 libglib2.0-0 procps \
    && rm -rf /var/lib/apt/lists/*
ARG PIP_EXTRA_INDEX_URL=""
COPY . /opt/realvr
RUN PIP_NO_CACHE_DIR=1 bash /opt/realvr/docker/install.sh cpu
RUN useradd --create-home --uid 1000 realvr && mkdir /work && chown realvr /work
USER realvr
WORKDIR /work
ENV PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0
CMD ["launch", "--help"]
