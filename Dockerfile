# The gateway with the embedded llama.cpp engine and the clients of PostgreSQL and Redis. docs/deployment.md says how to use it.
#
# Both bases need nothing but apt and a Python from 3.11 on, so other Debian or Ubuntu images fit, such as those for CUDA.
# A digest beside the tag makes a build repeatable to the byte of its base: --build-arg BASE_DIGEST=sha256:...
ARG BUILD_BASE=debian:13.1-slim
ARG BUILD_BASE_DIGEST=""
ARG BASE=debian:13.1-slim
ARG BASE_DIGEST=""

FROM ${BUILD_BASE}${BUILD_BASE_DIGEST:+@${BUILD_BASE_DIGEST}} AS builder

# cmake and ninja from here: llama.cpp's build would fetch its own otherwise.
# hadolint ignore=DL3008
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      ca-certificates cmake g++ ninja-build python3 python3-pip python3-venv \
 && rm -rf /var/lib/apt/lists/*

# The processor that the embedded engine is built for. GGML_NATIVE would take the build machine's, and the image would die of an
# illegal instruction on an older one. What is listed is x86-64-v3: Intel since Haswell (2013), AMD since Excavator (2015), and what
# clouds rent. Older machines: set AVX2, FMA, BMI2 and F16C to OFF. On arm64 these five are without effect and ARMv8.0 is the baseline.
ARG CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_BMI2=ON -DGGML_F16C=ON"
ENV CMAKE_ARGS=${CMAKE_ARGS} PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_INPUT=1

WORKDIR /src
COPY requirements.lock ./
RUN python3 -m venv --without-pip /opt/sekisho \
 && python3 -m pip --python /opt/sekisho/bin/python install --require-hashes -r requirements.lock

COPY pyproject.toml LICENSE ./
COPY gateway gateway
COPY backends backends
# What built the package is not needed to run it.
RUN python3 -m pip --python /opt/sekisho/bin/python install --no-deps --no-build-isolation --no-index . \
 && python3 -m pip --python /opt/sekisho/bin/python uninstall -y setuptools \
 && /opt/sekisho/bin/sekisho version

FROM ${BASE}${BASE_DIGEST:+@${BASE_DIGEST}}

ARG VERSION=0.1.0
ARG REVISION=""
ARG CREATED=""
LABEL org.opencontainers.image.title="Sekisho" \
      org.opencontainers.image.description="One OpenAI-compatible front door for self-hosted models" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}"

# libgomp1: llama.cpp's threads.
# hadolint ignore=DL3008
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends ca-certificates libgomp1 python3 \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 sekisho \
 && useradd --uid 10001 --gid 10001 --home-dir /data --no-create-home --shell /usr/sbin/nologin sekisho \
 && install -d -o 10001 -g 10001 -m 0700 /data \
 && install -d -m 0755 /models /etc/sekisho

COPY --from=builder /opt/sekisho /opt/sekisho
COPY deploy/docker/health.py /opt/sekisho/health.py
COPY deploy/docker/gateway.yaml /etc/sekisho/gateway.yaml

# Sockets of embedded engines are made in TMPDIR. /dev/shm is in memory and writable in every container, also where the root is
# read-only; SQLite sorts large reports beside its database, since /dev/shm is small.
ENV PATH=/opt/sekisho/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    SEKISHO_CONFIG=/etc/sekisho/gateway.yaml \
    TMPDIR=/dev/shm \
    SQLITE_TMPDIR=/data

USER 10001:10001
WORKDIR /data
VOLUME ["/data"]
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
  CMD ["/opt/sekisho/bin/python", "-I", "/opt/sekisho/health.py"]

ENTRYPOINT ["sekisho"]
CMD ["serve", "--config", "/etc/sekisho/gateway.yaml"]
