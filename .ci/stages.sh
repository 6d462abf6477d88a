# shellcheck shell=bash
# Stages side by side, for scripts that source this: `stage` tells of one, `run_stages` runs all of them. There is one
# place more than there are cores. Stages of one place fill what the others leave: their priority is low, so that they
# take little from tests with deadlines. What a stage says is shown in one piece when it ends. Whatever ends the script,
# nothing is left of its stages, nor of the folder $work.

# Every stage is a process group, which can be ended as a whole, and in which Ctrl-C means what it means at a prompt.
set -m

work=$(mktemp -d "${TMPDIR:-/tmp}/rlhf-ci.XXXXXX")
# In the environment of all that is started here, and so a mark of what is left of it.
export RLHF_CI_WORK=$work
logs=$work/logs
mkdir "$logs"

stages=() times=() failures=()
declare -A places needs alone commands  # by name, as told to `stage`
declare -A state                        # waiting, running, passed or failed, by name
declare -A began running                # when, by name; the name, by process
used=0
patience_s=10  # after each way of asking a stage to end

# stage NAME PLACES NEEDS ALONE COMMAND...: COMMAND in a subshell that ends at its first error, once the stages NEEDS
# (names between commas) have passed and PLACES are free. ALONE shows a failure by itself, in a checkout with the
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

# ready NAME: whether all that it needs has passed. Where some of it failed, so has NAME.
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

# All stages, the first ones first. After a failure CI goes on, and fails in the end.
run_stages() {
  local capacity=$(($(nproc) + 1)) name process code
  while true; do
    for name in "${stages[@]}"; do
      # A stage that is larger than the machine has it for itself.
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

# Ask what runs to end, then end it, with all that has left its process group.
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
  # Whoever reads along may be gone, as after Ctrl-C with `| tee log`; that must keep nothing from being ended.
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
