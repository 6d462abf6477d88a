"""Confinement of reward processes: real processes try what a policy's text may try, and what must still work."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from rlhf.config import RewardConfig
from rlhf.errors import UserError
from rlhf.reward import RewardItem, RewardResult, build_reward
from rlhf.reward.scoring_handle import ScoringProcess
from tests.support.running import wait_until_gone

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux confines; elsewhere the trainer warns")

# Acts like a verifier that executes the policy's text.
FILE = """
import os, sys, time
def score(data_source, solution_str, ground_truth, extra_info):
    out = {"score": 1.0}
    exec(solution_str, {"out": out, "os": os, "sys": sys, "time": time})
    return out
"""
SECRET = "hunter2-of-the-trainer"


class Probe:
    """A reward of one function, which executes its responses."""

    def __init__(self, folder: Path, **settings):
        (folder / "probe.py").write_text(FILE)
        settings = {"num_workers": 1, "on_error": "score", "failed_score": -1.0, **settings}
        self.reward = build_reward(RewardConfig(functions=[f"{folder}/probe.py:score"], **settings))

    def __call__(self, code: str) -> RewardResult:
        return self.reward.score([item(code)])[0]


def item(code: str) -> RewardItem:
    return RewardItem("src", code, "gold", {}, [])


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    probe = Probe(tmp_path_factory.mktemp("probe"))
    yield probe
    probe.reward.close()


@pytest.fixture
def probe_of(tmp_path):
    made = []

    def make(**settings) -> Probe:
        made.append(Probe(tmp_path, **settings))
        return made[-1]

    yield make
    for probe in made:
        probe.reward.close()


@pytest.fixture
def holder():
    """A process of the trainer's user with a secret in its environment, which the user can read."""
    process = subprocess.Popen(["sleep", "600"], env={"API_TOKEN": SECRET, "PATH": os.environ["PATH"]})
    deadline = time.monotonic() + 120
    while SECRET not in Path(f"/proc/{process.pid}/environ").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield process
    process.kill()
    process.wait()


def namespaces_allowed() -> bool:
    user = "" if os.geteuid() == 0 else "-U"
    return subprocess.run(["unshare", *user.split(), "-p", "-m", "true"], capture_output=True).returncode == 0


def test_only_variables_in_pass_env_reach_a_reward_process(probe_of, monkeypatch):
    monkeypatch.setenv("API_TOKEN", SECRET)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    look = "out['token'] = 'API_TOKEN' in os.environ or b'API_TOKEN' in open('/proc/self/environ', 'rb').read()\n"
    look += "out['threads'] = float(os.environ['OMP_NUM_THREADS'])"
    assert probe_of()(look).extra == {"token": 0.0, "threads": 3.0}
    assert probe_of(pass_env=["API_TOKEN"])(look).extra == {"token": 1.0, "threads": 3.0}


def test_other_processes_environments_and_memory_stay_closed(shared, holder):
    code = "out['read'] = 0\nfor path in ('environ', 'mem', 'maps', 'fd/0'):\n"
    code += f"    try:\n        open('/proc/{holder.pid}/' + path, 'rb').read(1)\n        out['read'] += 1\n"
    code += "    except OSError: pass\n"
    code += f"try:\n    os.kill({holder.pid}, 9)\n    out['killed'] = 1\nexcept OSError:\n    out['killed'] = 0"
    assert shared(code).extra == {"read": 0.0, "killed": 0.0}
    assert holder.poll() is None


def test_no_file_is_opened_behind_its_path(shared):
    result = shared("""
import ctypes, errno
libc, some_inode = ctypes.CDLL(None, use_errno=True), (8).to_bytes(4, "little") + (1).to_bytes(12, "little")
opened = libc.open_by_handle_at(os.open("/", os.O_RDONLY), some_inode, os.O_RDONLY)
out["refused"] = opened == -1 and ctypes.get_errno() == errno.EPERM
""")
    assert (result.extra, result.failures) == ({"refused": 1.0}, 0)


