# docker build -f docker/cuda.Dockerfile -t realvr:cuda .
# docker run --rm --gpus all --ipc=host -v $PWD:/work realvr:cuda realvr rl my_run.yaml
# vLLM's own image of the pinned version: its torch, CUDA and NCCL fit together. On Slingshot bind the site's
# aws-ofi-nccl plug-in and libfabric; on InfiniBand nothing more is needed.
ARG BASE=vllm/vllm-openai:v0.33.0
FROM ${BASE}
USER root
COPY . /opt/realvr
RUN PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1 bash /opt/realvr/docker/install.sh cuda
RUN id -u 1000 >/dev/null 2>&1 || useradd --create-home --uid 1000 realvr
RUN mkdir -p /work && chown 1000 /work
USER 1000
WORKDIR /work
ENV HOME=/work PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0
ENTRYPOINT []
CMD ["launch", "--help"]
