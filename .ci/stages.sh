# shellcheck shell=bash
# Runs stages side by side, for scripts that source this file: `stage` adds a stage, `run_stages` runs all. There is one
# place more than cores. Stages of one place have a low priority, so that they do not slow down tests with deadlines.
# The output of a stage appears in one piece at its end. When the script ends, for whatever reason, its stages and the
# folder $work are removed.

# Every stage is a process group, so that it can be ended as a whole and Ctrl-C works in it as at a prompt.
set -m

work=$(mktemp -d "${TMPDIR:-/tmp}/rlhf-ci.XXXXXX")
# Marks, in the environment, all processes that are started here.
export RLHF_CI_WORK=$work
logs=$work/logs
mkdir "$logs"

stages=() times=() failures=()
declare -A places needs alone commands  # by name, as passed to `stage`
declare -A state                        # waiting, running, passed or failed, by name
declare -A began running                # seconds by name; name by process
used=0
patience_s=10  # after each signal

# stage NAME PLACES NEEDS ALONE COMMAND...: runs COMMAND in a subshell that ends at its first error, when the stages
# NEEDS (separated by commas) have passed and PLACES are free. ALONE reproduces a failure, in a checkout with the
# README's virtual environment active.
stage() {
  stages+=("$1")
  places[$1]=$2 needs[$1]=$3 alone[$1]=$4 state[$1]=waiting
  printf -v commands["$1"] '%q ' "${@:5}"
}

log_of() { echo "$logs/${1//[^A-Za-z0-9]/_}"; }

start() {
  began[$1]=$SECONDS state[$1]=running used=$((used + places[$1]))
  echo "... $1 begins after $SECONDS s"
  (
    set -e
    [ "${places[$1]}" -gt 1 ] || renice "$(($(nice) + 10))" -p "$BASHPID" >/dev/null
    eval "${commands[$1]}"
  ) >"$(log_of "$1")" 2>&1 &
  running[$!]=$1
}

show() {
  printf '%s\n' "=== $1"
  cat "$(log_of "$1")"
}

# fail NAME WHY
fail() {
  state[$1]=failed
  failures+=("Stage $1 $2. By itself: ${alone[$1]}")
  echo "${failures[-1]}"
}

# ended NAME CODE
ended() {
  local name=$1 code=$2 row
  used=$((used - places[$name]))
  printf -v row '%6d %7d  %s' "${began[$name]}" $((SECONDS - began[$name])) "$name"
  show "$name"
  if [ "$code" -eq 0 ]; then
    state[$name]=passed
  else
    row+="  FAILED"
    fail "$name" "failed with exit code $code"
  fi
  times+=("$row")
  echo "=== $name: exit code $code, $((SECONDS - began[$name])) s"
}

# ready NAME: returns whether all stages that NAME needs have passed. If one has failed, NAME fails too.
ready() {
  local name names
  IFS=, read -ra names <<<"${needs[$1]}"
  for name in "${names[@]}"; do
    if [ "${state[$name]}" = failed ]; then
      fail "$1" "did not run, since $name failed"
      return 1
    fi
    [ "${state[$name]}" = passed ] || return 1
  done
}

# Runs all stages in order. After a failure the others still run, and CI fails in the end.
run_stages() {
  local capacity=$(($(nproc) + 1)) name process code
  while true; do
    for name in "${stages[@]}"; do
      # A stage that is larger than the machine runs alone.
      if [ "${state[$name]}" = waiting ] && ready "$name" &&
        { [ "$used" -eq 0 ] || [ $((used + places[$name])) -le "$capacity" ]; }; then
        start "$name"
      fi
    done
    [ "${#running[@]}" -gt 0 ] || break
    code=0
    wait -n -p process || code=$?
    name=${running[$process]}
    unset "running[$process]"
    ended "$name" "$code"
  done
  [ -z "${failures[*]}" ]
}

# Ask the running stages to end, then kill them and the processes that left their process groups.
stop_all() {
  local signal process
  for signal in INT TERM KILL; do
    for process in "${!running[@]}"; do kill -s "$signal" -- "-$process" 2>/dev/null || true; done
    for _ in $(seq $((10 * patience_s))); do
      for process in "${!running[@]}"; do
        kill -0 -- "-$process" 2>/dev/null && { sleep 0.1; continue 2; }
      done
      break
    done
  done
  for process in $(grep -lzsxF "RLHF_CI_WORK=$work" /proc/[0-9]*/environ | tr -dc '0-9\n'); do
    kill -s KILL "$process" 2>/dev/null || true
  done
}

finish() {
  local code=$? name
  # The reader of the output may be gone, as after Ctrl-C with `| tee log`. The stages must end anyway.
  set +e
  trap '' INT TERM HUP PIPE
  stop_all 2>/dev/null
  for name in "${running[@]}"; do
    show "$name"
    echo "=== $name: still running after $((SECONDS - began[$name])) s"
  done
  rm -rf "$work"
  [ -z "${times[*]}" ] || printf '%s\n' "" " began seconds  stage" "${times[@]}"
  if [ "$code" -eq 0 ]; then
    echo "CI passed in $SECONDS s."
  else
    printf '%s\n' "${failures[@]}" "CI failed with exit code $code after $SECONDS s."
  fi
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP
trap 'exit 141' PIPE
