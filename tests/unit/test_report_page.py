"""python -m rlhf.report: the page of runs in any state; what users wrote stays text; sizes and times are bounded."""

import json
import random
import re
import time

import pytest

from rlhf.cli.report import main
from rlhf.errors import EXIT_DONE, EXIT_USER_ERROR
from rlhf.ranks.run_events import KILLED, RunEvent, read_events, record_event, with_kills
from rlhf.storage.layout import HISTORY
from rlhf.tracking import write_report
from rlhf.tracking.page.curves import COLUMNS, Curve
from rlhf.tracking.page.page import page_of, run_names
from rlhf.tracking.page.run_facts import Deadline
from rlhf.tracking.page.svg import Line, plot, ticks
from rlhf.tracking.verdict import verdict
from tests.support.refusals import says
from tests.support.run_folders import HOSTILE, run_folder

NOTHING = {"reward/mean": 0.0, "reward/min": 0.0, "reward/max": 0.0, "reward/frac_zero_std": 1.0}
KILLED_AND_RESUMED = [
    {"time": 1000.0, "event": "started", "host": "here", "release": "1"},
    {"time": 1010.0, "event": "training", "step": 0, "total_steps": 40},
    {"time": 1020.0, "event": "saved", "step": 10, "seconds": 0.5, "bytes": 1 << 20},
    {"time": 1030.0, "event": "crashed", "step": 15, "cause": f"rank 0: died with SIGKILL {HOSTILE}", "restart": 1,
     "max_restarts": 3, "details": HOSTILE, "hang": False},
    {"time": 1040.0, "event": "resumed", "step": 10, "seconds": 0.1, "bytes": 1 << 20},
    {"time": 1050.0, "event": "saved", "step": 20, "seconds": 0.5, "bytes": 1 << 20},
    {"time": 1060.0, "event": "started", "host": "here", "release": "1"},
    {"time": 1070.0, "event": "resumed", "step": 20, "seconds": 0.1, "bytes": 1 << 20},
    {"time": 1090.0, "event": "saved", "step": 40, "seconds": 0.5, "bytes": 1 << 20},
    {"time": 1091.0, "event": "finished"},
]  # fmt: skip


def verdict_of(page: str) -> str:
    found = re.search(r'<p class="verdict [\w-]+"><strong>([^<]*)</strong>', page)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("steps", "rises", "values", "expected"),
    [
        (40, True, {}, "Learned."),
        (40, False, {}, "Stuck."),
        (40, True, NOTHING, "Learned nothing."),
        (40, True, {"actor/grad_norm": float("nan")}, "Unstable."),
        (40, True, {"guards/skips": 9}, "Unstable."),
        (5, True, {}, "Too short."),
        (0, True, {}, "Empty."),
    ],
)
def test_the_verdict_follows_from_the_figures(tmp_path, steps, rises, values, expected):
    assert verdict_of(page_of([run_folder(tmp_path / "a", steps, rises=rises, **values)])) == expected


def test_a_reward_that_fell_is_unstable(tmp_path):
    run = run_folder(tmp_path / "a", 100)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in lines[60:]:
        record["reward/mean"] = 0.31
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in lines))
    assert verdict_of(page_of([run])) == "Unstable."


@pytest.mark.parametrize("steps", [20, 50, 80, 200])
def test_noise_alone_is_hardly_ever_unstable(steps):
    """The best of many windows is above the last one by chance; one run in ten was called unstable."""
    report = {"skips": 0, "rollbacks": 0, "headline": "val/accuracy", "evaluations": []}
    report |= {"accuracy_before": None, "accuracy_after": None}
    draws = random.Random(3)
    kinds = [
        verdict(report, [draws.gauss(0.5, 0.05) for _ in range(steps)], nothing_learned=False, broken_steps=0).kind
        for _ in range(200)
    ]
    assert kinds.count("unstable") <= 4


def test_what_users_wrote_stays_text_and_only_our_script_runs(tmp_path):
    page = page_of([run_folder(tmp_path / "a", 20, samples=True, events=KILLED_AND_RESUMED)])
    assert HOSTILE not in page
    assert page.count("&lt;script&gt;") > 10
    assert page.count("<script>") == 1
    assert "<img" not in page
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    for rule in ("default-src &#39;none&#39;", "script-src &#39;sha256-", "style-src &#39;sha256-"):
        assert rule in policy[1]
    assert "unsafe" not in policy[1]
    assert not re.search(r'(?:src|href)="(?!#|data:,)', page), "the page requests nothing"


