"""Shell scripts of other trainers are read as bash reads them, or rejected with one message."""

import subprocess
from pathlib import Path

import pytest

from rlhf.config.translation.foreign_file import of_arguments, read_settings
from rlhf.errors import UserError

SETTINGS = [
    "N=8\ncat <<EOF >x\nN=16\nEOF\nCMD n=$N",
    "cat <<-'E F' <<B >x\n\tN=1\n\tE F\nN=2\nB\nN=3\nCMD n=$N",
    "N=8\ngrep -q x <<< N=9\nCMD n=$N",
    'N=\nCMD n=${N:-8} m="${N-}"',
    ': ${N:=8} ${M:=${L:-a b}}\nCMD n=$N m="$M"',
    "N=8\nCMD 'a=x$N' b=\\$N \"c=\\$N\" d='it'\\''s'",
    "A='a #b'  # a comment\nB=a#b\nCMD a=\"$A\" b=$B c=x#y",
    'A="x y"\nCMD a="$A" b="a\'b" c="a\\"b" d=\'["x", "y"]\'',
    'A=1\nB="${C:-"${A}2"}"\nE=${C:-${D:-x$A}}\nCMD b=$B e=$E f=${A:+yes}',
    'A="n=3 m=4"\nCMD $A',
    "A=1 B=$A\nexport C=3 D=$B\nCMD a=$A b=$B c=$C d=$D",
    "A=3\nB=$((A*2+1))\nC=$(( (A + B) / 2 ))\nX='1+2'\nCMD b=$B c=$C d=$((${A}*${B}%4)) e=$((X*2)) f=$(($X*2))",
    "A=1\nA+=2\nA+=' 3'\nCMD a=\"$A\"",
    "N=8\nN=16 true\nN=4 CMD n=$N",
    "CMD a=1\\\n2 b=3\\\n   c=4 >/dev/null 2>&1 d=5 | tee log e=6",
    "CMD a=1 \\\n  # b=2 \\\n  c=3",
    'case "$1" in\n -h|--help) echo x;;\n (b) echo y;;\nesac\nCMD a=1',
    'if [[ $X == a && (1 == 1) ]]; then echo "a)"; fi\nCMD a=1',
    "for ((i=0;i<2;i++)); do echo $i; done\nfor j in 1 2; do echo $j; done\nN=2\nCMD n=$N",
    "f() { echo hi; }\nfunction g {\n local N=1\n}\nN=3\nf\nCMD n=$N",
    "A=1 && B=2; (cd /; C=4)\nCMD a=$A b=$B",
    "N=8\r\nCMD n=$N\r\n",
    "K=n\nset -euo pipefail\nexport HOME\nCMD $K=3 '' \"$@\"",
]

UNKNOWN = [
    ("N=$(nproc)\nCMD n=$N", "n=$(nproc)"),
    ('CMD n="run_$(date "+%s")"', 'n=run_$(date "+%s")'),
    ("CMD n=`date`", "n=`date`"),
    ("N=$1\nCMD n=$N", "n=$1"),
    ("CMD n=${2:-x}", "n=${2:-x}"),
    ("CMD n=$RANDOM$$", "n=${oc.env:RANDOM}$$"),
    ("CMD n=a{1,2}", "n=a{1,2}"),
    ("CMD n=<(echo x)", "n=<(echo x)"),
    ("CMD n=$'a\\tb'", "n=$'a\\tb'"),
    ("CMD n=$((M * 2))", "n=$((M * 2))"),
    ("CMD n=$((2 - 9 / 2 - 9)) m=$(((1 - 8) / 2))", "m=$(((1 - 8) / 2))"),
    ("A=(1 2)\nCMD n=1 ${A[@]}", "${A[@]} is a shell array"),
    *(
        (f"N=8\n{line}\nCMD n=$N", "n=$N")
        for line in (
            "source settings.sh",
            ". ./settings.sh",
            'eval "N=9"',
            "export $(cat settings)",
            "function f {\n N=16\n}\nf",
            "function f() { N=16; }",
            "function f\n{\nN=16\n}",
            "f() {\n N=16\n}\nf",
            "if true; then N=16; fi",
            "case $X in\n a) N=16;;\n *) N=4;;\nesac",
            '[ -z "$X" ] && { N=16; }',
            '[ -z "$X" ] || N=16',
            "while getopts n: o; do case $o in n) N=$OPTARG;; esac; done",
            "read N < file",
            "for N in 1 2; do echo $N; done",
            "((N++))",
            "declare -i N=4+4",
            "N[0]=9",
            "N=9 &",
            "unset N",
        )
    ),
]


def read(script: str, folder: Path) -> dict[str, object]:
    path = folder / "theirs.sh"
    path.write_bytes(script.replace("CMD", "python3 -m verl.trainer.main_ppo").encode())
    return read_settings(path)


@pytest.mark.parametrize("script", SETTINGS)
def test_settings_are_those_that_bash_passes(script: str, tmp_path: Path) -> None:
    found = read(script, tmp_path)
    program = tmp_path / "python3"
    program.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\0" "$word" >> "$OUT"; done\n')
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "OUT": str(tmp_path / "out")}
    script = (tmp_path / "theirs.sh").read_bytes().replace(b"\r", b"").decode()
    subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, check=False)
    words = (tmp_path / "out").read_text().split("\0")[2:-1]
    assert found == of_arguments(words)
    assert found


@pytest.mark.parametrize(("script", "shown"), UNKNOWN)
def test_a_value_that_only_the_shell_knows_is_rejected(script: str, shown: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        read(script, tmp_path)
    message = str(raised.value)
    assert shown in message
    assert message.isprintable()
    assert "is not known without running the script" in message or "shell array" in message


@pytest.mark.parametrize("script", ["CMD a='x", "CMD a=1\nN=$(date\n", 'CMD "a=`x"', "CMD a ( b )", "CMD a=${x"])
def test_a_script_that_cannot_be_read_is_rejected_with_the_line(script: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"theirs.sh: line {script.count(chr(10)) or 1}: a "):
        read(script, tmp_path)


def test_a_launchers_number_of_processes_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nproc_per_node=.*nvidia-smi.* is not known"):
        read("torchrun --nproc_per_node=$(nvidia-smi -L | wc -l) --node_rank=$1 train.py --num_generations 8", tmp_path)
    found = read("torchrun --nproc_per_node=4 --node_rank=$1 train.py --num_generations 8", tmp_path)
    assert found == {"num_processes": 4, "num_generations": 8}


def test_many_brackets_are_read_in_little_time(tmp_path: Path) -> None:
    for script in ("CMD " + "$(" * 5000, "CMD " + '"$(a)' * 5000, "CMD a=" + "${b:-" * 5000, "CMD " + "{a," * 5000):
        with pytest.raises(UserError):
            read(script, tmp_path)
