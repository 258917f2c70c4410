"""The variables of a launcher: what is missing or wrong is named before anything waits."""

from __future__ import annotations

import socket
from datetime import timedelta
from unittest import mock

import pytest
import torch

from data_prep.engine import ranks
from dit.convert import cli
from dit.distributed import process_groups
from dit.distributed.entry import run
from dit.launched import (
    _STARTERS,
    FIVE,
    LaunchError,
    LauncherWatch,
    NoAnswerError,
    check_launch,
    local_rank,
    meet,
)
from dit.models.dit.family import DitConfig
from recipes import check_layouts, pretrain_dit

WHOLE = dict(zip(FIVE, ("1", "2", "1", "localhost", "29500"), strict=True))


@pytest.fixture
def launched(monkeypatch):
    """Sets variables, and no other ones of a launcher."""

    def launch(**variables: str) -> None:
        theirs = [name for names in _STARTERS.values() for name in names]
        for name in (*FIVE, "TORCHELASTIC_USE_AGENT_STORE", *theirs):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    launch()
    return launch


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"LOCAL_RANK": "3"},
        {"RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"WORLD_SIZE": ""},
        {"MASTER_ADDR": "node-1", "MASTER_PORT": "none"},
    ],
)
def test_one_process_needs_none(launched, variables):
    launched(**variables)
    check_launch()
    assert local_rank() == 0


@pytest.mark.parametrize("join", ["train", "convert"])
def test_one_process_looks_for_nobody(launched, monkeypatch, join):
    """At the address of another job, whose name nobody knows any more, it would wait for long."""
    launched(
        **WHOLE
        | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        | {"MASTER_ADDR": "no.such.host.invalid"}
    )
    joined = mock.Mock()
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    monkeypatch.setattr("torch.distributed.init_process_group", joined)
    if join == "train":
        limit = timedelta(seconds=9)
        process_groups._join_group(torch.device("cpu"), limit, limit)
    else:
        cli._start()
    assert joined.call_args.kwargs["init_method"] == "tcp://127.0.0.1:0"


def test_all_five_are_taken(launched):
    launched(**WHOLE)
    check_launch()
    assert local_rank() == 1


@pytest.mark.parametrize("missing", FIVE)
def test_what_is_set_and_what_is_missing_is_named(launched, missing):
    there = {name: value for name, value in WHOLE.items() if name != missing}
    launched(**there)
    with pytest.raises(LaunchError) as caught:
        check_launch()
    said = str(caught.value)
    assert said.startswith(" ".join(f"{name}={value}" for name, value in there.items()))
    assert f"needs {missing} as well" in said and "torch.distributed.run" in said


@pytest.mark.parametrize(
    ("variables", "remedy"),
    [
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"},
            "srun starts set RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS"
            " LOCAL_RANK=$SLURM_LOCALID, and MASTER_ADDR",
        ),
        (
            {f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "SIZE", "LOCAL_RANK")},
            "mpirun starts set RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE",
        ),
    ],
)
def test_a_starter_that_has_other_names_is_named_with_them(launched, variables, remedy):
    launched(WORLD_SIZE="2", **variables)
    with pytest.raises(LaunchError) as caught:
        check_launch()
    assert remedy in str(caught.value)


SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}


@pytest.mark.parametrize("variables", [SRUN, MPIRUN], ids=["srun", "mpirun"])
def test_one_of_several_processes_of_a_starter_is_refused(launched, variables):
    launched(**variables)
    with pytest.raises(LaunchError) as caught:
        check_launch()
    (size,) = (name for name in variables if name.endswith(("NUM_TASKS", "SIZE")))
    said = str(caught.value)
    assert said.startswith(f"{size}=2: ") and f"WORLD_SIZE=${size}" in said
    assert "`export WORLD_SIZE=1`" in said
    launched(**variables, WORLD_SIZE="1")
    check_launch()
    launched(**variables | WHOLE)  # of torch.distributed.run inside
    check_launch()


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # the shell of sbatch
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4"},
        {"OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_one_process_of_a_starter_is_alone(launched, variables):
    launched(**variables)
    check_launch()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"RANK": "abc"}, "RANK=abc is not a whole number"),
        ({"RANK": "-1"}, "RANK=-1 is not a whole number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is not a whole number of at least 1"),
        ({"WORLD_SIZE": "2.0"}, "WORLD_SIZE=2.0 is not a whole number"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK=x is not a whole number"),
        ({"RANK": "2"}, "RANK=2 must be from 0 to 1, below WORLD_SIZE=2"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 must be below WORLD_SIZE=2"),
        ({"MASTER_PORT": "99999999"}, "MASTER_PORT=99999999 must be from 1 to 65535"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 must be from 1 to 65535"),
    ],
)
def test_a_wrong_value_is_named(launched, wrong, said):
    launched(**WHOLE | wrong)
    with pytest.raises(LaunchError) as caught:
        check_launch()
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    "start",
    [
        lambda: pretrain_dit.main(["--mock"]),
        lambda: check_layouts.main([]),
        lambda: process_groups.start_processes(seed=1, model=DitConfig()),
        cli._start,
        ranks.join,
    ],
    ids=["pretrain", "check_layouts", "start_processes", "convert", "data_prep"],
)
def test_whatever_starts_ranks_says_so_on_every_rank(launched, capfd, monkeypatch, start):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    launched(RANK="1", WORLD_SIZE="2")
    assert run(start) == 1
    assert capfd.readouterr().err.startswith("error: RANK=1 WORLD_SIZE=2: a run of several")


def test_a_launcher_has_died_where_the_parent_is_another_process(launched, monkeypatch):
    """Without its store, which another node may keep."""
    launched(**WHOLE)
    watch = LauncherWatch(pytest.fail)  # which has no thread without a launcher's store
    assert watch._dead(1) == ""
    monkeypatch.setattr("os.getppid", lambda: 1)
    assert watch._dead(1).startswith("the launcher (process ")


@pytest.mark.parametrize("stopped", [True, False])
def test_a_first_process_that_never_answers_is_named_in_time(launched, capfd, monkeypatch, stopped):
    """Also where its machine takes the connection and says nothing."""
    # Another test of this process may have met others, and `run` would leave it.
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        if stopped:
            port.listen()
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.getsockname()[1])}
        launched(**WHOLE | place)
        with pytest.raises(NoAnswerError) as caught:
            meet(timedelta(seconds=1))
    said = "rank 0 did not answer at MASTER_ADDR:MASTER_PORT={MASTER_ADDR}:{MASTER_PORT} within 1 s"
    assert str(caught.value).startswith(said.format(**place))
    assert run(mock.Mock(side_effect=caught.value)) == 1
    assert "error: rank 0 did not answer" in capfd.readouterr().err  # though this is rank 1


def test_a_port_that_is_taken_is_named(launched):
    dual = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_ipv6 else {}
    with socket.create_server(("", 0), **dual) as port:
        taken = str(port.getsockname()[1])
        launched(**WHOLE | {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": taken})
        with pytest.raises(OSError, match=f"127.0.0.1:{taken}: .*choose another port"):
            meet(timedelta(seconds=20))
