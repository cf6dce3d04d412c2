# Images that serve; they hold no PyTorch. Models come from the store, which is the volume /models. All packages are
# installed by hash from requirements/, which `make hashes` writes. /opt/ingot/sbom.cdx.json lists them (CycloneDX).
#
#   docker build --target cpu -t ingot:cpu .
#   docker run --rm --read-only --tmpfs /tmp -p 127.0.0.1:8000:8000 -p 127.0.0.1:8001:8001 -e INGOT_INSECURE=1 \
#     -v "$HOME/.ingot:/models:ro" ingot:cpu serve digits:1
#
# INGOT_INSECURE serves every client that reaches the ports; docs/guides/deploy/containers.md has the command with TLS and API keys.

# Any base with this Python will do; the packages' stage and the image must have the same.
ARG PYTHON=python:3.11-slim
ARG UBUNTU=ubuntu:24.04
ARG CUDA=nvidia/cuda:13.0.1-cudnn-runtime-ubuntu24.04

FROM ${PYTHON} AS wheel
WORKDIR /src
COPY requirements/build.txt requirements/
RUN python3 -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --require-hashes -r requirements/build.txt
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY ingot ingot
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .


FROM ${PYTHON} AS cpu-packages
COPY --from=wheel /wheels /wheels
COPY requirements/cpu.txt requirements/sbom.txt /wheels/
RUN python3 -m venv /opt/sbom \
    && /opt/sbom/bin/pip install --no-cache-dir --require-hashes -r /wheels/sbom.txt
RUN python3 -m venv /opt/ingot \
    && /opt/ingot/bin/pip install --no-cache-dir --require-hashes -r /wheels/cpu.txt \
    && /opt/ingot/bin/pip install --no-cache-dir --no-deps --no-index /wheels/ingot_serve-*.whl \
    && /opt/ingot/bin/pip check \
    && /opt/sbom/bin/pip --python /opt/ingot/bin/python3 uninstall --yes pip setuptools \
    && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --sv 1.6 --of JSON \
        -o /opt/ingot/sbom.cdx.json /opt/ingot/bin/python3


FROM ${PYTHON} AS cpu
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ingot" \
    org.opencontainers.image.description="Serves models over HTTP and gRPC, CPU" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.revision="$REVISION"
COPY --from=cpu-packages /opt/ingot /opt/ingot
# Group 0 may write to the store, for platforms that choose the user.
RUN useradd --uid 10001 --gid 0 --no-create-home --home-dir /tmp ingot \
    && install -d -o ingot -g 0 -m 775 /models
ENV PATH=/opt/ingot/bin:$PATH \
    HOME=/tmp \
    INGOT_HOST=0.0.0.0 \
    INGOT_HOME=/models
USER 10001
WORKDIR /tmp
VOLUME /models
EXPOSE 8000 8001
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s CMD ["python3", "-c", "import os, ssl, urllib.request as r; e = os.environ.get; r.build_opener(r.ProxyHandler({}), r.HTTPSHandler(context=ssl._create_unverified_context())).open(('https' if e('INGOT_TLS_CERT') else 'http') + '://127.0.0.1:' + e('INGOT_HTTP_PORT', '8000') + '/v2/health/ready', timeout=2)"]
ENTRYPOINT ["ingot"]
CMD ["--help"]


# The virtual environment must find the same Python in both GPU stages: the distribution's, 3.12.
FROM ${UBUNTU} AS gpu-packages
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /wheels /wheels
COPY requirements/gpu.txt requirements/sbom.txt /wheels/
RUN python3 -m venv /opt/sbom \
    && /opt/sbom/bin/pip install --no-cache-dir --require-hashes -r /wheels/sbom.txt
RUN python3 -m venv /opt/ingot \
    && /opt/ingot/bin/pip install --no-cache-dir --require-hashes -r /wheels/gpu.txt \
    && /opt/ingot/bin/pip install --no-cache-dir --no-deps --no-index /wheels/ingot_serve-*.whl \
    && /opt/ingot/bin/pip check \
    && /opt/sbom/bin/pip --python /opt/ingot/bin/python3 uninstall --yes pip setuptools \
    && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --sv 1.6 --of JSON \
        -o /opt/ingot/sbom.cdx.json /opt/ingot/bin/python3


FROM ${CUDA} AS gpu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/*
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ingot" \
    org.opencontainers.image.description="Serves models over HTTP and gRPC, GPU" \
    org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="0.1.0" \
    org.opencontainers.image.revision="$REVISION"
COPY --from=gpu-packages /opt/ingot /opt/ingot
# Group 0 may write to the store, for platforms that choose the user.
RUN useradd --uid 10001 --gid 0 --no-create-home --home-dir /tmp ingot \
    && install -d -o ingot -g 0 -m 775 /models
ENV PATH=/opt/ingot/bin:$PATH \
    HOME=/tmp \
    INGOT_HOST=0.0.0.0 \
    INGOT_HOME=/models
USER 10001
WORKDIR /tmp
VOLUME /models
EXPOSE 8000 8001
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s CMD ["python3", "-c", "import os, ssl, urllib.request as r; e = os.environ.get; r.build_opener(r.ProxyHandler({}), r.HTTPSHandler(context=ssl._create_unverified_context())).open(('https' if e('INGOT_TLS_CERT') else 'http') + '://127.0.0.1:' + e('INGOT_HTTP_PORT', '8000') + '/v2/health/ready', timeout=2)"]
ENTRYPOINT ["ingot"]
CMD ["--help"]
