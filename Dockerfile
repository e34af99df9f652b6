# One stage builds the virtual environment, the other only runs it. Calls python3 and nothing that the Python image has
# on top of Debian, so a plain Debian bookworm with python3-venv serves as the base just as well.
FROM docker.io/library/python:3.12-slim-bookworm AS build
WORKDIR /src
RUN python3 -m venv /opt/tierkv
COPY requirements/run.lock requirements/run.lock
RUN /opt/tierkv/bin/pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements/run.lock
COPY pyproject.toml README.md LICENSE ./
COPY tierkv tierkv
RUN /opt/tierkv/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --no-build-isolation .
# Extras of pyproject.toml, such as cuda12. They are not in run.lock, but may change nothing that is.
ARG EXTRAS=
# A further package index, such as that of torch for a processor.
ARG EXTRA_INDEX=
RUN if [ -n "$EXTRAS" ]; then \
      grep -oE '^[A-Za-z0-9._-]+==[^ ;]+' requirements/run.lock > /tmp/held && \
      /opt/tierkv/bin/pip install --no-cache-dir --disable-pip-version-check ${EXTRA_INDEX:+--extra-index-url "$EXTRA_INDEX"} -c /tmp/held ".[$EXTRAS]"; \
    fi

FROM docker.io/library/python:3.12-slim-bookworm
COPY --from=build /opt/tierkv /opt/tierkv
ENV PATH=/opt/tierkv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# A number, not a name: what runs the container can then see that it is not root.
USER 10001:10001
EXPOSE 8080
ENTRYPOINT ["tierkv"]
CMD ["serve"]
