# DiffuPlug on NVIDIA GPUs, from the root of the repository:
#   docker build -f deploy/cuda.Dockerfile -t diffuplug:cuda .
# The CUDA libraries come with vLLM's wheels, the driver from NVIDIA's container toolkit.
FROM python:3.12-slim-bookworm

# A compiler for Triton's launchers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# There is no nvcc in the image, with which FlashInfer would compile a sampler that is not used.
ENV DIFFUPLUG_DEVICE=cuda PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1 VLLM_USE_FLASHINFER_SAMPLER=0
WORKDIR /opt/diffuplug
COPY . .
RUN scripts/install.sh /opt/venv

RUN useradd --create-home --uid 1000 diffuplug \
    && install -d -o diffuplug /models
USER 1000
ENV PATH=/opt/venv/bin:$PATH HF_HOME=/models
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=30m --interval=10s --timeout=5s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["diffuplug", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD []
