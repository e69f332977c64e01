#!/usr/bin/env bash
# Makes ready what tests/compose needs: a container engine, a base image, and the wheels of the images.
#
# For Debian and Ubuntu, as root, with a package index and a package mirror; no image registry is asked. Prints the
# environment that `docker-compose build` and the tests then want, as NAME=value lines, on standard output.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '%s\n' "$*" >&2; }

SUITE=$(. /etc/os-release && echo "$VERSION_CODENAME")
IMAGE=octavo-base:$SUITE
TORCH=$(sed -n 's/^TORCH ?= //p' Makefile)

missing=()
command -v dockerd >/dev/null || missing+=(docker.io)
command -v docker-compose >/dev/null || missing+=(docker-compose)
command -v debootstrap >/dev/null || missing+=(debootstrap)
if ((${#missing[@]})); then
  say "installing ${missing[*]}"
  apt-get update -qq >&2
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
fi

if ! docker info >/dev/null 2>&1; then
  say "starting dockerd"
  nohup dockerd >/var/log/octavo-dockerd.log 2>&1 &
  for _ in $(seq 60); do docker info >/dev/null 2>&1 && break || sleep 1; done
  docker info >/dev/null || { say "dockerd does not answer; see /var/log/octavo-dockerd.log"; exit 1; }
fi

if ! docker image inspect "$IMAGE" >/dev/null 2>&1; then
  say "making $IMAGE with debootstrap"
  root=$(mktemp -d)
  trap 'rm -rf "$root"' EXIT
  debootstrap --variant=minbase --include=ca-certificates,g++,python3,python3-dev,python3-venv "$SUITE" "$root" >&2
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
  tar --create --one-file-system --directory "$root" . | docker import - "$IMAGE" >&2
fi

# The interpreter of the base image is this system's own python3, so its wheels fit.
say "collecting wheels into deploy/wheelhouse"
scratch=$(mktemp -d)
/usr/bin/python3 -m venv "$scratch"
"$scratch/bin/pip" download --quiet --only-binary=:all: --dest deploy/wheelhouse "$TORCH" 'setuptools>=77' >&2
"$scratch/bin/pip" wheel --quiet --wheel-dir deploy/wheelhouse --find-links deploy/wheelhouse ".[all]" "$TORCH" >&2
rm -rf "$scratch" deploy/wheelhouse/octavo-*.whl

cat <<ENV
OCTAVO_BASE_IMAGE=$IMAGE
OCTAVO_PIP_NO_INDEX=1
OCTAVO_TORCH_INDEX_URL=
ENV