def test_no_file_of_the_trainers_is_open(shared):
    code = "import stat\nout['files'] = out['folders'] = 0\nfor fd in range(64):\n    try:\n"
    code += "        kind = os.fstat(fd).st_mode\n        out['files'] += stat.S_ISREG(kind) or stat.S_ISSOCK(kind)\n"
    code += "    except OSError: pass"
    assert shared(code).extra["files"] == 0


@pytest.mark.parametrize("network", [False, True])
def test_the_network_is_open_only_when_asked_for(probe_of, network):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\ntry:\n    socket.create_connection(('127.0.0.1', {port}), 5).close()\n"
        code += "    out['reached'] = 1\nexcept PermissionError:\n    out['reached'] = 0\n"
        code += "for kind in (socket.AF_UNIX, socket.AF_INET6, socket.AF_NETLINK):\n"
        code += "    try:\n        socket.socket(kind, socket.SOCK_DGRAM)\n        out['reached'] += 1\n"
        code += "    except PermissionError: pass"
        assert probe_of(network=network)(code).extra == {"reached": 4.0 if network else 0.0}


def test_processes_and_threads_are_limited(shared):
    code = "import resource, threading\nlimit = resource.getrlimit(resource.RLIMIT_NPROC)[1]\n"
    code += "out['refused'] = 0 < limit < 100_000\nthreading.stack_size(65536)\ngo, made = threading.Event(), []\n"
    # If the reward process runs as the trainer's user, the limit also counts that user's other processes.
    # Then the limit is too high to try.
    code += "try:\n    while limit == 1024 and len(made) < 2000:\n        out['refused'] = 0\n"
    code += "        thread = threading.Thread(target=go.wait)\n        thread.start()\n"
    code += "        made.append(thread)\nexcept RuntimeError:\n    out['refused'] = 1\n"
    code += "go.set()\nfor thread in made: thread.join()"
    assert shared(code).extra == {"refused": 1.0}


def test_sizes_and_cpu_time_are_limited(shared):
    code = "import resource as r\nf = open(os.path.expanduser('~/large'), 'wb')\ntry:\n    f.truncate(1 << 40)\n"
    code += "except OSError: out['size'] = 1\n"
    code += "used, limit = time.process_time(), r.getrlimit(r.RLIMIT_CPU)[0]\n"
    code += "out['cpu'] = used < limit <= used + 20 * os.cpu_count() + 1\n"
    code += "out['core'] = r.getrlimit(r.RLIMIT_CORE)[1]\nout['open'] = r.getrlimit(r.RLIMIT_NOFILE)[1] <= 4096"
    assert shared(code).extra == {"size": 1.0, "cpu": 1.0, "core": 0.0, "open": 1.0}


def test_the_memory_limit_applies_to_each_sample_separately(shared, probe_of):
    greedy, after = shared("x = bytearray(100 << 30)"), shared("x = bytearray(1 << 20)")
    assert (greedy.score, greedy.failures, greedy.timeouts) == (-1.0, 1, 0)
    assert (after.score, after.failures) == (1.0, 0)
    with pytest.raises(UserError, match=r"more memory than reward\.memory_gb=0\.5 on one sample"):
        probe_of(memory_gb=0.5, on_error="stop")("x = bytearray(1 << 30)")
    look = "import resource\nout['limit'] = resource.getrlimit(resource.RLIMIT_DATA)[0]"
    assert probe_of(memory_gb=None)(look).extra == {"limit": -1.0}


def test_the_kernel_kills_reward_processes_first_when_memory_runs_out(shared):
    assert shared("out['adj'] = int(open('/proc/self/oom_score_adj').read())").extra == {"adj": 1000.0}


