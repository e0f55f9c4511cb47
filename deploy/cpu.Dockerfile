# DiffuPlug on CPUs, from the root of the repository:
#   docker build -f deploy/cpu.Dockerfile -t diffuplug:cpu .
FROM python:3.11-slim-bookworm

# A compiler for torch.compile, and libnuma for vLLM's kernels.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*

ARG CPU_WHEELS=https://download.pytorch.org/whl/cpu
ENV DIFFUPLUG_DEVICE=cpu PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1
WORKDIR /opt/diffuplug
COPY . .
RUN PIP_EXTRA_INDEX_URL=$CPU_WHEELS scripts/install.sh /opt/venv

RUN useradd --create-home --uid 1000 diffuplug \
    && install -d -o diffuplug /models
USER 1000
ENV PATH=/opt/venv/bin:$PATH HF_HOME=/models
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=30m --interval=10s --timeout=5s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["diffuplug", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD []
