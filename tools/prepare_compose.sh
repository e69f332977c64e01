#!/usr/bin/env bash
# Makes ready what tests/compose needs: a container engine, a base image, and the wheels of the images.
#
# For Debian and Ubuntu, as root, with a package index and a package mirror; no image registry is asked. What is there
# and still fits is kept. Prints the environment that `docker-compose build` then wants, as NAME=value lines, on standard
# output. PIP_TORCH is pip's options for torch alone, as for `make setup`.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { printf '%s\n' "$*" >&2; }

SUITE=$(. /etc/os-release && echo "$VERSION_CODENAME")
IMAGE=octavo-base:$SUITE
TORCH=$(sed -n 's/^TORCH ?= //p' Makefile)
WHEELS=deploy/wheelhouse
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

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
  nohup dockerd >/var/log/octavo-dockerd.log 2>&1 </dev/null &
  say "started dockerd, process $!; it stays"
  for _ in $(seq 60); do docker info >/dev/null 2>&1 && break || sleep 1; done
  docker info >/dev/null || { say "dockerd does not answer; see /var/log/octavo-dockerd.log"; exit 1; }
fi

if ! docker image inspect "$IMAGE" >/dev/null 2>&1; then
  say "making $IMAGE with debootstrap"
  root=$scratch/root
  debootstrap --variant=minbase --include=ca-certificates,g++,python3,python3-dev,python3-venv "$SUITE" "$root" >&2
  rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
  tar --create --one-file-system --directory "$root" . | docker import - "$IMAGE" >&2
fi

# The interpreter of the base image is this system's own python3, so its wheels fit. They are asked for what the images
# will ask for: whatever pyproject.toml has come to want since they were collected shows here, not in the build.
/usr/bin/python3 -m venv "$scratch/venv"
pip() { PIP_DISABLE_PIP_VERSION_CHECK=1 "$scratch/venv/bin/pip" "$@"; }
/usr/bin/python3 - >"$scratch/wanted" <<'PYTHON'
import tomllib
with open("pyproject.toml", "rb") as file:
    settings = tomllib.load(file)
project = settings["project"]
parts = (project["optional-dependencies"][part] for part in ("router", "scheduler", "worker"))
print(*settings["build-system"]["requires"], *project["dependencies"], *(one for part in parts for one in part), sep="\n")
PYTHON
echo "$TORCH" >>"$scratch/wanted"
fits() {
  PIP_CONFIG_FILE=/dev/null pip --isolated install --quiet --dry-run --ignore-installed \
    --no-index --find-links "$WHEELS" --requirement "$scratch/wanted" >/dev/null 2>"$scratch/unmet"
}
if ! fits; then
  say "collecting wheels into $WHEELS: $(grep -m1 '^ERROR' "$scratch/unmet" || echo "they do not serve")"
  rm -f "$WHEELS"/*.whl
  # shellcheck disable=SC2086  # PIP_TORCH is words
  pip download --quiet --only-binary=:all: --dest "$WHEELS" ${PIP_TORCH:-} "$TORCH" >&2
  pip wheel --quiet --wheel-dir "$WHEELS" --find-links "$WHEELS" --requirement "$scratch/wanted" >&2
  fits || { say "the wheels collected do not serve:"; cat "$scratch/unmet" >&2; exit 1; }
fi

cat <<ENV
OCTAVO_BASE_IMAGE=$IMAGE
OCTAVO_PIP_NO_INDEX=1
OCTAVO_TORCH_INDEX_URL=
ENV