def test_a_rollout_shows_its_turns_and_what_the_policy_was_unsure_of(tmp_path):
    run = run_folder(tmp_path / "a", 5, samples=True)
    path = run / "samples" / "step_5.jsonl"
    tokens = [["sure", -0.1], [" fair", -0.8], [" odd", -1.0], [" rare", -4.0], ["<b>tool</b>", None], [" last", 0.0]]
    lines = [json.loads(line) | {"tokens": tokens, "length": 7} for line in path.read_text().splitlines()]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines if line["split"] == "rollout"))
    page = page_of([run])
    assert (
        'sure<span class="s1"> fair odd</span><span class="s3"> rare</span>'
        '<span class="env"><b>environment</b> &lt;b&gt;tool&lt;/b&gt;</span> last …</pre>'
    ) in page  # … because only six of seven tokens are stored


def test_the_timeline_has_crashes_kills_and_resumes_with_causes(tmp_path):
    page = page_of([run_folder(tmp_path / "a", 40, events=KILLED_AND_RESUMED)])
    shown = re.findall(r'<span class="event ?\w*">([\w ]+)</span>', page)
    assert shown == ["started", "crashed", "resumed", KILLED, "started", "resumed", "finished"]
    for fact in ("died with SIGKILL", "restart 1 of 3", "Saved 3 checkpoints, the last at step 40", "1 after kills"):
        assert fact in page
    assert page.count('class="mark crash"') == 2


def test_a_start_after_a_recorded_end_is_not_a_kill():
    events = [RunEvent(1.0, "started"), RunEvent(2.0, "stopped"), RunEvent(3.0, "started"), RunEvent(4.0, "finished")]
    assert with_kills(events) == events


def test_several_runs_are_drawn_in_the_same_plots(tmp_path):
    runs = [run_folder(tmp_path / name / "a", 20, samples=True) for name in ("x", "y")]
    page = page_of(runs)
    assert run_names(runs) == ["x/a", "y/a"]
    assert page.count('data-label="x/a: held-out') == page.count('data-label="y/a: held-out')
    assert (
        page.count('data-label="x/a: mean of the last 10"') == page.count('data-label="y/a: mean of the last 10"') == 1
    )
    assert page.count('<article class="run"') == 2


def test_each_plot_has_a_table_and_a_name(tmp_path):
    page = page_of([run_folder(tmp_path / "a", 200)])
    figures = re.findall(r"<figure.*?</figure>", page, re.DOTALL)
    assert len(figures) >= 10
    for figure in figures:
        assert 'role="img" aria-label="' in figure
        assert figure.count("<tr>") >= 6
    titles = [re.findall(r"<figcaption>([^<]+)", figure)[0].strip() for figure in figures]
    assert len(set(titles)) == len(titles)


def test_a_long_run_is_small_and_quick(tmp_path):
    run = run_folder(tmp_path / "a", 10_000, samples=True)
    started = time.process_time()
    page = page_of([run])
    assert len(page.encode()) < 1_000_000
    assert time.process_time() - started < 20


def test_a_downsampled_curve_keeps_every_extreme():
    curve = Curve()
    for step in range(100_000):
        curve.add(step, 7.0 if step == 54_321 else -7.0 if step == 12_345 else 0.0)
    points = curve.points()
    assert len(points) <= 2 * COLUMNS + 2
    assert (points[0][0], points[-1][0]) == (0, 99_999)
    assert (54_321, 7.0) in points
    assert (12_345, -7.0) in points
    assert [step for step, _ in points] == sorted({step for step, _ in points})


