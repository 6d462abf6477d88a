"""User functions: real files, real processes, killed, crashed and misbehaving in every way that we know of."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from rlhf.config import RewardConfig, RewardModelConfig
from rlhf.errors import UserError
from rlhf.reward import RewardError, RewardItem, build_reward, check_reward
from tests.support.published import eventually
from tests.support.running import running, wait_until_gone

FUNCTION = "def score(data_source, solution_str, ground_truth, extra_info):\n"


@pytest.fixture
def reward_of(tmp_path):
    made = []

    def make(body: str, head: str = "import os, sys, time\nstarted = time.time()\n", **settings):
        path = tmp_path / "my_reward.py"
        path.write_text(head + FUNCTION + "".join(f"    {line}\n" for line in body.splitlines()))
        made.append(build_reward(RewardConfig(functions=[f"{path}:score"], **settings)))
        return made[-1]

    yield make
    for reward in made:
        reward.close()


def items(*responses: str) -> list[RewardItem]:
    return [RewardItem("src", response, "gold", {"i": i}, []) for i, response in enumerate(responses)]


def test_order_is_kept_while_processes_work_at_once(reward_of):
    reward = reward_of("time.sleep(0.05 if int(solution_str) % 2 else 0)\nreturn int(solution_str)", num_workers=2)
    assert [result.score for result in reward.score(items(*map(str, range(12))))] == list(range(12))
    assert reward.score([]) == []


def test_keywords_and_extra_numbers_arrive(reward_of):
    reward = reward_of(
        "assert (data_source, ground_truth) == ('src', 'gold')\n"
        "return {'score': len(solution_str), 'i': extra_info['i'], 'ok': True}",
        num_workers=1,
    )
    results = reward.score(items("a", "bc\nd é"))
    assert [result.score for result in results] == [1.0, 6.0]
    assert results[1].extra == {"i": 1.0, "ok": 1.0}


def test_endless_loop_is_killed_and_the_rest_goes_on(reward_of):
    reward = reward_of(
        "while solution_str == 'hang': pass\nreturn started", timeout_s=2.0, failed_score=-7.0, num_workers=1
    )
    before, hung, after = reward.score(items("ok", "hang", "ok"))
    assert (hung.score, hung.timeouts, hung.failures) == (-7.0, 1, 0)
    assert before.timeouts == after.timeouts == 0
    assert before.score != after.score, "the process must be a new one"


def test_what_the_function_started_is_killed_with_it(reward_of):
    seconds = f"{os.getpid()}.25"
    reward = reward_of(
        f"import subprocess\nif solution_str == 'x': subprocess.run(['sleep', '{seconds}'])\nreturn 1.0",
        timeout_s=2.0,
        num_workers=1,
    )
    assert [result.timeouts for result in reward.score(items("y", "x"))] == [0, 1]
    wait_until_gone(f"sleep\0{seconds}")


def test_start_up_does_not_count_against_the_deadline(reward_of):
    reward = reward_of("return 1.0", head="import time\ntime.sleep(2.5)\n", timeout_s=2.0, num_workers=1)
    assert reward.score(items("x"))[0].timeouts == 0


def test_output_of_the_function_does_not_disturb_the_protocol(reward_of):
    reward = reward_of(
        "print('{\"score\": 9}', flush=True)\nos.write(1, b'noise\\n')\nos.system('echo more')\n"
        "assert sys.stdin.read() == ''\nreturn 1.0",
        num_workers=1,
    )
    assert [result.score for result in reward.score(items("a", "b"))] == [1.0, 1.0]


def test_large_samples_pass_the_pipes(reward_of):
    reward = reward_of("return len(solution_str)", num_workers=1)
    assert reward.score(items("x" * 3_000_000))[0].score == 3_000_000


def test_a_process_that_dies_once_is_restarted(reward_of, tmp_path):
    flag = tmp_path / "flag"
    reward = reward_of(
        f"flag = {str(flag)!r}\nif not os.path.exists(flag):\n"
        "    open(flag, 'w').close()\n    os.kill(os.getpid(), 11)\n"
        "return 1.0",
        num_workers=1,
        writable=[str(tmp_path)],
    )
    assert reward.score(items("a"))[0].score == 1.0
    assert flag.exists()


def test_a_process_that_dies_twice_is_an_error_with_the_sample(reward_of):
    reward = reward_of("os._exit(3)", num_workers=1)
    with pytest.raises(UserError, match=r"(?s)exit status 3.*needle"):
        reward.score(items("needle"))


def test_an_exception_carries_traceback_and_sample(reward_of):
    reward = reward_of("return 1 / len(solution_str[1:])", num_workers=1)
    with pytest.raises(UserError, match=r"(?s)my_reward\.py:score failed.*response='q'.*ZeroDivisionError") as caught:
        reward.score(items("q"))
    assert str(caught.value).count("ZeroDivisionError") == 1
    assert "reward.on_error=score" in str(caught.value)
    assert reward.score(items("abc"))[0].score == 0.5, "the pool must live on"


@pytest.mark.parametrize(
    "value",
    ["None", "float('nan')", "float('inf')", "'1'", "[1]", "{}", "{'score': None}", "{'score': 1, 'x': float('nan')}"],
)
def test_anything_but_a_number_is_a_user_error(reward_of, value):
    reward = reward_of(f"return {value}", num_workers=1)
    with pytest.raises(UserError, match=r"reward\.functions=.*returned"):
        reward.score(items("q"))


def test_a_file_that_fails_to_import_is_a_user_error(reward_of):
    reward = reward_of("return 1.0", head="import no_such_module\n", num_workers=1)
    with pytest.raises(UserError, match=r"reward\.functions=.*cannot be imported.*no_such_module"):
        reward.score(items("q"))


def test_neighbouring_modules_can_be_imported(reward_of, tmp_path):
    (tmp_path / "my_helpers.py").write_text("VALUE = 2.5\n")
    reward = reward_of("return my_helpers.VALUE", head="import my_helpers\n", num_workers=1)
    assert reward.score(items("q"))[0].score == 2.5


def test_close_ends_a_process_in_the_middle_of_a_sample(reward_of, tmp_path):
    begun = tmp_path / "begun"
    reward = reward_of(
        f"open({str(begun)!r}, 'w').close()\ntime.sleep(600)",
        timeout_s=600.0,
        num_workers=1,
        writable=[str(tmp_path)],
    )
    errors = []

    def run():
        try:
            reward.score(items("q"))
        except RewardError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    eventually(begun.exists)
    reward.close()
    thread.join(120)
    assert len(errors) == 1
    wait_until_gone(f"{tmp_path}/my_reward.py")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's parent-death signal")
def test_a_busy_process_dies_with_a_killed_parent(tmp_path):
    begun = tmp_path / "begun"
    (tmp_path / "my_reward.py").write_text(f"{FUNCTION}    open({str(begun)!r}, 'w').close()\n    while True: pass\n")
    code = (
        "import sys\nfrom rlhf.config import RewardConfig\nfrom rlhf.reward import RewardItem, build_reward\n"
        "settings = dict(timeout_s=600.0, num_workers=1, writable=[sys.argv[1]])\n"
        "r = build_reward(RewardConfig(functions=[sys.argv[1] + '/my_reward.py:score'], **settings))\n"
        "r.score([RewardItem('s', 'r', 'g', {}, [])])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    eventually(begun.exists)
    assert running(f"{tmp_path}/my_reward.py")
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until_gone(f"{tmp_path}/my_reward.py")


def test_reward_process_imports_no_torch():
    code = "import sys, rlhf.reward.scoring_process, rlhf.reward.verifiers; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("score.py", "form path/to/file.py:name"),
        (":score", "form path/to/file.py:name"),
        ("{}/rewards.py:sc ore", "form path/to/file.py:name"),
        ("{}/reward.py:score", "/rewards.py? Correct the path"),
        ("{}/rewards.py:scor", "Did you mean score"),
        ("{}/broken.py:score", "cannot be read as Python"),
        ("{}/rewards.py:blind", "takes none of solution_str, "),
        (
            "{}/rewards.py:Made",
            "Made is a class, so calling it only creates an object. Write a function (def) that uses it",
        ),
        ("{}/rewards.py:by_position", "takes solution_str by position only"),
    ],
)
def test_bad_specs_are_found_before_anything_runs(tmp_path, spec, message):
    (tmp_path / "broken.py").write_text("def score(:\n")
    (tmp_path / "rewards.py").write_text(
        "raise SystemExit('checking must not run the file')\n"
        "def score(**kwargs): return 1\n"
        "def blind(data_source, ground_truth): return 1\n"
        "def by_position(solution_str, /, **kwargs): return 1\n"
        "class Made: pass\n"
    )
    with pytest.raises(UserError, match=r"reward\.functions=") as caught:
        check_reward(RewardConfig(functions=[spec.format(tmp_path)]), RewardModelConfig())
    assert message in str(caught.value)


@pytest.mark.parametrize("name", ["plain", "assigned", "imported", "guarded", "unpacked"])
def test_good_specs_pass(tmp_path, name):
    (tmp_path / "rewards.py").write_text(
        "from os import path as imported\n"
        "def plain(solution_str, ground_truth, data_source, extra_info=None, scale=1.0): return 1\n"
        "assigned = plain\n"
        "unpacked, other = plain, plain\n"
        "try:\n    import nothing\nexcept ImportError:\n    def guarded(**kwargs): return 1\n"
    )
    check_reward(RewardConfig(functions=[f"{tmp_path}/rewards.py:{name}"]), RewardModelConfig())