def test_nothing_outside_its_own_folder_is_written(shared, probe_of, tmp_path):
    victim, folder = tmp_path / "checkpoint", tmp_path / "open"
    victim.write_text("weights")
    folder.mkdir()
    code = f"victim, folder = {str(victim)!r}, {str(folder)!r}\n"
    code += "attempts = [lambda: open(victim, 'a'), lambda: os.truncate(victim, 0), lambda: os.remove(victim),\n"
    code += "    lambda: os.rename(victim, victim + '2'), lambda: os.mkdir(victim + '3'), lambda: os.rmdir(folder),\n"
    code += "    lambda: os.symlink(victim, victim + '4'), lambda: os.link(victim, os.path.expanduser('~/linked'))]\n"
    code += "out['done'] = 0\nfor attempt in attempts:\n    try:\n        attempt()\n        out['done'] += 1\n"
    code += "    except OSError: pass\n"
    code += "os.system(f'echo x >> {victim}')"
    assert shared(code).extra == {"done": 0.0}
    assert victim.read_text() == "weights"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "open"]
    written = probe_of(writable=[str(folder)])(f"open({str(folder)!r} + '/log', 'w').write('x')")
    assert (written.failures, (folder / "log").read_text()) == (0, "x")


def test_a_reward_process_has_a_temporary_folder_that_is_removed_with_it(probe_of, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    probe = probe_of()
    code = "import tempfile\nhome = os.path.expanduser('~')\nopen(home + '/a', 'w').close()\n"
    code += "open('/dev/null', 'w').write('x')\nwith tempfile.NamedTemporaryFile('w') as f: f.write('x')\n"
    code += f"out['inside'] = home.startswith({str(temporary)!r}) and f.name.startswith(home)"
    assert probe(code).extra == {"inside": 1.0}
    assert len(list(temporary.glob("rlhf-reward-*"))) == 1
    probe.reward.close()
    assert not list(temporary.iterdir())


def test_files_subprocesses_and_queues_work_in_a_reward_process(shared, tmp_path):
    (tmp_path / "data.json").write_text("[1, 2]")
    code = f"import json, multiprocessing, subprocess\nout['read'] = len(json.load(open('{tmp_path}/data.json')))\n"
    code += "queue = multiprocessing.get_context('fork').Queue()\n"
    code += "worker = multiprocessing.get_context('fork').Process(target=queue.put, args=(7,))\nworker.start()\n"
    code += "out['queue'] = queue.get()\nworker.join()\n"
    code += "out['sub'] = int(subprocess.run(['expr', '1', '+', '4'], capture_output=True).stdout)\n"
    code += "out['where'] = os.getcwd() == " + repr(str(Path.cwd())) + "\n"
    code += "out['self'] = os.stat('/proc/self/status').st_size + os.path.exists(f'/proc/{os.getpid()}/task')"
    result = shared(code)
    assert result.extra == {"read": 2.0, "queue": 7.0, "sub": 5.0, "where": 1.0, "self": 1.0}


@pytest.mark.parametrize(
    ("code", "names_setting"),
    [
        ("os.environ['MY_API_KEY']", True),
        ("open('/of_a_function', 'w')", True),
        ("import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')", True),
        ("import urllib.request; urllib.request.urlopen('http://judge.example.com')", True),
        ("{}['MY_API_KEY']", False),
        ("open('/of/nobody')", False),
    ],
)
def test_a_denied_permission_names_the_setting_that_grants_it(probe_of, monkeypatch, code, names_setting):
    monkeypatch.setenv("MY_API_KEY", SECRET)
    with pytest.raises(UserError) as raised:
        probe_of(on_error="stop")(code)
    for setting in ("reward.writable", "reward.network", "reward.pass_env"):
        assert (setting in str(raised.value)) == names_setting
    assert SECRET not in str(raised.value)


def test_a_file_that_needs_a_variable_is_told_how_to_get_it(tmp_path):
    (tmp_path / "client.py").write_text("import os\nkey = os.environ['MY_API_KEY']\ndef score(**kwargs): return 1.0\n")
    reward = build_reward(RewardConfig(functions=[f"{tmp_path}/client.py:score"], num_workers=1))
    with contextlib.closing(reward), pytest.raises(UserError, match=r"reward\.pass_env"):
        reward.score([item("")])


def test_a_file_that_was_edited_is_not_run_by_a_process_that_starts_again(tmp_path):
    file = tmp_path / "edited.py"
    file.write_text("import time\ndef score(solution_str, **_): time.sleep(float(solution_str)); return 1.0\n")
    settings = {"num_workers": 1, "timeout_s": 1.0, "on_error": "score"}
    reward = build_reward(RewardConfig(functions=[f"{file}:score"], **settings))
    with contextlib.closing(reward):
        assert reward.score([RewardItem("src", "0", "gold", {}, [])])[0].score == 1.0
        file.write_text(file.read_text().replace("1.0", "7.0"))
        assert reward.score([RewardItem("src", "30", "gold", {}, [])])[0].score == 0.0, "the deadline ends the process"
        with pytest.raises(UserError, match=r"reward\.functions=.*edited\.py:score: the file has changed"):
            reward.score([RewardItem("src", "0", "gold", {}, [])])


def test_processes_that_leave_the_session_end_with_the_sample(probe_of):
    if not namespaces_allowed():
        pytest.skip("this machine has no namespaces for its user")
    seconds = f"{os.getpid()}.5"
    code = f"if os.fork() == 0:\n    os.setsid()\n    os.execvp('sleep', ['sleep', '{seconds}'])\nwhile True: pass"
    assert probe_of(timeout_s=1.0)(code).timeouts == 1
    wait_until_gone(f"sleep\0{seconds}")


REST = '"notes": {}, "timed_out": false, "failed": false}'
FORGED = (
    f'{{"score": 1{"0" * 400}, "extra": {{}}, {REST}',
    f'{{"score": 1, "extra": {{"a": 1{"0" * 400}}}, {REST}',
    f'{{"score": 1, "extra": {{"a": NaN}}, {REST}',
    f'{{"score": "1", "extra": {{}}, {REST}',
    f'{{"score": 1, "extra": {{}}, {REST}, {{"score": 1, "extra": {{}}, {REST}',
    '{"score": 1, "extra": {}, "notes": [], "timed_out": false, "failed": false}',
    '{"score": 1, "extra": {}, "notes": {"a": [Infinity]}, "timed_out": false, "failed": false}',
    '{"score": 1}',
    "1",
)
"""Entries of answers that have the number of the request but are wrong in other ways."""


def answer_of(entries: str) -> str:
    """Return Python code for an answer's bytes; the code uses a variable `number`."""
    return f'b\'{{"number": "\' + number + b\'", "scores": [{entries}]}}\\n\''


@pytest.mark.parametrize(
    "answer",
    [
        "b'garbage\\n'",
        "b'[1]\\n'",
        "b'{}\\n'",
        'b\'{"score": "1"}\\n\'',
        'b\'{"score": 1, "path": 2}\\n\'',
        *map(answer_of, FORGED),
        "b'[' * 200_000 + b'\\n'",
        "b'x' * 50_000_000",
    ],
)
def test_a_forged_answer_costs_the_sample_not_the_run(shared, answer):
    code = "import sys\nframe = sys._getframe()\nwhile 'request' not in frame.f_locals: frame = frame.f_back\n"
    code += "number = frame.f_locals['number'].encode()\n"
    code += (
        f"data = {answer}\nfor fd in range(3, 20):\n    try:\n        while data: data = data[os.write(fd, data):]\n"
    )
    result = shared(code + "    except OSError: pass")
    assert (result.score, result.failures) == (-1.0, 1)
    assert shared("pass").score == 1.0


@pytest.mark.parametrize("numbered", [False, True])
def test_a_forged_answer_is_not_the_score_of_the_next_sample(shared, numbered):
    """With `numbered`, a forged answer is accepted, and the real one arrives after the next question was asked."""
    code = "import json, sys\nframe = sys._getframe()\nwhile 'request' not in frame.f_locals: frame = frame.f_back\n"
    code += "entry = {'score': 7.0, 'extra': {}, 'notes': {}, 'timed_out': False, 'failed': False}\n"
    code += "answer = {'scores': [entry]}\n"
    code += "answer['number'] = frame.f_locals['number']\n" if numbered else ""
    code += "answer = json.dumps(answer).encode() + b'\\n'\nfor fd in range(3, 20):\n"
    code += "    try: os.write(fd, answer)\n    except OSError: pass\ntime.sleep(0.3)"
    assert shared(code).score == (7.0 if numbered else -1.0)
    assert [shared(f"out['score'] = {score}").score for score in (0.25, 0.5)] == [0.25, 0.5]


def test_endless_output_does_not_delay_the_timeout(tmp_path):
    process = ScoringProcess("silent", RewardConfig())
    process._popen = popen = subprocess.Popen(["sleep", "60"], stdin=-1, stdout=-1, start_new_session=True)
    process._stdin, process._stdout = popen.stdin, popen.stdout
    process._stderr = Path("/dev/zero").open("rb", buffering=0)  # noqa: SIM115
    watch = threading.Timer(10, popen.kill)
    watch.start()
    with pytest.raises(TimeoutError):
        process._exchange(b"", 0.3)
    watch.cancel()


def test_output_is_passed_on_and_bounded(shared, capsys):
    assert shared("print('needle')\nprint('x' * 9_000_000)\nprint('late')").score == 1.0
    shown = capsys.readouterr().err
    assert "needle" in shown
    assert 1_000_000 < len(shown) < 1_200_000
    shared("print('again', flush=True)")
    assert "again" in capsys.readouterr().err


def test_the_last_output_of_a_reward_process_is_shown(probe_of, capsys):
    assert probe_of()("os.write(2, b'famous'); os._exit(1)").failures == 1
    assert "famous" in capsys.readouterr().err


# As in a container: no namespaces, so that folders lie on the disk.
WITHOUT_NAMESPACES = """
import os, signal, sys
from pathlib import Path
from rlhf.reward import kernel
from tests.unit.test_reward_confinement import Probe, item
kernel._CALLS["unshare"] = (272, 97)
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
kernel.forbid_calls(["unshare"])
probe, outside = Probe(Path(sys.argv[1]), num_workers=2), sys.argv[3]
code = "time.sleep(0.2)\\nopen(os.path.expanduser('~/a'), 'w').close()\\n"
code += f"try: open({outside!r} + '/new', 'w')\\nexcept OSError: out['kept'] = 1"
results = probe.reward.score([item(code)] * 6)
assert all(result.extra == {"kept": 1.0} for result in results), results
def count(): return len(list(Path(os.environ["TMPDIR"]).glob("rlhf-reward-*")))
print(count(), flush=True)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
probe.reward.close()
print(count())
"""


@pytest.fixture
def without_namespaces(tmp_path):
    def run(end: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "temporary").mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, "-c", WITHOUT_NAMESPACES, str(tmp_path), end, outside],
            env={**os.environ, "TMPDIR": str(tmp_path / "temporary")},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            timeout=240,
        )

    # Not in the tests' temporary folder: it may be in /dev/shm, where the reward processes may write.
    with tempfile.TemporaryDirectory(dir="/tmp") as outside:
        yield run


def test_missing_kernel_features_are_logged_once_and_other_limits_apply(without_namespaces):
    ended = without_namespaces("close")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["2", "0"]
    assert ended.stderr.count("Missing: ") == 1
    assert "namespaces ([Errno 1] Operation not permitted)" in ended.stderr


def test_folders_of_a_killed_trainer_are_removed_by_the_next_start(without_namespaces, tmp_path):
    killed = without_namespaces("kill")
    assert (killed.returncode, killed.stdout.split()) == (-signal.SIGKILL, ["2"]), killed.stderr
    wait_until_gone(f"{tmp_path}/probe.py")
    assert without_namespaces("close").stdout.split() == ["2", "0"]
