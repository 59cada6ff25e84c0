# The filter in front of the Docker engine's socket, and nothing else. Context: the repository.
# Any Debian with Python 3.11, the Python of the locks.
ARG BASE=python:3.11.14-slim-bookworm

# Thrown away, and with it all that pip is told: an index, wheels, a certificate.
FROM ${BASE} AS packages
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# "no": /opt/venv/packages stays empty, for whoever mounts packages there.
ARG INSTALL_PACKAGES=yes
COPY docker/extra docker/install-packages /build/
RUN /build/install-packages h11==0.16.0

FROM ${BASE}
COPY docker/prepare /tmp/prepare
RUN /tmp/prepare && rm /tmp/prepare
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/home/app PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /home/app
COPY --from=packages /opt/venv/packages /opt/venv/packages
COPY sandboxes/socket_proxy /opt/harness-trainer/sandboxes/socket_proxy
# Root, whom compose.yaml leaves none of root's rights: the owner of the socket. The group is the trainer's.
USER 0:10001
ENTRYPOINT ["python", "-m", "sandboxes.socket_proxy"]
