# ik on the CPU: docker build -t ik . && docker run -p 8080:8080 -v models:/models ik serve -hf USER/REPO:QUANT
# For x86-64 and ARM64: docker buildx build --platform linux/amd64,linux/arm64 -t ik .
FROM python:3.12-slim AS build
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM python:3.12-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir /wheels/*.whl && rm -r /wheels
# Models and compiled kernels outlive the container in this volume.
ENV HF_HOME=/models/hub LLAMA_CACHE=/models/urls IK_CACHE_DIR=/models/cache LLAMA_ARG_HOST=0.0.0.0
VOLUME /models
EXPOSE 8080
ENTRYPOINT ["ik"]
CMD ["serve"]
