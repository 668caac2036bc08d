"""Which processes make up a run, and what a process that is alone agrees on with itself."""

import pytest

from longstraw_jax import launch

SLURM = {"SLURM_STEP_NUM_TASKS": "32", "SLURM_PROCID": "5", "SLURM_NTASKS": "32"}
GKE = {"TPU_WORKER_HOSTNAMES": "a-0.s,a-1.s,a-2.s", "TPU_WORKER_ID": "2"}
FLAGS = {"coordinator": "host-0:1234", "processes": 4, "process": 3}


@pytest.mark.parametrize(
    "environment, flags, want",
    [
        ({}, {}, None),
        (SLURM, {}, launch.Cluster("slurm", 32, 5, None)),
        (GKE, {}, launch.Cluster("gke", 3, 2, None)),
        ({}, FLAGS, launch.Cluster("flags", 4, 3, "host-0:1234")),
        (SLURM, FLAGS, launch.Cluster("flags", 4, 3, "host-0:1234")),  # what is said beats what is found
        ({"SLURM_NTASKS": "32", "SLURM_PROCID": "0"}, {}, None),  # a batch script without srun is one process
        ({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, {}, None),
    ],
)
def test_a_cluster_is_found_in_the_flags_or_the_environment(environment, flags, want):
    assert launch.find_cluster(environment, **flags) == want


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"coordinator": None}, "--coordinator not given; accepted: all of --coordinator, --num_processes"),
        ({"processes": None, "process": None}, "--num_processes, --process_id not given"),
        ({"coordinator": "host"}, "coordinator='host'; accepted: host:port"),
        ({"processes": 0}, "num_processes=0; accepted: at least 1"),
        ({"process": 4}, "process_id=4; accepted: 0 to 3"),
        ({"process": -1}, "process_id=-1; accepted: 0 to 3"),
    ],
)
def test_flags_that_name_no_process_are_refused(changes, said):
    with pytest.raises(launch.LaunchError) as error:
        launch.find_cluster(SLURM, **FLAGS | changes)
    assert said in str(error.value)


@pytest.mark.parametrize(
    "environment, said",
    [
        ({"SLURM_STEP_NUM_TASKS": "32"}, "SLURM_PROCID='' in the environment; accepted: 0 to 31"),
        (SLURM | {"SLURM_PROCID": "32"}, "SLURM_PROCID='32' in the environment; accepted: 0 to 31"),
        ({"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS='many' in the environment; accepted: a whole number"),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID='' in the environment; accepted: 0 to 1"),
    ],
)
def test_an_environment_that_names_no_process_is_refused(environment, said):
    with pytest.raises(launch.LaunchError) as error:
        launch.find_cluster(environment)
    assert said in str(error.value)


def test_a_process_that_is_alone_joins_nothing_and_is_the_first():
    launch.join(None)
    assert launch.is_first() and not launch.joined()
    assert launch.exchange({"a": 1}) == [{"a": 1}]
    launch.check_same("x", [1, 2])

    def fails():
        raise OSError("no space")

    with pytest.raises(OSError, match="^no space$"):
        launch.on_first(fails)
    assert launch.on_first(lambda: 7) == 7
