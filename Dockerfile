# The image of one region. Built by `docker compose build`; needs neither BuildKit nor a compiler.
#
# PYTHON_IMAGE: any Debian with Python 3.11, venv and pip.
# PIP_ARGS: where packages come from. torch's own index has builds without CUDA, which is gigabytes smaller; for GPUs
#   build with --build-arg PIP_ARGS="". Where no index can be reached put wheels into wheels/ (by `pip download`) and
#   build with --build-arg PIP_ARGS="--no-index --find-links /src".
ARG PYTHON_IMAGE=python:3.11-slim-bookworm
FROM ${PYTHON_IMAGE}

# tc and ip, for the links of docker-compose.yml.
RUN command -v tc > /dev/null \
 || (apt-get update && apt-get install --yes --no-install-recommends iproute2 && rm -rf /var/lib/apt/lists/*)
# /certs is root's: there the one-shot service of docker-compose.yml, without capabilities, makes certificates.
RUN useradd --uid 10001 --create-home diloco \
 && install --directory /src /certs /config \
 && install --directory --owner diloco --group diloco /state /var/cache/diloco-node

# Dependencies in a layer of their own: a change of the sources does not fetch torch again.
ARG PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
WORKDIR /src
# The pattern lets the folder be missing; its files land beside the others.
COPY pyproject.toml constraints.txt README.md LICENSE wheel[s] ./
RUN python3 -m venv /opt/diloco \
 && /opt/diloco/bin/python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > requirements.txt \
 && /opt/diloco/bin/pip install --no-cache-dir --disable-pip-version-check --constraint constraints.txt ${PIP_ARGS} \
      torch==2.13.0 --requirement requirements.txt \
 && cd /opt/diloco/lib/python3*/site-packages/torch && rm -rf include test bin/protoc*

COPY diloco_node ./diloco_node
RUN /opt/diloco/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps ${PIP_ARGS} . \
 && /opt/diloco/bin/python -m compileall -q -f /opt/diloco/lib/python3*/site-packages/diloco_node \
 && rm -rf build *.egg-info
ENV PATH=/opt/diloco/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    NUMBA_CACHE_DIR=/var/cache/diloco-node \
    PYTHONUNBUFFERED=1
USER diloco
WORKDIR /config
# The kernels are compiled here, so that a container starts in a second. On another kind of CPU they are compiled again.
RUN python -c "from diloco_node.codec.kernels import warm_up; warm_up()"

VOLUME ["/state"]
# Between regions; status and metrics (loopback, and regions.NAME.admin_host).
EXPOSE 7400 7401
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import http.client as h; c = h.HTTPConnection('127.0.0.1', 7401, timeout=3); c.request('GET', '/livez'); exit(c.getresponse().status != 200)"]
ENTRYPOINT ["diloco-node"]
CMD ["--help"]
