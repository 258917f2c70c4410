"""What stands for Python in tests is one: arguments, folder, environment, ends and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launching import ROOT, environment, run, run_cold
from tests.warm_python import warm_python

SEEN = """
import json, os, sys
print(json.dumps([sys.argv, os.getcwd(), sys.path[:2], os.environ["MARK"],
                  "torch" in sys.modules, sys.modules["dit.train.step"].__file__]))
print("to the other", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.slow
def test_a_script_sees_what_python_gives_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SEEN)
    given = {"MARK": "here", "PYTHONPATH": str(tmp_path / "more")}
    done = run([sys.executable, str(script), "one", "--two"], cwd=tmp_path, env=given)
    argv, folder, path, mark, has_torch, ours = json.loads(done.stdout)
    assert done.returncode == 3 and done.stderr == "to the other\n"
    assert argv == [str(script), "one", "--two"] and folder == str(tmp_path) and mark == "here"
    assert path == [str(tmp_path), str(tmp_path / "more")]
    assert has_torch and ours == str(ROOT / "dit/train/step.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-c", "import sys; sys.exit('no')"], 1, "no\n"),
        (["-W", "ignore", "-c", "import warnings; warnings.warn('seen')"], 0, ""),
        (["-m", "json.tool", "--help"], 0, ""),
        (["-c", "raise KeyError('why')"], 1, "KeyError: 'why'\n"),
        (["-c", "import os; os.kill(os.getpid(), 9)"], -9, ""),
    ],
)
def test_programs_end_as_python_lets_them(words: list[str], code: int, said: str) -> None:
    done = run([sys.executable, *words])
    assert done.returncode == code and done.stderr.endswith(said)
    assert said or not done.stderr


@pytest.mark.slow
def test_a_limit_of_the_shell_holds() -> None:
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_FSIZE)[0])"
    done = run(["bash", "-c", f'ulimit -f 8; {warm_python()} -c "{code}"'])
    assert done.stdout == "8192\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_ends_with_its_client(tmp_path: Path, number: signal.Signals) -> None:
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    words = [warm_python(), "-c", f"{code}; time.sleep(100)"]
    with subprocess.Popen(words, env=environment()) as client:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        client.send_signal(number)
        assert client.wait(20) == -number
    program = int((tmp_path / "pid").read_text())
    for _ in range(200):
        try:
            os.kill(program, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    pytest.fail("the program goes on")


@pytest.mark.slow
def test_all_workers_of_a_run_ask_one_server() -> None:
    words = [sys.executable, "-c", "from tests.warm_python import *; print(warm_python())"]
    assert run_cold(words).stdout == f"{warm_python()}\n"


def test_the_server_ends_with_the_tests(tmp_path: Path) -> None:
    code = "from tests.warm_python import *; Server(sys.argv[1], int(sys.argv[2])).serve()"
    with subprocess.Popen(["sleep", "100"]) as tests:
        words = [sys.executable, "-c", code, str(tmp_path / "server"), str(tests.pid)]
        with subprocess.Popen(words, cwd=ROOT) as server:
            while not (tmp_path / "server").exists():
                time.sleep(0.01)
            assert server.poll() is None
            tests.kill()
            assert server.wait(20) == 0


@pytest.mark.slow
def test_what_one_program_has_counted_the_next_reads() -> None:
    code = """
from dit.config_loading import default_config
from dit.sizing.flops import pass_work
from dit.sizing.meta_network import stage_on_meta
from unittest.mock import patch
with patch("dit.sizing.count_work.stage_on_meta", wraps=stage_on_meta) as built:
    print(pass_work(default_config().model), built.call_count)
"""
    counted, again = (run([sys.executable, "-c", code]).stdout.split() for _ in range(2))
    assert counted[:-1] == again[:-1] and again[-1] == "0"
