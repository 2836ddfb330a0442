# docker build -f docker/rocm.Dockerfile -t realvr:rocm .
# docker run --rm --device /dev/kfd --device /dev/dri --group-add video --ipc=host -v $PWD:/work realvr:rocm realvr rl my_run.yaml
# vLLM's ROCm image (MI200: gfx90a, MI300: gfx942, MI350: gfx950). The host's amdgpu driver must support its ROCm: take
# an older image with BASE where it does not. On Slingshot the RCCL plug-in is the site's: aws-ofi-nccl for ROCm 7, aws-ofi-rccl
# for older ROCm.
ARG BASE=vllm/vllm-openai-rocm:v0.33.0
FROM ${BASE}
USER root
COPY . /opt/realvr
RUN PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1 bash /opt/realvr/docker/install.sh rocm
RUN id -u 1000 >/dev/null 2>&1 || useradd --create-home --uid 1000 realvr
RUN usermod -aG video "$(id -un 1000)" && mkdir -p /work && chown 1000 /work
USER 1000
WORKDIR /work
# MIOpen's cache must not lie on a shared file system
ENV HOME=/work PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false VLLM_NO_USAGE_STATS=1 RAY_USAGE_STATS_ENABLED=0 \
    MIOPEN_USER_DB_PATH=/tmp/miopen MIOPEN_CUSTOM_CACHE_DIR=/tmp/miopen
ENTRYPOINT []
CMD ["launch", "--help"]
