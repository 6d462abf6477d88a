"""Tables for terminals: no line is wider than 80 columns, and no word is broken."""

from rlhf.printable import WIDTH, text_table

HEAD = ["run", "steps", "status"]


def test_columns_are_aligned() -> None:
    rows = [HEAD, ["lr=1", "20", "done"], ["longer", "-", "failed (2)"]]
    assert text_table(rows).splitlines() == [
        "run     steps      status",
        "lr=1       20        done",
        "longer      -  failed (2)",
    ]


def test_the_first_column_wraps_between_words() -> None:
    words = [f"actor.optim.lr={number}" for number in range(20)]
    table = text_table([HEAD, [" ".join(words), "20", "done"], ["x", "1", "done"]])
    assert max(map(len, table.splitlines())) <= WIDTH
    assert [word for word in table.split() if word.startswith("actor")] == words
    assert table.splitlines()[1].endswith("   20    done")


def test_a_word_that_is_too_long_loses_its_middle() -> None:
    table = text_table([HEAD, [f"data.train_files={'x' * 100}/sums.jsonl lr=1", "20", "done"]])
    assert max(map(len, table.splitlines())) <= WIDTH
    assert "x/sums.jsonl" in table
    assert "data.train_files=" in table
    assert table.count("…") == 1
    assert table.splitlines()[2].startswith("  lr=1")


def test_columns_that_do_not_fit_follow_below() -> None:
    columns = [f"pass@{number}" for number in range(1, 30)]
    rows = [["target", *columns], ["/a/long/folder/global_step_20", *(f"{n:.3f}" for n in range(29))]]
    table = text_table(rows)
    assert max(map(len, table.splitlines())) <= WIDTH
    blocks = [block.splitlines() for block in table.split("\n\n")]
    assert len(blocks) > 1
    assert {block[1].split()[0] for block in blocks} == {rows[1][0]}
    assert [word for head, _ in blocks for word in head.split()[1:]] == columns
    assert [word for _, row in blocks for word in row.split()[1:]] == rows[1][1:]


def test_an_empty_cell_and_no_rows() -> None:
    assert text_table([HEAD, ["", "1", "done"]]).splitlines()[1] == "         1    done"
    assert text_table([HEAD]) == "run  steps  status"