def test_the_running_mean_of_a_long_run_is_of_all_its_steps(tmp_path):
    run = run_folder(tmp_path / "a", 0)
    records = ({"step": step, "reward/mean": float(step % 10 == 0)} for step in range(1, 20_001))
    (run / HISTORY).write_text("".join(f"{json.dumps(record)}\n" for record in records))
    page = page_of([run])
    low, high, bottom, top = map(float, re.findall(r'data-scales="\S+ \S+ (\S+) (\S+) \S+ \S+ (\S+) (\S+)"', page)[0])
    drawn = re.findall(r'data-label="mean of the last 10" d="M([^"]+)"', page)[0]
    ends = [float(place.split()[1]) for place in drawn.split("L")[10:]]
    means = [low + (y - bottom) / (top - bottom) * (high - low) for y in ends]
    assert means == pytest.approx([0.1] * len(means), abs=0.01), "one step in ten has the reward 1"


def test_metric_names_with_lone_surrogates_are_written(tmp_path, capsys):
    run = run_folder(tmp_path / "a", 0)
    values = {"step": 1, "val/accuracy": 0.5, "val-core/sums\ud800/acc/mean@1": 0.5, "val-core/b/acc/mean@1": 0.5}
    (run / HISTORY).write_text(json.dumps(values) + "\n")
    assert main([str(run)]) == EXIT_DONE
    assert "sums" in (run / "report" / "report.html").read_text()


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.2, 870.0), (1e-9, 3e-9), (5.0, 5.0), (-1e12, 1e12)])
def test_ticks_are_few_and_inside(low, high):
    found = ticks(low, high, 5)
    assert 1 <= len(found) <= 6
    assert all(low - 1e-9 * abs(high) <= tick <= high + 1e-9 * abs(high) for tick in found)


def test_a_short_run_has_whole_steps_and_labels_that_differ():
    drawn = plot([Line("a", [(1, 4.37e-7), (2, 4.55e-7)])], "a")
    labels = re.findall(r'text-anchor="(\w+)">([^<]*)<', drawn)
    assert [label for anchor, label in labels if label in ("1", "2") or "." not in label] == ["1", "2"]
    values = [label for _, label in labels if "e-7" in label]
    assert len(values) == len(set(values)) > 2


def test_the_command_writes_the_page_and_names_mistakes(tmp_path, capsys):
    run = run_folder(tmp_path / "a", 5)
    assert main([str(run)]) == EXIT_DONE
    assert (run / "report" / "report.html").is_file()
    (tmp_path / "none").mkdir()
    assert main([str(tmp_path / "none"), str(run)]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, "none", "not a run directory")
    assert main([str(run), str(tmp_path / "none" / ".." / "a")]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, "same run", "once")
    assert main([str(run), "--output", str(tmp_path / "a" / "metrics.jsonl" / "x.html")]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, "--output=FILE.html")


@pytest.mark.parametrize("line", [b"{\n", b'{"step": 1, "actor/loss": "x"}\n', b"\xff\n"])
def test_an_unreadable_history_line_has_one_message(tmp_path, capsys, line):
    run = run_folder(tmp_path / "a", 5)
    path = run / "metrics.jsonl"
    path.write_bytes(line + path.read_bytes())
    assert main([str(run)]) == EXIT_USER_ERROR
    says(capsys.readouterr().err, str(run))
    assert not (run / "report").exists()


def test_a_page_that_fails_costs_a_line_at_the_end_of_a_run(tmp_path, caplog):
    run = run_folder(tmp_path / "a", 5, samples=True)
    (run / "samples" / "step_5.jsonl").write_text("torn")
    assert "5 in" in write_report(run)
    assert (run / "report" / "report.json").is_file()
    says(caplog.text, "report.html is not written", "step_5.jsonl", "python -m rlhf.report")


def test_a_page_that_exceeds_its_deadline_raises_timeout_error(tmp_path):
    with pytest.raises(TimeoutError):
        Deadline(0.0).check()
    with pytest.raises(TimeoutError):
        page_of([run_folder(tmp_path / "a", 2000)], 0.0)


def test_events_hide_secrets_and_survive_a_torn_line_and_a_full_disk(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MY_TOKEN", "not-for-everyone")
    record_event(tmp_path, "failed", cause="login with not-for-everyone failed")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": 1.0, "ev\n[]\n')
    record_event(tmp_path, "started")
    assert [(event.kind, event.cause) for event in read_events(tmp_path)] == [
        ("failed", "login with REDACTED failed"),
        ("started", ""),
    ]
    record_event(tmp_path / "missing", "started")
    assert "not recorded" in caplog.text
