# One image for every service: docker run IMAGE kvscout-gateway --help
#
#   docker build -t kvscout .                             compiles kvscout; needs PyPI, crates.io and Debian's packages
#   make image-wheels && docker build -t kvscout --build-arg WHEELS=given .        uses wheels built on this machine
#
# With BuildKit (DOCKER_BUILDKIT=1 before Docker 23), which builds only the stages that are used.

# Any Linux with glibc and python3 ≥ 3.11 that can make virtual environments.
# Both pinned by digest; `make image-digests` updates them.
ARG BASE_IMAGE=python:3.13-slim-bookworm@sha256:67a1e1f215ccda113cfc024e8639049257e88f273898f595b61476d128d387e8
ARG RUST_IMAGE=rust:1.95-slim-bookworm@sha256:d7482085ff5b415f84dba5647ae71606650bdef00db7aeb69f4b3d170c3e4082
# built = compile them in the image · given = use those in dist/image
ARG WHEELS=built

FROM ${RUST_IMAGE} AS rust

FROM ${BASE_IMAGE} AS wheels-built
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY --from=rust /usr/local/cargo /usr/local/cargo
COPY --from=rust /usr/local/rustup /usr/local/rustup
ENV CARGO_HOME=/usr/local/cargo RUSTUP_HOME=/usr/local/rustup PATH=/usr/local/cargo/bin:$PATH
WORKDIR /src
COPY . .
RUN python3 -m venv /build && sh deploy/make-wheels.sh /build/bin/python /wheels

FROM ${BASE_IMAGE} AS wheels-given
# LICENSE always exists: a pattern may match nothing, but a COPY needs at least one file.
COPY LICENSE dist/image/* /wheels/

FROM wheels-${WHEELS} AS installed
RUN python3 -m venv /opt/kvscout \
    && /opt/kvscout/bin/pip install --no-cache-dir --no-index --find-links /wheels 'kvscout[otel,picker,text]' \
    && KVSCOUT_REQUIRE_NATIVE=1 /opt/kvscout/bin/kvscout --version \
    && /opt/kvscout/bin/python -m pip uninstall --quiet --yes setuptools pip

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="kvscout" \
      org.opencontainers.image.description="KV-cache aware routing of LLM requests" \
      org.opencontainers.image.source="https://github.com/kvscout/kvscout" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=installed /opt/kvscout /opt/kvscout
ENV PATH=/opt/kvscout/bin:$PATH PYTHONDONTWRITEBYTECODE=1 KVSCOUT_REQUIRE_NATIVE=1
USER 65532:65532
WORKDIR /tmp
# Checks the service on its default port; for another port: --health-cmd 'kvscout health HOST:PORT'.
# Long timeout for busy machines: a hanging service keeps failing, a probe waiting for the CPU does not.
HEALTHCHECK --interval=30s --timeout=15s --start-period=60s CMD ["kvscout", "health"]
# Services bind only the container's loopback by default: give --host 0.0.0.0, and --auth-tokens or --allow-anonymous.
CMD ["kvscout", "--help"]
