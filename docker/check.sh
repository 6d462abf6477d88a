#!/usr/bin/env bash
# Builds docker/Dockerfile.cpu with buildah, and checks a run in containers of the image: health check, SIGKILL of a
# whole container, resume, bits. Needs root, buildah, and a Python with this package and its tests' packages.
#
# docker/check.sh FOLDER BASE TORCH_INDEX [SETTING...]
#
# FOLDER is new and has space for 10 GB. BUILD_OPTIONS in the environment are further options of `buildah build`. The
# containers are namespaces of unshare, so that no daemon is needed; tini is process 1 in each.
set -euo pipefail
[ $# -ge 3 ] || { echo "usage: docker/check.sh FOLDER BASE TORCH_INDEX [SETTING...]"; exit 2; }
mkdir -p "$1" && folder=$(realpath "$1") base=$2 index=$3 && shift 3
cd "$(dirname "$0")/.."
export BUILDAH_ISOLATION=chroot
trap 'for process in $(jobs -p); do pkill -KILL --parent "$process" || true; done' EXIT
buildah() { command buildah --root "$folder/store" --runroot "$folder/run" --storage-driver overlay "$@"; }

# shellcheck disable=SC2086
buildah build --format docker --build-arg "BASE=$base" --build-arg "TORCH_INDEX=$index" ${BUILD_OPTIONS:-} \
  -f docker/Dockerfile.cpu -t localhost/rlhf:cpu .
container=$(buildah from localhost/rlhf:cpu)
root=$(buildah mount "$container")
template='{{range .OCIv1.Config.Env}}{{println .}}{{end}}'
mapfile -t variables < <(buildah inspect --type image --format "$template" localhost/rlhf:cpu | grep .)
inside=(env -i "${variables[@]}" chroot --userspec=1000:1000 "$root" sh -c 'cd /work && exec "$@"' sh)

# start NAME [SETTING...]: runs the trainer in a new container with the volume NAME; $! is its unshare.
start() {
  install --directory --owner 1000 --group 1000 "$folder/$1"
  # shellcheck disable=SC2016
  unshare --pid --fork --mount --uts --ipc sh -euc '
    mount --bind "$1" "$2/work"; mount -t proc proc "$2/proc"; mount --rbind /dev "$2/dev"
    mount -t tmpfs tmpfs "$2/dev/shm"; shift 2; exec "$@"' sh \
    "$folder/$1" "$root" "${inside[@]}" tini -- python -m rlhf.train "${@:2}" >>"$folder/$1.log" 2>&1 &
}
run_dir() { echo "$folder/$1/checkpoints/rlhf/offline"; }
health() { nsenter --target "$1" --pid --mount "${inside[@]}" python -m rlhf.launch.container_health; }

start twin "$@"
twin=$!
start killed "$@"
killed=$!
until [ -e "$(run_dir killed)/latest_checkpointed_iteration.txt" ]; do kill -0 "$killed"; sleep 0.2; done
first=$(pgrep --parent "$killed")
health "$first"
supervisor=$(pgrep --parent "$first")
kill -STOP "$supervisor"
if health "$first"; then echo "A paused run is healthy." && exit 1; fi
kill -CONT "$supervisor"
sleep 3
kill -KILL "$first" # the kernel kills all processes of the container
wait "$killed" || true
start killed "$@"
wait $!
wait "$twin"
grep -h "resumed at step" "$folder/killed.log"
python -c 'import sys; from pathlib import Path; from tests.support.compare_runs import differences
found = differences(*map(Path, sys.argv[1:])); print("differences:", found); sys.exit(bool(found))' \
  "$(run_dir twin)" "$(run_dir killed)"
buildah rm "$container"
