#!/usr/bin/env bash
# Makes this machine able to build hopshard: compilers and tools, then a .venv with the locked
# Python packages. Safe to run again; returns at once if nothing is to be done.
#
#   TORCH_VERSION=2.15.0 tools/setup.sh   another torch than the locked one
#   PYTHON=/path/to/python tools/setup.sh the interpreter that .venv is made from
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly lock=requirements-lock.txt
readonly torch_version="${TORCH_VERSION:-}"
readonly required_packages=(cmake ninja-build g++ libgtest-dev)
readonly optional_packages=(ccache libgmock-dev clang-format clang-tidy git
  libopenmpi-dev openmpi-bin libfabric-dev iproute2)
readonly python_packages=(python3-venv python3-dev)

say() { echo "setup: $*" >&2; }

has_header() {
  echo "#include <$1>" | "${CXX:-g++}" -x c++ -fsyntax-only - 2>/dev/null
}

has_mpi_header() {
  # Debian keeps mpi.h in a folder that only MPI's own compiler wrapper knows.
  CXX=mpicxx has_header mpi.h || has_header mpi.h
}

# Prints the Debian packages out of the arguments whose content is not there.
missing_packages() {
  local package
  for package in "$@"; do
    case "$package" in
      ninja-build) command -v ninja ;;
      libgtest-dev) has_header gtest/gtest.h ;;
      libgmock-dev) has_header gmock/gmock.h ;;
      libopenmpi-dev) has_mpi_header ;;
      openmpi-bin) command -v mpirun ;;
      libfabric-dev) has_header rdma/fabric.h ;;
      iproute2) command -v ip ;;
      *) command -v "$package" ;;
    esac >/dev/null || echo "$package"
  done
}

readonly usable_python='
import os, sys, sysconfig, venv, ensurepip
header = os.path.join(sysconfig.get_path("include"), "Python.h")
sys.exit(not (sys.version_info >= (3, 11) and os.path.exists(header)))'

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.11 python3.12 python3.13 python3.14; do
    if [[ -n "$candidate" ]] && "$candidate" -c "$usable_python" 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

install_packages() {  # optional|required package...
  local kind="$1"
  shift
  (($# > 0)) || return 0
  if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
    say "$kind packages are missing; on Debian or Ubuntu: sudo apt-get install -y $*"
    return 0
  fi
  say "installing $*"
  [[ -n "${apt_updated:-}" ]] || apt-get update -qq >&2 || true
  apt_updated=1
  # Together first; one by one if a name is unknown here, so that one does not stop the others.
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2 && return 0
  local package
  for package in "$@"; do
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >&2 ||
      say "could not install $package"
  done
}

provide_tools() {
  local missing
  mapfile -t missing < <(missing_packages "${required_packages[@]}")
  install_packages required "${missing[@]}"
  mapfile -t missing < <(missing_packages "${optional_packages[@]}")
  install_packages optional "${missing[@]}"
  if [[ ! -x .venv/bin/python ]] && ! find_python >/dev/null; then
    install_packages required "${python_packages[@]}"
  fi

  mapfile -t missing < <(missing_packages "${required_packages[@]}")
  if ((${#missing[@]} > 0)); then
    say "still missing: ${missing[*]}"
    exit 1
  fi
}

provide_packages() {
  if ! .venv/bin/python -c "$usable_python" 2>/dev/null; then
    local python
    if ! python="$(find_python)"; then
      say "no Python >= 3.11 with its headers and venv; install one or set PYTHON=/path/to/python"
      exit 1
    fi
    say "making .venv from $python"
    "$python" -m venv .venv
  fi

  say "installing Python packages; torch brings its CUDA libraries, about 3 GB the first time"
  local pip=(.venv/bin/python -m pip --disable-pip-version-check --no-input install --quiet)
  if [[ -z "$torch_version" ]]; then
    "${pip[@]}" --requirement "$lock"
  else
    # The packages that torch itself pins must follow the other torch.
    grep -vE '^(torch|triton|nvidia-|cuda-|sympy|numpy)' "$lock" >.venv/requirements-without-torch.txt
    "${pip[@]}" "torch==$torch_version" numpy --requirement .venv/requirements-without-torch.txt
  fi
}

readonly stamp=".venv/.hopshard-setup"
key="$(cat "$lock" tools/setup.sh | sha256sum | cut -d' ' -f1) torch=${torch_version:-locked}"
if [[ -x .venv/bin/python && -f "$stamp" && "$(cat "$stamp")" == "$key" ]]; then
  exit 0
fi
provide_tools
provide_packages
echo "$key" >"$stamp"
